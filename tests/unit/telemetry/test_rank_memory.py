"""What an out-of-memory error says of this rank, with and without a Trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from hvdtrain.distributed.watchdog import shared_facts, tracebacks
from hvdtrain.system import host_memory, process_tree
from hvdtrain.telemetry import rank_memory
from hvdtrain.telemetry.memory import Held, Parts, Use
from hvdtrain.telemetry.rank_memory import Place, RankMemory

ADAM = Held(parts=Parts(weights=100, gradients=100, optimizer=200), missing=300)


def memory(measure: Callable[[], Held] = lambda: ADAM, *, in_script: bool = False) -> RankMemory:
    return RankMemory(measure, lambda: Use("torch", 2, {}, in_script), lambda: Place(1, 2))


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Let nothing speak for this process, before and afterwards."""
    rank_memory.forget()
    yield
    rank_memory.forget()


@pytest.fixture
def script() -> Callable[..., None]:
    def measure(measure: Callable[[], Held] = lambda: ADAM) -> None:
        rank_memory.measure_script(measure, lambda: Use("torch", 2, {}, in_script=True), lambda: Place(1, 2))

    return measure


def explained(text: str = "can't allocate memory: you tried to allocate 1000000000000 bytes.") -> str:
    """Return the message of an error that ends this process."""
    error = RuntimeError(text)
    tracebacks.explain(error)
    return str(error)


def test_a_script_without_a_trainer_says_what_took_the_memory(script: Callable[..., None]) -> None:
    script()
    first, note = explained().splitlines()
    assert first.startswith("can't allocate memory")
    assert note.startswith("hvdtrain: memory of rank 1: activations 1,000 GB, optimizer state 200 B, weights 100 B")
    assert note.endswith("or torch.utils.checkpoint computes them again in backward")


def test_other_errors_of_a_script_stay_as_they_are(script: Callable[..., None]) -> None:
    script()
    assert explained("shapes differ") == "shapes differ"


def test_a_note_is_added_once() -> None:
    one, error = memory(), MemoryError("no room")
    one.explain(error)
    rank_memory.speak(one)
    tracebacks.explain(error)
    assert str(error).count("hvdtrain: memory of rank 1") == 1


def test_memory_that_cannot_be_measured_neither_fails_the_script_nor_its_error(script: Callable[..., None]) -> None:
    def fail() -> Held:
        raise ZeroDivisionError

    script(fail)
    assert explained("out of memory") == "out of memory"


def test_a_trainer_speaks_as_long_as_it_lives_and_then_the_script(script: Callable[..., None]) -> None:
    of_trainer = memory()
    of_trainer.begin()
    rank_memory.speak(of_trainer)
    script()
    assert not rank_memory.is_of_script()
    assert 'micro_batch="auto"' in explained()
    del of_trainer
    script()
    assert rank_memory.is_of_script()
    assert "torch.utils.checkpoint" in explained()


def test_only_what_was_taken_since_the_optimizer_has_its_variables_counts(
    script: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for taken in (1000, 5000):  # data was read in between
        monkeypatch.setattr(host_memory, "resident", lambda taken=taken: taken)
        monkeypatch.setattr(host_memory, "peak", lambda taken=taken: taken)
        script()
    monkeypatch.setattr(host_memory, "peak", lambda: 5700)
    assert "activations 400 B" in explained("out of memory")


def test_under_hvdtrain_run_a_script_writes_what_it_holds_at_once(
    script: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    monkeypatch.setenv(process_tree.RUN_DIR, str(tmp_path))
    script()
    found = shared_facts.read(tmp_path, "memory")[1]
    assert found["text"].startswith("in its first step up to activations ")
    assert found["job"] == str(tmp_path)
    assert found["oom_kills"] == host_memory.host_oom_kills()
