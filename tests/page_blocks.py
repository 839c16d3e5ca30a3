"""The Python blocks of a page in docs/ or of README.md, run in order in one scope, and what they print; its tables.

    python tests/page_blocks.py README.md       runs the page, and writes what its blocks print, and its tables

A text block right after a Python block shows what that block prints. Between <!-- FILE 1,3 --> and <!-- end --> are the
rows 1 and 3 of the first table of a committed file.
"""

import io
import re
import sys
from contextlib import redirect_stdout
from pathlib import Path

BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```$(?:\n\n^```text\n(?P<shown>.*?)^```$)?", re.MULTILINE | re.DOTALL)
TABLE = re.compile(r"<!-- (?P<path>\S+\.md) (?P<rows>[\d,]+) -->\n(?P<shown>.*?)<!-- end -->", re.DOTALL)
NUMBER = re.compile(r"\d+(?:\.\d+)?%?")


def run(text: str) -> list[tuple[re.Match[str], str]]:
    """Each block of a page with what it printed."""
    scope: dict[str, object] = {"__name__": "page"}
    printed = []
    for block in BLOCK.finditer(text):
        with redirect_stdout(io.StringIO()) as output:
            exec(compile(block["code"], "<page>", "exec"), scope)
        printed.append((block, output.getvalue()))
    return printed


def agree(shown: str, printed: str) -> bool:
    """Whether two outputs have the same words, and numbers that another machine might print.

    A percentage is an accuracy of some hundred rows after training, which other rounding moves by a few points.
    """
    if NUMBER.sub("0", shown).split() != NUMBER.sub("0", printed).split():
        return False
    pairs = zip(NUMBER.findall(shown), NUMBER.findall(printed), strict=True)
    return all(abs(float(a.rstrip("%")) - float(b.rstrip("%"))) <= (5 if a.endswith("%") else 0.0015) for a, b in pairs)


def rows_of(table: re.Match[str]) -> str:
    """What a table of README.md should be."""
    page = (Path(__file__).parents[1] / table["path"]).read_text(encoding="utf-8")
    head, rule, *rows = re.search(r"(?:^\|.*\n)+", page, re.MULTILINE)[0].splitlines()  # type: ignore[index]
    return "\n".join([head, rule, *(rows[int(number) - 1] for number in table["rows"].split(","))]) + "\n"


def write(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for block, output in reversed(run(text)):
        if block["shown"] is not None:
            text = text[: block.start("shown")] + output + text[block.end("shown") :]
    for table in reversed([*TABLE.finditer(text)]):
        text = text[: table.start("shown")] + rows_of(table) + text[table.end("shown") :]
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        write(Path(name))
