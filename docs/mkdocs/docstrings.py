"""Docstrings as Markdown: doctests and formulas, which Python marks in its own ways, become fenced blocks."""

import re
from typing import Any

import griffe

DOCTEST = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)
FORMULA = re.compile(r"^\.\. math:: (.+(?:\n.+)*)", re.MULTILINE)


class Fenced(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            text = DOCTEST.sub(lambda found: f"```pycon\n{found[0]}\n```", obj.docstring.value)
            obj.docstring.value = FORMULA.sub(lambda found: f"```math\n{found[1]}\n```", text)
