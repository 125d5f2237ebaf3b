"""The callbacks of a fit: the user's, and those that every run has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvdtrain.callbacks.base import CallbackList
from hvdtrain.callbacks.checkpoint import Checkpoint
from hvdtrain.callbacks.keras_style import as_callback
from hvdtrain.callbacks.loggers.logger import Logger
from hvdtrain.callbacks.progress import Progress
from hvdtrain.callbacks.run_folder import RunFolder
from hvdtrain.callbacks.stragglers import Stragglers
from hvdtrain.callbacks.sync_check import SyncCheck
from hvdtrain.system import scratch


def with_defaults(
    given: Sequence[Any], run_folder: RunFolder | None, checkpoint_dir: str | None, progress: bool
) -> CallbackList:
    """Return the callbacks of a fit: the user's, and a Progress, Stragglers, SyncCheck and RunFolder if there is none.

    While `hvdtrain bench` runs the script, callbacks that write files are left out, and checkpoints go to a temporary
    folder.
    """
    hooks = [as_callback(each) for each in given if not (scratch.is_on() and scratch.is_keras_writer(each))]
    for kind in (*[Progress] * progress, Stragglers, SyncCheck):
        if not any(isinstance(hook, kind) for hook in hooks):
            hooks.append(kind())
    if run_folder is not None and not any(isinstance(hook, RunFolder) for hook in hooks):
        hooks.append(run_folder)
    if scratch.is_on():
        hooks = [hook for hook in hooks if not isinstance(hook, RunFolder | Logger)]
    if checkpoint_dir:
        hooks.append(Checkpoint(checkpoint_dir))
    return CallbackList(hooks)
