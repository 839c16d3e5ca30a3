"""What a step adds to the memory of the GPU."""

import torch

_PEAK, _NOW = "requested_bytes.all.peak", "requested_bytes.all.current"


def added_bytes(step):
    """The most bytes that a step requests at once, beside what is there.

    Not `max_memory_allocated`: it counts whole blocks, and a free block is up to 1 MiB larger than what is requested.
    """
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()[_NOW]
    step()
    return torch.cuda.memory_stats()[_PEAK] - before
