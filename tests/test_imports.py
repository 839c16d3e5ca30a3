"""Importing costs nothing that was not asked for."""

import json
import subprocess
import sys

import pytest

FRAMEWORKS = {
    "torch",
    "jax",
    "tensorflow",
    "keras",
    "sklearn",
    "matplotlib",
    "triton",
    "scipy",
    "typer",
    "rich",
    "optuna",
}


def imported_by(statement):
    """The frameworks among the modules that a fresh interpreter holds after `statement`."""
    code = f"import sys, json\n{statement}\nprint(json.dumps(sorted({{name.split('.')[0] for name in sys.modules}})))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    return FRAMEWORKS & set(json.loads(out))


@pytest.mark.parametrize("module", ["bitempered", "bitempered.core", "bitempered.noise"])
def test_no_framework(module):
    assert imported_by(f"import {module}") == set()


def test_torch_alone():
    assert imported_by("import bitempered.torch") == {"torch"} | imported_by("import torch")
