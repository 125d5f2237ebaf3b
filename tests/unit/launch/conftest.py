from __future__ import annotations

import pytest

from hvdtrain.system import open_mpi


@pytest.fixture(autouse=True)
def open_mpi_4(monkeypatch: pytest.MonkeyPatch) -> None:
    """Marks are as Open MPI 4 prints them, whichever is installed."""
    monkeypatch.setattr(open_mpi, "spaces_marks", lambda: False)
    monkeypatch.setattr(open_mpi, "mixes_lines", lambda: False)
