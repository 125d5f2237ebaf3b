from __future__ import annotations

import pytest

from hvdtrain import installed


@pytest.mark.parametrize(
    ("built", "there", "fits"),
    [
        ("2.13.0+cpu", "2.13.0+cpu", True),
        ("2.13.0+cu130", "2.13.0", True),
        ("2.13.0", "2.13.0", True),
        ("2.12.0+cu130", "2.13.0", False),
        ("2.13.0+cpu", "2.13.0+cu130", False),
        ("2.13.0", "2.13.0+cpu", False),
    ],
)
def test_horovod_serves_only_the_version_that_it_was_built_for(
    monkeypatch: pytest.MonkeyPatch, built: str, there: str, *, fits: bool
) -> None:
    monkeypatch.setattr(installed, "built_for", lambda: {"torch": built})
    monkeypatch.setattr(installed, "framework_version", lambda framework: there)
    sentence = installed.mismatch("torch")
    assert (sentence is None) is fits
    if sentence:
        assert there in sentence
