"""The page of all names is what scripts/names.py writes, and each of its paths can be imported."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "scripts/names.py"
GET_ALL = """
import importlib, os, sys
os.environ["KERAS_BACKEND"] = "tensorflow"
for path in sys.argv[1:]:
    module, _, name = path.rpartition(".")
    assert callable(getattr(importlib.import_module(module), name)), path
print(len(sys.argv) - 1, "names")
"""


@pytest.fixture
def names() -> ModuleType:
    spec = importlib.util.spec_from_file_location("names", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_names_is_up_to_date(names: ModuleType) -> None:
    assert names.PAGE.read_text(encoding="utf-8") == names.text(), "type: python scripts/names.py"
    assert "| `hvdtrain.Trainer` | Trains a torch.nn.Module or a keras.Model on all ranks. |" in names.text()
    # The package has an `init` and a `run` too, which are others.
    for path in ("hvdtrain.init", "hvdtrain.torch.init", "hvdtrain.keras.elastic.run", "hvdtrain.errors.DesyncError"):
        assert f"| `{path}` |" in names.text()


# In processes of their own: Triton, which comes with torch for GPUs, crashes if TensorFlow was loaded before it.
APART = ("torch", "lightning", "transformers")
HERE = [name for name in APART if importlib.util.find_spec(name)]  # `make models` installs the last two


@pytest.mark.slow
@pytest.mark.parametrize("package", ["others", *HERE])
def test_every_name_can_be_imported_from_the_path_that_the_page_has(names: ModuleType, package: str) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("tensorflow")
    paths = re.findall(r"^\| `(\S+)`", names.PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(paths) > 100
    of = {path: path.split(".")[1] for path in paths}
    tried = [path for path in paths if (of[path] if of[path] in APART else "others") == package]
    done = subprocess.run([sys.executable, "-c", GET_ALL, *tried], capture_output=True, text=True, timeout=100)
    assert done.stdout == f"{len(tried)} names\n", done.stderr
