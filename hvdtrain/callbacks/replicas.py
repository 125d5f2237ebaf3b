"""Do all ranks hold the same? One small exchange says whether, a second one what differs and on which ranks."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdtrain.adapter import State
from hvdtrain.distributed import checksums
from hvdtrain.distributed.world import World

SETTINGS = "the optimizer's settings"  # what stands for State.meta beside the tensors
_NAMED = 8  # ranks that a message lists one by one


@dataclass(frozen=True)
class Divergence:
    """What is not equal on all ranks.

    Attributes:
        tensor: the first that differs, in the model's order.
        ranks: those that hold another one than most; without a majority, all of them.
        root_is_odd: whether rank 0 is in a minority, with this tensor or a later one.
        text: all of it in words, with hosts.
    """

    tensor: str
    ranks: tuple[int, ...]
    root_is_odd: bool
    text: str


def digests(state: State, *, settled: bool) -> dict[str, bytes]:
    """Return the digest of each tensor that ranks hold alike, and of the settings, by name.

    Args:
        state: views suffice: it is read before this returns.
        settled: whether `Adapter.settle` made equal what each rank changes on its own; if not, that is left out.
    """
    named = {
        name: checksums.of_array(array)
        for name, array in state.arrays.items()
        if settled or name not in state.unsettled
    }
    return named | {SETTINGS: checksums.of_json(state.meta)}


def equal(mine: Mapping[str, bytes], *, world: World, figures: Sequence[int] = ()) -> tuple[bool, list[int]]:
    """Return whether all ranks gave equal digests, and the largest of each figure over ranks.

    One allreduce of a few words: at the maximum a value and its complement meet only where all ranks gave it.

    Args:
        mine: this rank's digests.
        world: the ranks.
        figures: whole numbers that travel along.
    """
    ours = np.frombuffer(checksums.combined(mine), np.int64)
    largest = world.allreduce(np.concatenate([ours, ~ours, np.array(figures, np.int64)]), "max", name="sync")
    return bool((largest[:2] == ~largest[2:4]).all()), [int(each) for each in largest[4:]]


def difference(mine: Mapping[str, bytes], *, world: World) -> Divergence:
    """Return what differs; for all ranks, once `equal` has said False on them."""
    report = {"host": socket.gethostname(), "digests": {name: each.hex() for name, each in mine.items()}}
    return describe(world.allgather_object(report, name="desync"))


def describe(reports: Sequence[Mapping[str, Any]]) -> Divergence:
    """Compare the ranks' digests, in rank order, and say what differs.

    Raises:
        ValueError: nothing does.
    """
    names = dict.fromkeys(name for report in reports for name in report["digests"])
    groups = {name: _groups([report["digests"].get(name) for report in reports]) for name in names}
    differing = {name: each for name, each in groups.items() if len(each) > 1}
    if not differing:
        raise ValueError(f"the digests of {len(reports)} ranks do not differ")
    tensor, first = next(iter(differing.items()))
    odd = _odd(first, len(reports))
    root_is_odd = any(0 in _odd(each, len(reports)) for each in differing.values())
    hosts = [report["host"] for report in reports]
    missing = [rank for rank, report in enumerate(reports) if tensor not in report["digests"]]
    if missing:
        how = f"is missing on {_ranks(missing, hosts)}"
    elif odd:
        how = f"on {_ranks(odd, hosts)} differs from that of the other {len(reports) - len(odd)} ranks"
    else:
        how = "differs between " + " and ".join(_ranks(group, hosts) for group in first[:_NAMED])
    ranks = tuple(missing or odd or range(len(reports)))
    count = f"{len(differing)} of {len(groups)} tensors {'differs' if len(differing) == 1 else 'differ'}"
    return Divergence(tensor, ranks, root_is_odd, f"{tensor} {how} ({count})")


def _groups(values: Sequence[Any]) -> list[list[int]]:
    """Return the ranks that hold the same value together; the largest group first, rank 0's first among equals."""
    ranks: dict[Any, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return sorted(ranks.values(), key=lambda group: -len(group))


def _odd(groups: Sequence[Sequence[int]], size: int) -> list[int]:
    """Return the ranks outside the group that more than half of all are in; none where there is no such group."""
    return sorted(rank for group in groups[1:] for rank in group) if 2 * len(groups[0]) > size else []


def _ranks(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    named = ", ".join(f"{rank} ({hosts[rank]})" for rank in ranks[:_NAMED])
    more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {named}{more}"
