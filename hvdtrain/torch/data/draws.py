"""Let torch's samplers and DataLoaders draw under a default device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils.data import DataLoader


def drawing(owner: Any) -> AbstractContextManager[Any]:
    """Within it, torch's default device is that of the generator of `owner`, a sampler or a DataLoader; else the host.

    torch draws on the default device. There a generator of the host is refused, and ranks whose generators of the host
    are alike do not draw alike.
    """
    generator = getattr(owner, "generator", None)
    wanted = generator.device if isinstance(generator, torch.Generator) else torch.device("cpu")
    return nullcontext() if torch.get_default_device() == wanted else wanted


def iterate(loader: DataLoader[Any]) -> Iterator[Any]:
    """Begin to iterate a loader, which draws its order and its workers' seed; see `drawing`."""
    with drawing(loader):
        return iter(loader)


def sampling(sampler: Any) -> AbstractContextManager[Any]:
    """See `drawing`; within it, a sampler of the user's own finds the default device as it is."""
    while hasattr(sampler, "sampler"):  # a BatchSampler's
        sampler = sampler.sampler
    return drawing(sampler) if type(sampler).__module__.startswith("torch.utils.data") else nullcontext()
