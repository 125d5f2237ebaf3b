"""A launch command, parsed once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from hvdtrain.launch import arguments
from hvdtrain.system import network


@dataclass(frozen=True)
class LaunchSpec:
    """What is launched, where, and by which launcher."""

    launcher: str = arguments.HOROVODRUN  # or "mpirun"; the program's name where a single rank needs no launcher
    ranks: int = 1
    options: Sequence[str] = ()  # the launcher's own, as the user wrote them
    hosts: Mapping[str, int] = field(default_factory=dict)  # {host: slots}; empty for this host alone
    elastic: bool = False  # hosts may come and go, and the launcher replaces ranks itself
    program: Sequence[str] = ()  # what each rank runs

    @property
    def is_mpirun(self) -> bool:
        """Whether mpirun starts the ranks itself, not for horovodrun."""
        return self.launcher == arguments.MPIRUN

    @property
    def over_gloo(self) -> bool:
        """Whether no mpirun takes part."""
        return self.elastic or (not self.is_mpirun and "--gloo" in self.options)

    @cached_property
    def is_here(self) -> bool:
        """Whether all hosts that were named are this one."""
        return network.is_here(self.hosts)

    @cached_property
    def is_elsewhere(self) -> bool:
        """Whether no rank is on this host."""
        return bool(self.hosts) and not any(network.is_here([host]) for host in self.hosts)

    def option(self, *names: str) -> str | None:
        """Return the value that one of `names` has among the options; None without it."""
        return arguments.value(self.options, *names)

    def option_names(self) -> set[str]:
        """Return all words of the options without their dashes: mpirun takes one dash or two."""
        return {word.lstrip("-") for word in self.options}
