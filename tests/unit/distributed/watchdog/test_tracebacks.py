"""Tracebacks with the user's frames."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from hvdtrain.checkpoint import Store
from hvdtrain.data import sharding
from hvdtrain.distributed.agreement import together
from hvdtrain.distributed.watchdog.tracebacks import explain_with, format_error, install
from hvdtrain.distributed.world import SoloWorld


def of(call):
    """Return the traceback of the error that `call` raises."""
    with pytest.raises(Exception) as caught:
        call()
    return format_error(caught.value)


@pytest.fixture
def unexplained():
    """Forget afterwards who explains exceptions."""
    yield
    explain_with(None)


def fail():
    return np.ones(3) @ np.ones(4)


def test_our_frames_between_the_users_are_one_line_unless_debug_is_set(monkeypatch):
    text = of(lambda: together(fail, world=SoloWorld(), name="x"))
    assert text.count("of hvdtrain and Horovod; HVDTRAIN_DEBUG=1 shows all") == 1
    assert "agreement.py" not in text
    assert "in fail\n" in text
    monkeypatch.setenv("HVDTRAIN_DEBUG", "1")
    text = of(lambda: together(fail, world=SoloWorld(), name="x"))
    assert "agreement.py" in text
    assert "..." not in text


def test_the_place_of_an_error_that_is_not_hvdtrains_own_stays():
    text = of(lambda: sharding.shard_indices(None, rank=0, size=1))
    assert "sharding.py" in text


def test_the_place_of_an_error_that_hvdtrain_raises_about_arguments_is_left_out():
    text = of(lambda: sharding.shard_indices(3, rank=2, size=1))
    assert "sharding.py" not in text
    assert "ValueError: rank must be in [0, size)" in text


def test_one_process_shows_its_users_frames_too(monkeypatch, capsys):
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    install()
    with pytest.raises(ValueError, match="rank must be") as caught:
        sharding.shard_indices(3, rank=2, size=1)
    sys.excepthook(caught.type, caught.value, caught.tb)
    assert "of hvdtrain and Horovod; HVDTRAIN_DEBUG=1 shows all" in capsys.readouterr().err


def test_a_hook_of_the_users_stays(monkeypatch):
    mine = print
    monkeypatch.setattr(sys, "excepthook", mine)
    install()
    assert sys.excepthook is mine


def test_what_hvdtrain_raised_its_own_error_from_is_in_its_message_alone(tmp_path):
    (tmp_path / "file").write_text("")
    text = of(lambda: Store(tmp_path / "file" / "runs").check_writable(1))
    assert text.count("Traceback") == 1
    assert text.splitlines()[-1].startswith("hvdtrain.errors.CheckpointError: No checkpoint can be written to")


def test_a_cause_in_the_users_code_is_shown():
    def wrapped():
        try:
            fail()
        except ValueError as error:
            from hvdtrain.errors import HvdTrainError

            raise HvdTrainError("no") from error

    assert of(wrapped).count("Traceback") == 2


def test_an_exception_that_ends_the_process_is_explained_before_it_is_shown(monkeypatch, capsys, unexplained):
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    install()
    explain_with(lambda error: setattr(error, "args", (f"{error}, because of this",)))
    sys.excepthook(ValueError, ValueError("it failed"), None)
    assert "ValueError: it failed, because of this" in capsys.readouterr().err


def test_an_explanation_that_fails_leaves_the_exception_as_it_was(monkeypatch, capsys, unexplained):
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    install()
    explain_with(lambda error: 1 / 0)
    sys.excepthook(ValueError, ValueError("it failed"), None)
    shown = capsys.readouterr().err
    assert shown.endswith("ValueError: it failed\n")
    assert "ZeroDivisionError" not in shown
