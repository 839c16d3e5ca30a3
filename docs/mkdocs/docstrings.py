"""Docstrings as Markdown: doctests and formulas become fenced blocks."""

import re
from typing import Any

import griffe

DOCTEST = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)
NAMES = re.compile(r"^ +\w+(?:, \w+)+:", re.MULTILINE)
FORMULA = re.compile(r"^\.\. math:: (.+(?:\n.+)*)", re.MULTILINE)


class Fenced(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            # Several names share a description. After a common space the second would
            # be read as the type of the first.
            text = NAMES.sub(
                lambda found: found[0].replace(", ", ",\N{NO-BREAK SPACE}"),
                obj.docstring.value,
            )
            text = DOCTEST.sub(lambda found: f"```pycon\n{found[0]}\n```", text)
            obj.docstring.value = FORMULA.sub(
                lambda found: f"```math\n{found[1]}\n```", text
            )
