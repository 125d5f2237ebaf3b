"""Divide the layers of a model among stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from torch import nn


def split(layers: Mapping[str, nn.Module], stages: int, at: Sequence[str] = ()) -> list[list[str]]:
    """Return the names of each stage's layers, which follow each other.

    Args:
        layers: by name, in order.
        stages: how many; the largest stage is as small as it can be, in bytes of parameters and buffers.
        at: names of the layers with which the stages after the first begin, instead.

    Raises:
        ValueError: fewer layers with parameters than stages; names that are no layers, or not in order; a stage without
            parameters; a parameter that layers of two stages share.
    """
    names = list(layers)
    trained = [name for name, layer in layers.items() if any(True for _ in layer.parameters())]
    if len(trained) < stages:
        raise ValueError(
            f"Each stage needs a layer with parameters. Received: stages={stages}, and {len(trained)} layers with "
            f"parameters. Use at most {len(trained)} stages, or give the pipeline smaller layers: it divides those of "
            "the nn.Sequential itself"
        )
    begins = _begins(names, stages, at) if at else _smallest([_nbytes(each) for each in layers.values()],
                                                            [name in trained for name in names], stages)  # fmt: skip
    found = [names[first:end] for first, end in pairwise([*begins, len(names)])]
    for stage, part in enumerate(found):
        if not set(part) & set(trained):
            raise ValueError(f"Each stage needs a layer with parameters. Received: stage {stage} of {', '.join(part)}")
    _refuse_shared(layers, found)
    return found


def _begins(names: Sequence[str], stages: int, at: Sequence[str]) -> list[int]:
    unknown = [name for name in at if name not in names]
    places = [names.index(name) for name in at if name in names]
    if unknown or len(at) != stages - 1 or places != sorted(set(places)) or 0 in places:
        raise ValueError(
            f"at= takes the names of {stages - 1} layers, in order: those with which the stages after the first begin. "
            f"Received: at={list(at)} for layers {', '.join(names)}"
        )
    return [0, *places]


def _smallest(sizes: Sequence[int], has_parameters: Sequence[bool], stages: int) -> list[int]:
    """Return where parts begin whose largest one is the smallest possible; each has a layer with parameters.

    best[first] is, for the layers from `first` on, the size of the largest part and where the later parts begin.
    """
    count = len(sizes)
    best: dict[int, tuple[int, list[int]]] = {
        first: (sum(sizes[first:]), []) for first in range(count) if any(has_parameters[first:])
    }
    for _ in range(stages - 1):
        longer: dict[int, tuple[int, list[int]]] = {}
        for first in range(count):
            options = []
            for end in range(first + 1, count):
                if end in best and any(has_parameters[first:end]):
                    largest, later = best[end]
                    options.append((max(sum(sizes[first:end]), largest), [end, *later]))
            if options:
                longer[first] = min(options)
        best = longer
    return [0, *best[0][1]]


def _nbytes(layer: nn.Module) -> int:
    return sum(each.numel() * each.element_size() for each in (*layer.parameters(), *layer.buffers()))


def _refuse_shared(layers: Mapping[str, nn.Module], stages: Sequence[Sequence[str]]) -> None:
    """Raise ValueError if two stages share a parameter, of which each would have a gradient of its own."""
    owner: dict[int, tuple[int, str]] = {}
    for stage, part in enumerate(stages):
        for name in part:
            for own, parameter in layers[name].named_parameters(name):
                first, before = owner.setdefault(id(parameter), (stage, own))
                if first != stage:
                    raise ValueError(
                        f"Stages cannot share a parameter: each would train a copy of its own. Received: {before} of "
                        f"stage {first} is {own} of stage {stage}. Give the layers weights of their own, or put them "
                        "into one stage by at="
                    )
