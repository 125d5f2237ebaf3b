"""What can go wrong while Horovod is built; each error names the thing and what to do next."""

from __future__ import annotations

from hvdtrain.errors import HvdTrainError


class BuildError(HvdTrainError):
    """Any error of `hvdtrain build`."""


class CompileError(BuildError):
    """The compile failed; the message names the log and its first error."""


class LibraryPathError(BuildError):
    """A library of the wheel would load others from a folder in which not only the system can put them."""


class ProofError(BuildError):
    """A two-process allreduce did not come back right."""
