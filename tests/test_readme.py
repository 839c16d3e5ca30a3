"""The README does what it says: its example runs, and its numbers are those of the committed files."""

import re
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch

from bitempered.torch import bi_tempered_logistic_loss

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_examples_run_as_written():
    codes = [textwrap.dedent(code) for code in re.findall(r"```python\n(.*?)```", README, re.DOTALL)]
    scopes = [{} for _ in codes]
    torch.manual_seed(0)
    for code, scope in zip(codes, scopes, strict=True):
        exec(code, scope)
    scope, linear, scheduled = scopes
    assert (scheduled["criterion"].t1, scheduled["criterion"].t2) == (0.0, 1.75)
    np.testing.assert_allclose(linear["probabilities"].sum(axis=1), 1)
    assert linear["search"].score(linear["X"], linear["y"]) > 0.97  # of the rows it was fitted to
    torch.testing.assert_close(scope["probabilities"].sum(1), torch.ones(32))
    torch.manual_seed(0)
    untrained = torch.nn.Linear(64, 10)  # the same draw as the example's model
    before, after = (
        scope["criterion"](model(scope["inputs"]), scope["labels"]) for model in (untrained, scope["model"])
    )
    assert after < 0.95 * before


@pytest.mark.parametrize("path", re.findall(r"<!-- (\S+\.md) -->", README))
def test_tables_are_those_of_the_committed_files(path):
    """The first table of the file, line by line."""
    (shown,) = re.findall(rf"<!-- {path} -->\n(.*?)<!-- end -->", README, re.DOTALL)
    table = re.search(r"(?:^\|.*\n)+", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)[0]
    assert table.count("\n") > 5
    assert table in shown


def test_every_table_of_numbers_names_its_file():
    rest = re.sub(r"<!-- \S+\.md -->\n.*?<!-- end -->", "", README, flags=re.DOTALL)
    assert rest != README
    assert not re.findall(r"^\|.*\| *[+−-]?\d.*", rest, re.MULTILINE)


def test_links_lead_somewhere():
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", README) if not link.startswith("http")]
    assert links
    for link in links:
        assert (ROOT / link).exists(), link


@pytest.mark.parametrize(
    ("t1", "t2", "classes", "said"), [(0.8, 1.2, 10, 0.4), (0.8, 1.2, 1000, 0.06), (0.5, 4.0, 10, 3e-4)]
)
def test_the_gradient_at_zero_logits_is_smaller_by_the_factor_it_says(t1, t2, classes, said):
    logits = torch.zeros(classes, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(bi_tempered_logistic_loss(logits, torch.tensor(0), t1, t2), logits)
    (of_cross_entropy,) = torch.autograd.grad(torch.nn.functional.cross_entropy(logits, torch.tensor(0)), logits)
    torch.testing.assert_close(gradient, classes ** -(t2 - t1) * of_cross_entropy, rtol=1e-12, atol=0)
    assert classes ** -(t2 - t1) == pytest.approx(said, rel=0.07)  # rounded to the README's one digit
