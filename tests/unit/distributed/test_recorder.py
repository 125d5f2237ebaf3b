"""All of a process's time belongs to one part, whoever reports it and from whichever thread."""

from __future__ import annotations

import weakref

import pytest

from hvdtrain.distributed import recorder as recorder_module
from hvdtrain.distributed.recorder import Clock, Recorder, Seconds


@pytest.fixture
def now() -> list[float]:
    return [100.0]


@pytest.fixture
def recorder(now: list[float]) -> Recorder:
    return Recorder(Clock(lambda: now[0]))


def test_a_part_is_the_time_since_the_last_one_ended(recorder: Recorder, now: list[float]) -> None:
    for part, seconds in (("data", 1.0), ("compute", 2.0), ("backward", 4.0), ("other", 8.0), ("outside", 16.0)):
        now[0] += seconds
        recorder.ended(part)  # type: ignore[arg-type]
    now[0] += 99.0  # not ended yet
    assert recorder.read() == Seconds(1.0, 2.0, 4.0, 8.0, 16.0)


@pytest.mark.parametrize(
    ("part", "counted"),
    [
        ("compute", Seconds(compute=3.0, reduction=2.0)),
        ("backward", Seconds(backward=3.0, reduction=2.0)),
        ("data", Seconds(data=3.0, elsewhere=2.0)),
        ("other", Seconds(other=3.0, elsewhere=2.0)),
        ("outside", Seconds(outside=5.0)),
    ],
)
def test_waits_are_no_part_of_what_they_interrupt(
    recorder: Recorder, now: list[float], part: str, counted: Seconds
) -> None:
    now[0] += 1.0
    with recorder.waiting():
        now[0] += 2.0
    now[0] += 2.0
    recorder.ended(part)  # type: ignore[arg-type]
    assert recorder.read() == counted


def test_waits_within_waits_count_once(recorder: Recorder, now: list[float]) -> None:
    with recorder.waiting():
        now[0] += 1.0
        with recorder.waiting():
            now[0] += 2.0
        now[0] += 4.0
    recorder.ended("compute")
    assert recorder.read() == Seconds(reduction=7.0)


def test_a_part_that_ends_while_another_thread_waits_has_only_its_own_time(
    recorder: Recorder, now: list[float]
) -> None:
    now[0] += 1.0
    with recorder.waiting():  # JAX's callback
        now[0] += 2.0
        recorder.ended("data")
        now[0] += 4.0
    now[0] += 8.0
    recorder.ended("compute")
    assert recorder.read() == Seconds(data=1.0, elsewhere=2.0, compute=8.0, reduction=4.0)


def test_a_wait_that_fails_is_over(recorder: Recorder, now: list[float]) -> None:
    @recorder.waiting()
    def collective() -> None:
        now[0] += 1.0
        raise RuntimeError("a rank is gone")

    with pytest.raises(RuntimeError):
        collective()
    now[0] += 2.0
    recorder.ended("compute")
    assert recorder.read() == Seconds(compute=2.0, reduction=1.0)


def test_what_graphs_waited_is_taken_from_compute_and_a_cleared_graph_counts_no_more(
    recorder: Recorder, now: list[float]
) -> None:
    waited = [0.25]
    recorder.note_graph(lambda: waited[0])
    recorder.note_graph(lambda: 1 / 0)
    now[0] += 1.0
    recorder.ended("compute")
    assert recorder.read() == Seconds(compute=0.75, reduction=0.25)
    waited[0] = 0.5
    now[0] += 1.0
    recorder.ended("compute")
    assert recorder.read() == Seconds(compute=1.5, reduction=0.5)


def test_a_graphs_wait_for_data_is_moved_out_of_what_has_not_ended(recorder: Recorder, now: list[float]) -> None:
    now[0] += 5.0
    recorder.move("data", 2.0)
    recorder.move("data", -1.0)  # a clock that was set back
    recorder.ended("compute")
    assert recorder.read() == Seconds(data=2.0, compute=3.0)


def test_steps_are_told_apart(recorder: Recorder, now: list[float]) -> None:
    steps: list[Seconds] = []
    recorder.on_step = steps.append
    for seconds in (1.0, 2.0):
        now[0] += seconds
        recorder.ended("data")
        now[0] += 10 * seconds
        recorder.step_done()
    assert steps == [Seconds(data=1.0, compute=10.0), Seconds(data=2.0, compute=20.0)]


def test_another_clock_begins_where_it_is_set(recorder: Recorder, now: list[float]) -> None:
    now[0] += 1.0
    recorder.ended("data")
    recorder.use(Clock(lambda: now[0] - 50.0))
    now[0] += 2.0
    recorder.ended("compute")
    assert recorder.read() == Seconds(data=1.0, compute=2.0)


class Behind(Clock):
    """A clock whose marks are read later, and are an object each, as a GPU's are."""

    runs_behind = True

    class Mark:
        pass

    def __init__(self) -> None:
        super().__init__(self.make)
        self.marks: weakref.WeakSet[Behind.Mark] = weakref.WeakSet()

    def make(self) -> Mark:
        made = self.Mark()
        self.marks.add(made)
        return made

    def seconds(self, began: Mark, ended: Mark) -> float:
        return 1.0


def test_waits_that_nobody_reads_do_not_pile_up_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "_MOST_UNREAD", 100)
    clock = Behind()
    recorder = Recorder(clock)
    for _ in range(500):
        with recorder.waiting():
            pass
        recorder.ended("outside")
    assert len(clock.marks) <= 101
    assert recorder.read() == Seconds(outside=1500.0)
