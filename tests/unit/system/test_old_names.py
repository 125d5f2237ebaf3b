from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from hvdtrain.system import old_names


def _marks(old: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.slow] * (old.startswith(("hvdtrain.keras", "hvdtrain.torch")))  # which import a framework


@pytest.mark.parametrize("old", [pytest.param(old, marks=_marks(old)) for old in sorted(old_names.MOVED)])
def test_a_module_can_be_imported_by_the_name_that_it_had(old: str) -> None:
    module = importlib.import_module(old)
    assert module is importlib.import_module(old_names.MOVED[old])
    assert module.__spec__ is not None
    assert module.__spec__.name == module.__name__ == old_names.MOVED[old]


@pytest.mark.parametrize("new_first", [False, True])
def test_old_and_new_name_are_one_module_in_either_order(new_first: bool) -> None:
    old, new = "import hvdtrain.world as old", "import hvdtrain.distributed.world as new"
    lines = [new, old] if new_first else [old, new]
    code = "; ".join([*lines, "from hvdtrain.world import World", "assert old is new and old.World is World"])
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)
