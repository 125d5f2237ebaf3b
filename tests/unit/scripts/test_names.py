"""The page of all names is what scripts/names.py writes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[3] / "scripts/names.py"


def test_the_page_of_names_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("names", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    names = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(names)
    assert names.PAGE.read_text(encoding="utf-8") == names.text(), "type: python scripts/names.py"
    assert "| `Trainer` | Trains a torch.nn.Module or a keras.Model on all ranks. |" in names.text()
