"""Check the command line before anything runs."""

from __future__ import annotations

import argparse
import fnmatch
import math
import os
from collections.abc import Sequence
from pathlib import Path

from benchmarks import scaling, slow_links, startup
from benchmarks.steps import Plan
from benchmarks.workloads import LINK_MLP, LINK_MLPS, Workload

SECTIONS = ("sweep", "steps", "startup", "overhead", "scaling", "growth")
# What the other sections measure is fixed: of all workloads and peers, these; nothing where they have their own.
_FIXED: dict[str, dict[str, tuple[str, ...]]] = {
    "startup": {"workload": ("lenet",), "peer": startup.PEERS},
    "overhead": {"workload": (), "peer": ()},
    "scaling": {"workload": scaling.WORKLOADS, "peer": scaling.PEERS},
    "growth": {"workload": (), "peer": ()},
}
_NUMBERS = ("np", "rounds", "launches", "seconds")
_MEASURING = ("workload", "peer", "section", *_NUMBERS, "horovod_python", "quick", "gpu", "link")
# Option -> those that it would have to ignore.
_NO_USE = {
    "show": _MEASURING,
    "gpu": ("peer", "section", "horovod_python", "quick", "link"),
    "link": ("section", "np", "horovod_python", "quick"),
}
_QUICK = {"rounds": 2, "launches": 1, "seconds": 0.3}


class BadInputError(Exception):
    """An option that cannot be satisfied; one line says why."""


def check(options: argparse.Namespace) -> None:
    """Refuse what would be ignored, and numbers that cannot be. Raises BadInputError."""
    for mode, others in _NO_USE.items():
        given = [_option(name) for name in others if getattr(options, name) not in (None, False)]
        if getattr(options, mode) and given:
            raise BadInputError(f"--{mode} has no use for {', '.join(given)}: leave it out")
    for name in _NUMBERS:
        if getattr(options, name) is not None:
            require_positive(_option(name), getattr(options, name))
    python = options.horovod_python
    if python is not None and not (Path(python).parent / "horovodrun").exists():
        raise BadInputError(f"--horovod-python: no horovodrun beside it. Received: {python}")


def require_positive(option: str, value: float) -> None:
    """Raise BadInputError unless a number is above 0 and finite."""
    if not 0 < value < math.inf:
        raise BadInputError(f"{option} must be > 0 and finite. Received: {value}")


def keep_to_cores(ranks: int) -> None:
    """Give this process, and what it starts, a core a rank: peers that share out the cores would take the others, too.

    Raises:
        BadInputError: there are fewer cores than ranks.
    """
    cores = sorted(os.sched_getaffinity(0))
    if ranks > len(cores):
        raise BadInputError(
            f"{ranks} ranks are more than the {len(cores)} cores here: they would share cores, and no figure would "
            "mean anything. Use a smaller --np; the section 'scaling' measures oversubscribed ranks, labelled so."
        )
    os.sched_setaffinity(0, cores[:ranks])


def plan(options: argparse.Namespace) -> Plan:
    """Return how to measure: as asked, and where nothing was asked the default, with --quick a short one."""
    given = {name: getattr(options, name) for name in _NUMBERS if getattr(options, name) is not None}
    ranks = given.pop("np", Plan.ranks)
    return Plan(ranks, horovod_python=options.horovod_python, **{**(_QUICK if options.quick else {}), **given})


def links(options: argparse.Namespace) -> tuple[list[str], list[Workload], list[str]]:
    """Return the links, workloads and peers that --link asks for. Raises BadInputError where they cannot be here."""
    names = choose("link", options.link, tuple(slow_links.LINKS))
    wanted = choose("workload", options.workload or [LINK_MLP.name], [each.name for each in LINK_MLPS])
    workloads = [each for each in LINK_MLPS if each.name in wanted]
    peers = choose("peer", options.peer or ["*"], [p.name for each in workloads for p in slow_links.peers_of(each)])
    if why := slow_links.why_not(names):
        raise BadInputError(f"--link makes two hosts of this one, which is not possible here: {why}")
    return names, workloads, peers


def sections(options: argparse.Namespace) -> list[str]:
    """Return what to measure: all by default, and of named workloads or peers the step times."""
    # What was measured for all must not be replaced by what was measured for a few.
    few = options.quick or options.workload or options.peer
    return choose("section", options.section or (["steps"] if few else ["*"]), SECTIONS)


def check_fixed(options: argparse.Namespace, named: Sequence[str]) -> None:
    """Refuse workloads and peers that one of the sections `named` does not measure. Raises BadInputError."""
    for section in named:
        for what, possible in _FIXED.get(section, {}).items():
            patterns = getattr(options, what)
            if patterns and not any(fnmatch.filter(possible, pattern) for pattern in patterns):
                its = f"{what}s {', '.join(possible)}" if possible else f"a {what} of its own"
                raise BadInputError(f"section {section} has {its}. Received: --{what} {','.join(patterns)}")


def choose(what: str, patterns: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the names that the patterns name. Raises BadInputError for a pattern that names none."""
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise BadInputError(f"no {what} is called {pattern!r}. There are: {', '.join(names)}")
    return [name for name in names if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
