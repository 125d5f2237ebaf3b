"""Build Horovod for the frameworks that are installed, install it, and prove it with a live allreduce."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hvdtrain.installed import built_for

if TYPE_CHECKING:
    from hvdtrain.horovod_build.build import Options as Options
    from hvdtrain.horovod_build.build import build as build

__all__ = ["Options", "build", "built_for"]


def __getattr__(name: str) -> Any:
    if name in ("Options", "build"):
        from hvdtrain.horovod_build import build as module

        return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
