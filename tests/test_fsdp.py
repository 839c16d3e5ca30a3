"""examples/fsdp_text.py: weights spread over processes (FSDP2) or repeated (DDP) train as in one process."""

import pytest
import torch

if not torch.distributed.is_available():
    pytest.skip("this torch is built without torch.distributed", allow_module_level=True)

import fsdp_cases
from processes import run

pytestmark = pytest.mark.slow


def assert_close(weights, expected):
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-10, atol=1e-10, msg=name)


@pytest.mark.parametrize(("world", "kind"), [(2, "ddp"), (4, "fsdp")])  # others: test_team, the next test
def test_ignored_and_weighted_tags_are_counted_over_all_processes(world, kind):
    """The first process has none but ignored tags. Parts differ in size, and their gradients are accumulated."""
    for weight in (None, fsdp_cases.WEIGHT):
        losses, weights = fsdp_cases.reference(weight)
        assert losses[-1] < losses[0]
        for found, of_rank in run(fsdp_cases.steps, world, kind, weight):
            assert found == pytest.approx(losses, rel=1e-10)
            assert_close(of_rank, weights)


def test_another_number_of_processes_continues(tmp_path):
    ((weights, accuracy),) = run(fsdp_cases.train, 1, str(tmp_path / "alone"), 3)
    for world, epochs in ((4, 1), (1, 2), (2, 3)):
        results = run(fsdp_cases.train, world, str(tmp_path / "stopped"), epochs)
    (tmp_path / "stopped" / "epoch-9").mkdir()  # as if stopped while writing
    results += run(fsdp_cases.train, 2, str(tmp_path / "stopped"), 3)
    for of_rank, found in results:
        assert_close(of_rank, weights)
        assert found == accuracy
    assert accuracy > 1.5 / 8  # half as good again as a guess
