"""Build Horovod for the frameworks that are installed, install it, and prove it with a live allreduce.

`build` has the steps; `find` finds what is installed, `changes` changes Horovod's source, `cache` stores wheels.
"""

from __future__ import annotations

from hvdtrain.horovod_build.installed import built_for

__all__ = ["built_for"]
