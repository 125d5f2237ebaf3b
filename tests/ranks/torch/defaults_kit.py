"""torch's default type and default device, changed for a while."""

from __future__ import annotations

from contextlib import contextmanager

import torch

# On a machine without a GPU the device "meta" stands for any default device that is not the model's: what is made there
# has no numbers, and an operation on it and a tensor of the host fails.
DEFAULTS = ("meta", "with meta", torch.bfloat16, torch.float16)


@contextmanager
def default(wanted):
    """Let torch have this default type or device; None: its own."""
    before = torch.get_default_dtype()
    try:
        if wanted == "with meta":
            with torch.device("meta"):
                yield
            return
        if wanted == "meta":
            torch.set_default_device("meta")
        elif wanted is not None:
            torch.set_default_dtype(wanted)
        yield
    finally:
        torch.set_default_dtype(before)
        torch.set_default_device(None)


def assert_equal(found, wanted):
    """Fail unless two results hold the same bits."""
    assert len(found) == len(wanted)
    for index, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True, msg=lambda m, i=index: f"{i}: {m}")


def tensors(net):
    return [value.detach().clone() for value in net.state_dict().values()]
