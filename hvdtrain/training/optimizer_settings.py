"""The optimizer's settings as the script has made them, and those of a checkpoint that a run resumes from."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from hvdtrain.adapter import Adapter

Settings = list[dict[str, Any]]  # one dict a parameter group


class OptimizerSettings:
    """Decides which settings a resumed run uses.

    Attributes:
        used: the settings that the run began with, or has taken from a script since then; checkpoints hold them.
    """

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        self._own: Settings = adapter.settings
        self.used = self._own

    def check(self, override: Collection[str]) -> None:
        """Raise ValueError if a name is no setting of the optimizer."""
        known = sorted({name for group in self._own for name in group})
        if isinstance(override, str) or not set(override) <= set(known):
            raise ValueError(f"override must be a list of names among {known}. Received: override={override!r}")

    def resume(self, saved: Settings, override: Collection[str], *, lr_factor: float, scheduled: bool) -> list[str]:
        """Take the settings in `override` from the script, the others from the checkpoint; return log lines.

        With `scheduled`, a callback sets the learning rate, and says itself which one it uses.
        """
        pairs = [*zip(saved, self._own, strict=True)]
        differing = dict.fromkeys(name for old, own in pairs for name in own if name in old and old[name] != own[name])
        taken = [name for name in differing if name in override]
        self.used = [{**own, **old, **{name: own[name] for name in taken if name in own}} for old, own in pairs]
        if taken:
            factors = {"lr": lr_factor}
            self._adapter.settings = [
                {name: own[name] * factors[name] if name in factors else own[name] for name in taken if name in own}
                for own in self._own
            ]
        lines = []
        for name in differing:
            before, own = _words(saved, name), _words(self._own, name)
            if name in taken:
                lines.append(f"{name} {before} -> {own}: the script's, by override")
            elif name != "lr" or not scheduled:
                lines.append(
                    f"{name} {before}: the checkpoint's, not the script's {own}; fit(override=[\"{name}\"]) takes the "
                    "script's"
                )
        return lines


def _words(settings: Settings, name: str) -> str:
    values = [group.get(name) for group in settings]
    return ", ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in values)
