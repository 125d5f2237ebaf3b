"""Errors that users may catch. Each message says what was received, on which rank, and what to do next."""

from __future__ import annotations


class HvdTrainError(RuntimeError):
    """Base class of hvdtrain's own errors."""


class UsageError(HvdTrainError):
    """A command got wrong arguments. Its message is one line that says what to type; the exit status is 2."""


class HorovodMissingError(HvdTrainError, ImportError):
    """Several processes were launched, but Horovod is not installed for this framework."""


class HorovodMismatchError(HvdTrainError, ImportError):
    """Horovod is installed, but it was built for other versions of the frameworks."""


class EngineConflictError(HvdTrainError):
    """One process requested two engines. Horovod has separate native state for each, and supports one per process."""


class LaunchError(HvdTrainError):
    """The launcher started more ranks than Horovod found. Without this error, each of them would train alone."""


class NotInitializedError(HvdTrainError, ValueError):
    """A rank was requested before `hvdtrain.init` or `hvd.init`. Horovod raises a ValueError there."""

    def __init__(self) -> None:
        super().__init__(
            "Horovod is not initialised on this process. Call hvd.init() at the beginning of the script, before the "
            "model is made; without `import hvdtrain.torch as hvd` (or .keras) the call is hvdtrain.init()."
        )


class RankFailedError(HvdTrainError):
    """A rank of `hvdtrain.run` ended without a result. If the rank raised, this is the cause of its exception.

    Attributes:
        rank: the rank that failed first; None if another process failed first.
    """

    def __init__(self, message: str, *, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class OtherRankError(HvdTrainError):
    """An action that all ranks take together has failed on another rank.

    Attributes:
        rank: the rank that failed; it raises its own error.
        quoted: that error, in one text.
    """

    def __init__(self, rank: int, quoted: str) -> None:
        super().__init__(f"On rank {rank}: {quoted}")
        self.rank = rank
        self.quoted = quoted

    def __reduce__(self) -> tuple[type[OtherRankError], tuple[int, str]]:
        return type(self), (self.rank, self.quoted)


class DesyncError(HvdTrainError):
    """Ranks have different models, weights, data or options, which must be equal on all ranks."""


class NonFiniteError(HvdTrainError):
    """A gradient contains NaN or infinity. The step was not taken."""


class LostShardError(HvdTrainError):
    """A part of a sharded optimizer state has ended with the ranks that held it, in an elastic job; on every rank."""


class CheckpointError(HvdTrainError):
    """A checkpoint is missing, damaged, or of another model."""


class FolderInUseError(CheckpointError):
    """Another run, or another Trainer of this script, has the folder of checkpoints. A restart would not help."""


class PackageMissingError(HvdTrainError, ImportError):
    """A feature needs an optional package that is not installed."""
