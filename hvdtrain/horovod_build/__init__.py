"""Build Horovod for the frameworks that are installed, install it, and prove it with a live allreduce.

`build` holds the steps, `find` what they look for, `changes` what they change, `cache` what they keep.
"""

from __future__ import annotations

from hvdtrain.horovod_build.installed import built_for

__all__ = ["built_for"]
