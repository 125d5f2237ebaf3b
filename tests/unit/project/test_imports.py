"""Imports by text, which import-linter cannot see."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

import hvdtrain

PACKAGE = Path(hvdtrain.__file__).parent
FRAMEWORKS = re.compile(r"""import_module\(\s*f?["']hvdtrain\.(\{|torch|keras|tensorflow)""")


def test_the_core_imports_frameworks_folders_in_one_place() -> None:
    own = {*(PACKAGE / name for name in ("torch", "keras", "tensorflow")), PACKAGE / "horovod_build" / "added"}
    core = [path for path in PACKAGE.rglob("*.py") if not own & set(path.parents) and path != PACKAGE / "__init__.py"]
    found = {path.relative_to(PACKAGE).as_posix() for path in core if FRAMEWORKS.search(path.read_text())}
    assert found == {"distributed/frameworks.py"}
    quoted = re.compile(r"""["']hvdtrain\.(torch|keras)\.\w+["']""")
    named = [path for path in core if quoted.search(path.read_text())]
    assert named == [PACKAGE / "system" / "old_names.py"]  # which loads what a user imports


def test_nobody_asks_whether_a_callback_is_a_checkpoint() -> None:
    """A `Checkpoint` gives its options; a subclass, or another callback that saves, needs no case of its own."""
    asks = re.compile(r"isinstance\([^)]*\bCheckpoint\b")
    assert [path for path in PACKAGE.rglob("*.py") if asks.search(path.read_text())] == []


@pytest.mark.parametrize("package", ["hvdtrain.callbacks", "hvdtrain.callbacks.loggers"])
def test_all_classes_are_named_for_who_imports_everything(package: str) -> None:
    module = importlib.import_module(package)
    assert sorted(module.__all__) == sorted(name for name, each in vars(module).items() if isinstance(each, type))
