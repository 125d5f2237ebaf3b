"""Hide frameworks' start-up notes, which each rank prints, so that the training's own lines are visible.

With TF_CPP_MIN_LOG_LEVEL=1, TensorFlow and JAX print only warnings and errors. The notes that TensorFlow 2.21 prints
before it reads the variable are filtered from the output of `import tensorflow`. oneDNN's settings are not touched.

`import hvdtrain` does this, so import it before the framework; `hvdtrain run` does it for any script. HVDTRAIN_QUIET=0,
or the user's TF_CPP_MIN_LOG_LEVEL=0, switches it off.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

QUIET = "HVDTRAIN_QUIET"
LEVEL = "TF_CPP_MIN_LOG_LEVEL"

# A note of absl's log, one of older TensorFlow's, and the line before absl's first note.
_NOTE = (
    r"(I[0-9]{4} [0-9]{2}:[0-9]{2}:|[0-9]{4}-[0-9]{2}-[0-9]{2} [0-9:.]+: I |"
    r"WARNING: All log messages before absl::InitializeLog\(\) is called)"
)
is_note = re.compile(_NOTE).match  # of a line: None for a warning or an error
_FILTER = ("grep", "--text", "--line-buffered", "-vE", f"^{_NOTE}")
_WAIT_S = 2.0

_set_here = False


def begin() -> None:
    """Hide the notes of frameworks that are imported later."""
    global _set_here
    if os.environ.get(QUIET) == "0":
        return
    _set_here = _set_here or LEVEL not in os.environ
    os.environ.setdefault(LEVEL, "1")
    is_there = any(isinstance(each, _TensorFlowFinder) for each in sys.meta_path)
    if wanted() and "tensorflow" not in sys.modules and not is_there:
        sys.meta_path.insert(0, _TensorFlowFinder())


def without_ours(environment: Mapping[str, str]) -> dict[str, str]:
    """Return `environment` without the variable that `begin` has set."""
    return {name: value for name, value in environment.items() if name != LEVEL or not _set_here}


def wanted() -> bool:
    """Return whether notes are hidden."""
    return os.environ.get(QUIET) != "0" and os.environ.get(LEVEL, "1") != "0"


class _TensorFlowFinder:
    """Finds TensorFlow, and nothing else, to filter its output during the import."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return TensorFlow's spec with an import whose output is filtered."""
        spec = PathFinder.find_spec(name, path, target) if name == "tensorflow" else None
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            loader.exec_module = _without_notes()(loader.exec_module)
        return spec


@contextmanager
def _without_notes() -> Iterator[None]:
    """Filter notes from standard error in another process, which outlives a crash and empties the pipe."""
    import subprocess  # not at every program's start

    try:
        os.fstat(2)
        # Its own session: a Ctrl-C must not end it. Its own environment: it must not look like a rank.
        own = {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"}
        listener = subprocess.Popen(_FILTER, stdin=subprocess.PIPE, stdout=2, start_new_session=True, env=own)
    except OSError:  # there is no standard error, or no grep
        yield
        return
    assert listener.stdin is not None
    original = os.dup(2)
    _flush()
    os.dup2(listener.stdin.fileno(), 2)
    listener.stdin.close()
    try:
        yield
    finally:
        _flush()
        os.dup2(original, 2)
        os.close(original)
        with suppress(subprocess.TimeoutExpired):  # a process started meanwhile still writes to it
            listener.wait(_WAIT_S)  # so that output stays in order


def _flush() -> None:
    if sys.stderr is not None:  # as in a program without a console
        sys.stderr.flush()
