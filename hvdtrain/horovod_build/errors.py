"""Errors of Horovod's build; each names the thing that failed and what to do next."""

from __future__ import annotations

from hvdtrain.errors import HvdTrainError


class BuildError(HvdTrainError):
    """Any error of `hvdtrain build`."""


class CompileError(BuildError):
    """The compile failed; the message names the log and its first error."""
