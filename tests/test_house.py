"""Rules of the house that no other tool checks."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MOST_LINES = 600  # as CONTRIBUTING says: a longer file tells two stories


@pytest.mark.parametrize("folder", ["src", "tests", "tests_gpu", "benchmarks", "examples", "docs"])
def test_no_python_file_is_too_long(folder):
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in (ROOT / folder).rglob("*.py")}
    assert lengths
    assert not {str(path): length for path, length in lengths.items() if length > MOST_LINES}
