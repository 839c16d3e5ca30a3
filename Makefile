# make demo, make test: each makes its own .venv and installs what it needs.
PYTHON ?= python3
VENV := .venv/bin

.PHONY: demo test test-gpu lint clean

demo: .venv/installed
	$(VENV)/bitempered compare --out results/demo

test: .venv/installed
	$(VENV)/python -m pytest -n auto

# On a machine with a CUDA device and its own build of torch: no .venv is made.
test-gpu:
	PYTHONPATH=src $(PYTHON) -m pytest tests_gpu

lint: .venv/installed
	$(VENV)/ruff check .
	$(VENV)/ruff format --check .
	$(VENV)/mypy

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(VENV)/python -m pip install --quiet --constraint constraints.txt --editable ".[test]"
	touch $@

clean:
	rm -rf .venv results/demo
