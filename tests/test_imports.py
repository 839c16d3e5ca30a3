"""Importing costs nothing that was not asked for, and what is missing is said in one line."""

import importlib.util
import json
import os
import re
import subprocess
import sys

import pytest

FRAMEWORKS = {
    "torch",
    "torchvision",
    "jax",
    "flax",
    "optax",
    "tensorflow",
    "keras",
    "sklearn",
    "scipy",
    "xgboost",
    "lightgbm",
    "matplotlib",
    "triton",
    "typer",
    "rich",
    "optuna",
}

# What an adapter may import is what its own framework imports, by this statement.
ADAPTERS = {
    "torch": "import torch",
    "jax": "import jax, jax.numpy",
    "keras": "import keras",
    "sklearn": "import sklearn.model_selection, scipy.optimize",
}


# The quickest of Keras's backends; JAX has no release for Python 3.10 that we support.
KERAS_BACKEND = "jax" if importlib.util.find_spec("jax") else "torch"


def python(code):
    environment = os.environ | {"KERAS_BACKEND": KERAS_BACKEND}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)


def imported_by(*statements):
    """The frameworks among the modules that a fresh interpreter holds after each of the statements."""
    show = "print(json.dumps([name.split('.')[0] for name in sys.modules]))"
    done = python("\n".join(["import sys, json", *(f"{statement}\n{show}" for statement in statements)]))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()[-len(statements) :]
    return [FRAMEWORKS & set(json.loads(line)) for line in lines]


@pytest.mark.parametrize(
    "module",
    [
        "",
        ".core",
        ".checks",
        ".encoding",
        ".noise",
        ".schedules",
        ".diagnosis",
        ".audit",
        ".divergences",
        ".numpy",
        ".boosting",
        ".tune",
    ],
)
def test_no_framework(module):
    assert imported_by(f"import bitempered{module}") == [set()]


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_only_its_own_framework(adapter):
    if importlib.util.find_spec(adapter) is None:
        pytest.skip(f"{adapter} is not installed")
    alone, imported = imported_by(ADAPTERS[adapter], f"import bitempered.{adapter}")
    assert adapter in alone
    assert imported == alone


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_what_is_missing_is_said_in_one_line(adapter):
    done = python(f"import sys; sys.modules[{adapter!r}] = None; import bitempered.{adapter}")
    assert done.returncode == 1
    assert re.fullmatch(
        rf'ModuleNotFoundError: bitempered\.{adapter} needs [\w -]+: pip install "[\w -]+>=[\d.]+"( "scipy>=[\d.]+")?',
        done.stderr.splitlines()[-1],
    )
    assert "During handling" not in done.stderr  # nor the import that failed above it
