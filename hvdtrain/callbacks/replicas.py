"""Whether all ranks hold the same state, and if not, what differs."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hvdtrain.adapter import State
from hvdtrain.distributed import checksums
from hvdtrain.distributed.world import World

SETTINGS = "the optimizer's settings"  # the name of State.meta among the tensors
_NAMED = 8  # ranks that a message names


def digests(state: State, *, settled: bool) -> dict[str, bytes]:
    """Return the digest of each tensor and of the settings, by name.

    settled=False leaves out what each rank changes on its own until `Adapter.settle`.
    """
    arrays = {name: array for name, array in state.arrays.items() if settled or name not in state.unsettled}
    tensors = {name: checksums.of_array(array) for name, array in arrays.items()}
    return tensors | {SETTINGS: checksums.of_json(state.meta)}


def equal(mine: Mapping[str, bytes], *, world: World, figures: Sequence[int] = ()) -> tuple[bool, list[int]]:
    """Return whether all ranks' digests are equal, and each figure's maximum over ranks, by one small allreduce.

    The maximum of a value and the maximum of its complement are complements only if all ranks gave the same value.
    """
    ours = np.frombuffer(checksums.combined(mine), np.int64)
    largest = world.allreduce(np.concatenate([ours, ~ours, np.array(figures, np.int64)]), "max", name="sync")
    return bool((largest[:2] == ~largest[2:4]).all()), [int(each) for each in largest[4:]]


def difference(mine: Mapping[str, bytes], *, world: World) -> tuple[str, bool]:
    """Return `describe` of all ranks; a collective call, for when `equal` has returned False."""
    report = {"host": socket.gethostname(), "digests": {name: each.hex() for name, each in mine.items()}}
    return describe(world.allgather_object(report, name="desync"))


def describe(reports: Sequence[Mapping[str, Any]]) -> tuple[str, bool]:
    """Say which tensor differs first, on which ranks and hosts, by each rank's host and digests.

    Returns:
        A message; and whether rank 0 is in a minority, with this tensor or a later one.
    """
    size, hosts = len(reports), [report["host"] for report in reports]
    names = dict.fromkeys(name for report in reports for name in report["digests"])
    groups = {name: _groups([report["digests"].get(name) for report in reports]) for name in names}
    differing = {name: each for name, each in groups.items() if len(each) > 1}
    if not differing:
        raise ValueError(f"the digests of {size} ranks do not differ")
    tensor, first = next(iter(differing.items()))
    minority = _minority(first, size)
    missing = [rank for rank, report in enumerate(reports) if tensor not in report["digests"]]
    if missing:
        how = f"is missing on {_ranks(missing, hosts)}"
    elif minority:
        how = f"on {_ranks(minority, hosts)} differs from that of the other {size - len(minority)} ranks"
    else:
        how = "differs between " + " and ".join(_ranks(group, hosts) for group in first[:_NAMED])
    count = f"{len(differing)} of {len(groups)} tensors {'differs' if len(differing) == 1 else 'differ'}"
    return f"{tensor} {how} ({count})", any(0 in _minority(each, size) for each in differing.values())


def _groups(values: Sequence[Any]) -> list[list[int]]:
    """Return the ranks that hold the same value together; the largest group first, rank 0's first among equals."""
    ranks: dict[Any, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return sorted(ranks.values(), key=lambda group: -len(group))


def _minority(groups: Sequence[Sequence[int]], size: int) -> list[int]:
    """Return the ranks outside the largest group, if more than half of all ranks are in that group."""
    return sorted(rank for group in groups[1:] for rank in group) if 2 * len(groups[0]) > size else []


def _ranks(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    named = ", ".join(f"{rank} ({hosts[rank]})" for rank in ranks[:_NAMED])
    more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {named}{more}"
