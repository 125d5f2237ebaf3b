"""`hvdtrain plan` in this process."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from hvdtrain.cli import program


def plan(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str | int | None:
    """Run it and return its exit status or message."""
    monkeypatch.setattr(sys, "argv", ["hvdtrain", "plan", *arguments])
    with pytest.raises(SystemExit) as info:
        program.main()
    return info.value.code


def document(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """Return what it prints with --json."""
    assert plan(monkeypatch, *arguments, "--json") == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found
