"""The errors hvdtrain raises; each message says what was received, on which rank, and what to do next."""

from __future__ import annotations


class HvdTrainError(RuntimeError):
    """Base of every error that hvdtrain raises on its own account."""


class UsageError(HvdTrainError):
    """What was asked of a command cannot be done; one line says why and what to type. The exit status is 2."""


class HorovodMissingError(HvdTrainError, ImportError):
    """Several processes were launched, but Horovod is not installed for this framework."""


class HorovodMismatchError(HvdTrainError, ImportError):
    """Horovod is installed, but was built for other framework versions than the installed ones."""


class EngineConflictError(HvdTrainError):
    """Two engines were asked for in one process; Horovod keeps separate native state for each."""


class LaunchError(HvdTrainError):
    """The launcher announced more ranks than Horovod found: N silent copies, each training alone."""


class DesyncError(HvdTrainError):
    """Ranks that must hold the same thing (model, weights, configuration) do not."""


class NonFiniteError(HvdTrainError):
    """A gradient holds NaN or infinity; weights were not touched by it."""


class CheckpointError(HvdTrainError):
    """A checkpoint is missing, damaged, or of another model."""
