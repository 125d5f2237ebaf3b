"""What can go wrong while Horovod is built; each error names the thing and what to do next."""

from __future__ import annotations

from hvdtrain.errors import HvdTrainError


class BuildError(HvdTrainError):
    """Base of every error of `hvdtrain build`."""


class MissingToolError(BuildError):
    """A program that the build needs (compiler, make, pip, nvcc) is not there."""


class NoFrameworkError(BuildError):
    """Neither torch nor TensorFlow is installed in this environment in a form that Horovod can be built for."""


class UntestedVersionError(BuildError):
    """A framework version older than the tests', or a newer one for which the build or its proof failed here."""


class CacheError(BuildError):
    """No folder for the wheel cache can be written, or others can write to it."""


class SdistError(BuildError):
    """Horovod's sdist cannot be fetched, or has another hash."""


class PatchError(BuildError):
    """A patch, or a file of ours, does not fit the sdist."""


class CompileError(BuildError):
    """The compile failed; the message names the log and its first error."""


class LibraryPathError(BuildError):
    """A library of the wheel would load others from a folder in which not only the system can put them."""


class InstallError(BuildError):
    """pip could not install the wheel."""


class ProofError(BuildError):
    """A two-process allreduce did not come back right."""
