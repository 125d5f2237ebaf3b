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


def assert_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    """Check that bad input is one clear line, and exit status 2."""
    assert plan(monkeypatch, *arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    (line,) = output.err.splitlines()
    assert line.startswith("hvdtrain plan: ")
    assert message in line


def document(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """Return what it prints with --json."""
    assert plan(monkeypatch, *arguments, "--json") == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found
