"""Tracebacks and stacks with the user's frames; frames of hvdtrain and Horovod are folded unless HVDTRAIN_DEBUG=1."""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from itertools import groupby
from types import FrameType, TracebackType
from typing import Any

from hvdtrain.errors import HvdTrainError
from hvdtrain.system.settings import DEBUG

PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_LIBRARIES = [sysconfig.get_paths()[name] for name in ("purelib", "platlib")]
_OURS = tuple(os.path.join(path, "") for path in (PACKAGE, *(os.path.join(each, "horovod") for each in _LIBRARIES)))
_NOT_THE_USERS = tuple(os.path.join(path, "") for path in (PACKAGE, sysconfig.get_paths()["stdlib"], *_LIBRARIES))
_explain: Callable[[BaseException], None] | None = None
_FOLDED = f"of hvdtrain and Horovod; {DEBUG}=1 shows all"


def install() -> None:
    """Show an exception that ends this process with our frames folded; a hook of the user's stays."""
    if sys.excepthook is not sys.__excepthook__ or hasattr(sys, "ps1") or sys.flags.interactive:
        return

    def on_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        explain(error)
        text = format_error(error)
        if _FOLDED in text:
            sys.stderr.write(f"{text}\n")
        else:  # Python's own, in colour where it has it
            sys.__excepthook__(kind, error, trace)

    sys.excepthook = on_exception


def explain_with(function: Callable[[BaseException], None] | None) -> None:
    """Call `function` with an exception that ends this process, before it is shown; it may add to the message."""
    global _explain
    _explain = function


def explain(error: BaseException) -> None:
    """Add what is known about an exception to its message; see `explain_with`."""
    if _explain is not None:
        with contextlib.suppress(Exception):  # the exception itself must be shown
            _explain(error)


def is_users(file: str) -> bool:
    """Return whether a source file is the user's own, and of no library."""
    path = os.path.abspath(file)
    libraries = path.startswith(_NOT_THE_USERS) or "site-packages" in path or "dist-packages" in path
    return not libraries and not file.startswith("<")


def format_error(error: BaseException) -> str:
    """Return an exception's traceback, as Python prints it, with our frames folded."""
    found = traceback.TracebackException.from_exception(error)
    if os.environ.get(DEBUG) != "1":
        _fold(found, error)
    return "".join(found.format()).rstrip()


def format_stack(frame: FrameType) -> str:
    """Return the stack of a thread, with our frames folded."""
    stack = traceback.extract_stack(frame)
    return "".join((stack if os.environ.get(DEBUG) == "1" else _Folded(stack)).format())


class _Folded(traceback.StackSummary):
    """A stack that has one line for consecutive frames of ours; the innermost frame stays if `shows_last`."""

    shows_last = False

    def format(self, **options: Any) -> list[str]:
        """Return the lines of each frame, and of each group of frames that is folded."""
        return [*self._lines(**options)]

    def _lines(self, **options: Any) -> Iterator[str]:
        shown = self[-1] if self.shows_last else None
        for is_folded, group in groupby(self, key=lambda each: each is not shown and each.filename.startswith(_OURS)):
            frames = [*group]
            if is_folded:
                count = f"{len(frames)} frame{'s' * (len(frames) > 1)}"
                yield f"  ... {count} {_FOLDED}\n"
            else:
                yield from traceback.StackSummary.from_list(frames).format(**options)


def _fold(found: traceback.TracebackException, error: BaseException) -> None:
    """Fold the stacks of an exception and of its causes.

    What an error of hvdtrain was raised from is left out if no line of the user's is in it: the message says it.
    """
    before, source = found.__cause__ or found.__context__, error.__cause__ or error.__context__
    is_ours = isinstance(error, HvdTrainError)
    if before is not None and source is not None:
        if is_ours and not any(is_users(each.filename) for each in before.stack):
            found.__cause__ = found.__context__ = None
        else:
            _fold(before, source)
    found.stack = folded = _Folded(found.stack)
    # An unexpected error is explained by its place, and an error that we raise by its message.
    folded.shows_last = bool(folded) and not is_ours and not (folded[-1].line or "").startswith("raise ")
