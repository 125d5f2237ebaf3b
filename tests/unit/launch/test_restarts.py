from __future__ import annotations

import pytest

from hvdtrain.launch.exit_cause import Cause, RankError
from hvdtrain.launch.supervisor import LONG_S, Attempt, judge

KILLED = Cause("rank 1 on host h", 137, 1)
FAILED = Cause("rank 1 on host h", 1, 1)


def attempt(step: int | None, *, cause: Cause = KILLED, seconds: float = 5, error: str = "") -> Attempt:
    return Attempt(cause, seconds, step, RankError(1, "h", f"Traceback\n{error}") if error else None)


def test_after_progress_it_starts_at_once() -> None:
    assert judge([attempt(10)], max_restarts=3).pause_s == 0
    assert judge([attempt(10), attempt(20), attempt(30)], max_restarts=3).pause_s == 0


def test_pauses_grow_without_progress() -> None:
    first, second = (judge([attempt(10)] + [attempt(9)] * n, max_restarts=9).pause_s for n in (1, 2))
    assert first is not None
    assert second is not None
    assert 0 < first < second


def test_restarts_are_counted() -> None:
    assert judge([attempt(10), attempt(20)], max_restarts=2).pause_s is not None
    verdict = judge([attempt(10), attempt(20), attempt(30)], max_restarts=2)
    assert verdict.pause_s is None
    assert verdict.reason == "all 2 restarts are used up"
    assert judge([attempt(10)], max_restarts=0).reason == "--max-restarts is 0"


def test_a_crash_loop_stops_and_shows_its_first_attempt() -> None:
    attempts = [attempt(10), attempt(10), attempt(8), attempt(None)]
    verdict = judge(attempts, max_restarts=99)
    assert verdict.pause_s is None
    assert verdict.first is attempts[1]
    assert "3 attempts in a row" in verdict.reason


def test_the_same_exception_twice_without_progress_is_a_crash_loop() -> None:
    attempts = [attempt(10, cause=FAILED, error="ValueError: boom")] + [
        attempt(10, cause=FAILED, error="ValueError: boom") for _ in range(2)
    ]
    assert judge(attempts[:2], max_restarts=99).pause_s is not None
    assert judge(attempts, max_restarts=99).pause_s is None
    attempts[-1] = attempt(10, cause=FAILED, error="OSError: other")
    assert judge(attempts, max_restarts=99).pause_s is not None


def test_an_attempt_that_took_no_step_made_no_progress() -> None:
    attempts = [attempt(0, cause=FAILED, error="ValueError: boom") for _ in range(2)]
    assert judge(attempts, max_restarts=99).pause_s is None
    assert judge([attempt(0), attempt(0, seconds=LONG_S)], max_restarts=99).pause_s == 0  # its steps are not counted


def test_an_exception_that_names_its_own_rank_is_the_same_on_another() -> None:
    first = attempt(10)
    on_1, on_0 = (Attempt(FAILED, 5, 10, RankError(rank, "h", f"ValueError: on rank {rank}")) for rank in (1, 0))
    assert judge([first, on_1, on_0], max_restarts=99).pause_s is None


def test_progress_ends_a_row_of_failures() -> None:
    assert judge([attempt(10), attempt(10), attempt(10), attempt(11)], max_restarts=99).pause_s == 0


def test_without_any_step_a_long_attempt_counts_as_progress() -> None:
    short, long = attempt(None), attempt(None, seconds=LONG_S)
    assert judge([short] * 3, max_restarts=99).pause_s is None
    assert judge([short, short, long], max_restarts=99).pause_s == 0


@pytest.mark.parametrize("error", ["ModuleNotFoundError: No module named 'x'", "SyntaxError: invalid syntax"])
def test_what_would_fail_again_is_not_tried_again(error: str) -> None:
    assert judge([attempt(None, cause=FAILED, error=error)], max_restarts=9).pause_s is None
    # Once steps were taken, it may be a module that came and went with a network file system.
    assert judge([attempt(5, cause=FAILED, error=error)], max_restarts=9).pause_s is not None


@pytest.mark.parametrize("step", [None, 5])  # an earlier fit of the script may have taken steps
def test_a_folder_in_use_is_not_tried_until_the_other_run_has_ended(step: int | None) -> None:
    error = "hvdtrain.errors.FolderInUseError: Run a (b), process 7 on host h: end that run"
    assert judge([attempt(step, cause=FAILED, error=error)], max_restarts=9).pause_s is None
    error = "hvdtrain.errors.CheckpointError: see FolderInUseError"
    assert judge([attempt(step, cause=FAILED, error=error)], max_restarts=9).pause_s is not None


def test_a_usage_error_is_not_tried_again() -> None:
    assert judge([attempt(None, cause=Cause("rank 0 on host h", 2, 0))], max_restarts=9).pause_s is None


def test_used_up_restarts_show_the_first_of_the_failures_without_progress() -> None:
    attempts = [attempt(10), attempt(20), attempt(20)]
    verdict = judge(attempts, max_restarts=2)
    assert verdict.first is attempts[2]
    attempts = [attempt(10), attempt(10), attempt(9)]
    assert judge(attempts, max_restarts=2).first is attempts[1]
    assert judge(attempts[:2], max_restarts=1).reason == "its only restart is used up"
