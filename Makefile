# make demo, make test: each makes its own .venv and installs what it needs.
PYTHON ?= python3
VENV := .venv/bin

# Each loss at Adam's default rate, and cross-entropy at its best rate for the last epoch. results/compare has its rows.
DEMO := logistic@0.001,logistic@0.0001,gce:0.7@0.001,sce:0.1:1@0.001,bi-tempered:0.8:1.2@0.001,bi-tempered@0.001

# Keep compiled modules even if the environment says not to: otherwise every pytest process rewrites every test module.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-slow test-portable test-browser test-gpu screenshots gallery notebook lint docs dist clean

demo: .venv/experiments
	$(VENV)/bitempered compare --losses $(DEMO) --noise 0,0.4 --out output/demo

# The verdict in minutes. What takes longer is marked slow.
test: .venv/test
	$(VENV)/python -m pytest -n auto --dist worksteal

test-slow: .venv/test
	$(VENV)/python -m pytest -n auto --dist worksteal -m slow

# The tests that rounding could move, under each instruction set that this CPU has.
test-portable: .venv/test
	$(VENV)/python tests/portable.py

# The playground in Chromium, which must be there: apt-get install chromium
test-browser: .venv/test
	$(VENV)/python -m pytest tests/test_playground_browser.py -m browser

# The pictures of docs/playground.md.
screenshots: .venv/test
	$(VENV)/python tests/playground_pictures.py

# The figures of docs/gallery.md.
gallery: .venv/test
	for name in image table text segmentation many_classes; do \
		$(VENV)/python examples/gallery/$$name.py docs/figures/gallery-$$name.png || exit 1; done

# The outputs of the notebook.
notebook: .venv/test
	$(VENV)/python tests/notebook_cells.py docs/find_wrong_rows.ipynb

# On a machine with a CUDA device and its own build of torch: no .venv is made.
test-gpu:
	PYTHONPATH=src $(PYTHON) -m pytest tests_gpu

lint: .venv/test
	$(VENV)/ruff check .
	$(VENV)/ruff format --check .
	$(VENV)/mypy

# The site, in the folder site. A warning, a link or an anchor that leads nowhere, or anything from the network is an
# error. (With --quiet, --strict would not see the warnings.)
docs: .venv/docs
	NO_MKDOCS_2_WARNING=1 $(VENV)/mkdocs build --strict

# What is uploaded, in the folder dist: the source, a pure wheel, and one with the C kernel, which needs Linux on x86-64
# and a C compiler here, and none where it is installed.
dist: .venv/dist
	rm -rf dist
	$(VENV)/python -m build --no-isolation
	BITEMPERED_WHEEL_KERNEL=1 $(VENV)/python -m build --no-isolation --wheel
	$(VENV)/twine check --strict dist/*

# One stamp for each set of extras: the demo needs less than the tests.
.venv/experiments .venv/test .venv/docs .venv/dist: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(VENV)/python -m pip install --quiet --constraint constraints.txt --editable ".[$(notdir $@)]"
	touch $@

clean:
	rm -rf .venv dist output site
