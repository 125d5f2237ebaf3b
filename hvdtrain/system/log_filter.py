"""Keep frameworks' start-up notes off the screen: they come once a rank, and bury what is said of the training.

TensorFlow and JAX leave out what is less than a warning where TF_CPP_MIN_LOG_LEVEL is 1. TensorFlow 2.21 prints some of
it before it reads that, while its libraries are loaded; this is taken out of what `import tensorflow` writes. Warnings
and errors stay, and nothing that is computed changes: oneDNN stays as it is.

`import hvdtrain` does it, so it must come before the framework's own import; `hvdtrain run` does it for any script.
HVDTRAIN_QUIET=0 leaves everything as frameworks have it, and so does a TF_CPP_MIN_LOG_LEVEL=0 of the user's.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

QUIET = "HVDTRAIN_QUIET"
LEVEL = "TF_CPP_MIN_LOG_LEVEL"

# A note in the form of absl's log, in that of older TensorFlow, and the line by which absl introduces its first one.
_NOTE = (
    r"(I[0-9]{4} [0-9]{2}:[0-9]{2}:|[0-9]{4}-[0-9]{2}-[0-9]{2} [0-9:.]+: I |"
    r"WARNING: All log messages before absl::InitializeLog\(\) is called)"
)
_IS_NOTE = re.compile(_NOTE)
_FILTER = ("grep", "--text", "--line-buffered", "-vE", f"^{_NOTE}")
_WAIT_S = 2.0

_set_here = False


def begin() -> None:
    """Leave out the notes of frameworks that are imported from now on."""
    global _set_here
    if os.environ.get(QUIET) == "0":
        return
    _set_here = _set_here or LEVEL not in os.environ
    os.environ.setdefault(LEVEL, "1")
    if wanted() and "tensorflow" not in sys.modules and not any(isinstance(each, _Finder) for each in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def without_ours(environment: Mapping[str, str]) -> dict[str, str]:
    """Return `environment` as the user has it."""
    return {name: value for name, value in environment.items() if name != LEVEL or not _set_here}


def wanted() -> bool:
    """Return whether notes are to be left out."""
    return os.environ.get(QUIET) != "0" and os.environ.get(LEVEL, "1") != "0"


def is_note(line: str) -> bool:
    """Return whether a line that was printed is a framework's note, not a warning or an error."""
    return _IS_NOTE.match(line) is not None


class _Finder:
    """Finds TensorFlow, and nothing else, to listen while it is imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return where TensorFlow is, as Python finds it, but with an import that is listened to."""
        spec = PathFinder.find_spec(name, path, target) if name == "tensorflow" else None
        if spec is not None and spec.loader is not None and hasattr(spec.loader, "__dict__"):
            loader: Any = spec.loader
            load: Callable[[ModuleType], None] = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                del loader.exec_module
                with _without_notes():
                    load(module)

            loader.exec_module = exec_module
        return spec


@contextmanager
def _without_notes() -> Iterator[None]:
    """Take notes out of what this process writes to its standard error.

    By another process: what is written in the moment of a crash comes through, and nobody waits for a full pipe.
    """
    import subprocess  # not of every program's start

    try:
        kept = os.dup(2)
    except OSError:  # there is no standard error
        yield
        return
    try:
        # In a session of its own: a Ctrl-C is not for it. Nor is this rank's environment: it is no rank.
        own = {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"}
        listener = subprocess.Popen(_FILTER, stdin=subprocess.PIPE, stdout=kept, start_new_session=True, env=own)
    except OSError:  # there is no grep
        os.close(kept)
        yield
        return
    assert listener.stdin is not None
    _flush()
    os.dup2(listener.stdin.fileno(), 2)
    listener.stdin.close()
    try:
        yield
    finally:
        _flush()
        os.dup2(kept, 2)
        os.close(kept)
        try:
            listener.wait(_WAIT_S)  # so that what comes next stands after what came before
        except subprocess.TimeoutExpired:  # a process that was started meanwhile writes to it, and it ends with that
            pass


def _flush() -> None:
    if sys.stderr is not None:
        sys.stderr.flush()
