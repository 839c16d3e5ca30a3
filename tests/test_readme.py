"""The README does what it says: its example runs, and its numbers are those of the committed files."""

import re
from pathlib import Path

import pytest
from page_blocks import BLOCK, agree, run

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def first_table(path):
    return re.search(r"(?:^\|.*\n)+", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)[0].splitlines()


def test_it_is_short():
    assert len(README.encode()) < 8000


def test_the_example_prints_what_it_shows():
    ((block, printed),) = run(README)
    assert printed.count("%") == 2
    assert agree(block["shown"], printed), f"it prints\n{printed}instead of\n{block['shown']}"


def test_the_example_is_that_of_the_site():
    home = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert BLOCK.search(README)[0] == BLOCK.search(home)[0]


@pytest.mark.parametrize("path", re.findall(r"<!-- (\S+\.md) -->", README))
def test_rows_are_those_of_the_committed_files(path):
    """Head and rows of the first table of the file, in its order; some are left out."""
    (shown,) = re.findall(rf"<!-- {path} -->\n(.*?)<!-- end -->", README, re.DOTALL)
    table, lines = first_table(path), shown.splitlines()
    assert lines[:2] == table[:2]
    assert len(lines) >= 5
    places = [table.index(line) for line in lines]
    assert places == sorted(set(places))


def test_no_contender_is_left_out():
    """Whoever leads: all rows with wrong labels are shown."""
    noisy = [line for line in first_table("results/compare/compare.md") if line.startswith("| 40%")]
    assert len(noisy) == 6
    assert "\n".join(noisy) in README


def test_every_table_of_numbers_names_its_file():
    rest = re.sub(r"<!-- \S+\.md -->\n.*?<!-- end -->", "", README, flags=re.DOTALL)
    assert rest != README
    assert not re.findall(r"^\|.*\| *[+−-]?\d.*", rest, re.MULTILINE)


def test_the_time_on_a_cpu_is_the_tables():
    head, _, *rows = ([cell.strip() for cell in line.split("|")] for line in first_table("benchmarks/cpu.md"))
    over = [float(row[head.index("÷ torch")]) for row in rows]
    assert f"{min(over):.1f} to {max(over):.1f} times as long" in README


def test_links_lead_somewhere():
    links = [link for link in re.findall(r"\]\(([^)#\s]+)\)", README) if not link.startswith("http")]
    assert len(links) > 20
    for link in links:
        assert (ROOT / link).exists(), link
