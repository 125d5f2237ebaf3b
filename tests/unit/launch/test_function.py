"""Errors of `hvdtrain.run` before it starts anything, and its messages about a job that has ended."""

from __future__ import annotations

import functools
import pickle
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest

import hvdtrain
from hvdtrain.distributed import tuning
from hvdtrain.errors import HvdTrainError
from hvdtrain.launch import job_folder
from hvdtrain.launch.exchange import Message, pack
from hvdtrain.launch.exit_cause import Cause
from hvdtrain.launch.function_job import Outcome


def nothing() -> None: ...


@pytest.fixture(autouse=True)
def _starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(ranks: int) -> None:
        raise AssertionError("it was about to start something")

    monkeypatch.setattr(job_folder, "make", start)
    monkeypatch.setattr(tuning, "usable_cores", lambda: 2)
    for name in ("HOROVOD_RANK", "HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_run_is_a_function_also_after_its_package_was_imported_and_loads_no_framework() -> None:
    code = (
        "import sys, hvdtrain\n"
        "light = set(sys.modules)\n"
        "import hvdtrain.launch.function, hvdtrain.cli.program\n"
        "print(callable(hvdtrain.run), 'run' in dir(hvdtrain), 'cloudpickle' in light)\n"
        "print({'torch', 'tensorflow', 'keras', 'jax', 'horovod'} & set(sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["True True False", "set()"]


@pytest.mark.parametrize("np", [0, -1, True, 2.0, "2"])
def test_a_number_of_ranks_that_is_none_is_refused(np: Any) -> None:
    with pytest.raises(ValueError, match="np, the number of ranks, must be a whole number"):
        hvdtrain.run(nothing, np=np)


def test_more_ranks_than_hvdtrain_run_allows_are_refused_with_what_allows_them() -> None:
    with pytest.raises(ValueError, match=r'np=9 is more than 4 ranks .* 2 cores.*options=\("-H", "localhost:9"\)'):
        hvdtrain.run(nothing, np=9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--glooo",), r"--glooo is an option neither .* Did you mean --gloo\?"),
        (("-np", "3"), "options are horovodrun's"),
        (("python",), "options are horovodrun's"),
        (("-H", "192.0.2.1:2"), "is for this host, and 192.0.2.1 is not all here"),
        (("--min-np", "2"), "fixed number of ranks"),
    ],
)
def test_options_that_cannot_be_are_refused(options: tuple[str, ...], message: str) -> None:
    with pytest.raises(HvdTrainError, match=message):
        hvdtrain.run(nothing, np=2, options=options)


def test_what_is_no_function_and_an_unknown_output_are_refused() -> None:
    not_a_function: Any = "train.py"
    with pytest.raises(TypeError, match=r"fn must be a function. Received: 'train.py'"):
        hvdtrain.run(not_a_function, np=2)
    a_letter_each: Any = "text"
    with pytest.raises(TypeError, match=r"args must be a tuple, such as \(x,\). Received: a str"):
        hvdtrain.run(nothing, a_letter_each, np=2)
    output: Any = "first"
    with pytest.raises(ValueError, match=r"output must be .* Received: output='first'"):
        hvdtrain.run(nothing, np=2, output=output)


def test_a_rank_cannot_start_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_SIZE", "2")
    with pytest.raises(
        HvdTrainError, match=r"hvdtrain.run starts the ranks itself, and horovodrun \(HOROVOD_SIZE=2, 2 ranks\)"
    ):
        hvdtrain.run(nothing, np=2)


LOCK = threading.Lock()


def of_a_function() -> Callable[[], object]:
    lock = threading.Lock()
    return lambda: lock


def of_a_module() -> Callable[[], object]:
    return lambda: LOCK


@pytest.mark.parametrize(
    ("fn", "args", "kwargs", "named"),
    [
        (nothing, (1, LOCK), {}, r"args\[1\], a _thread.lock,"),
        (nothing, (), {"setup": {"seed": 1, "locks": [LOCK]}}, r"kwargs\['setup'\]\['locks'\]\[0\], a _thread.lock,"),
        (of_a_function(), (), {}, r"lock, which fn uses, a _thread.lock,"),
        (of_a_module(), (), {}, r"LOCK, which fn uses, a _thread.lock,"),
        (functools.partial(nothing, LOCK), (), {}, r"fn.args\[0\], a _thread.lock,"),
    ],
)
def test_what_cannot_be_sent_is_named(fn: Any, args: Any, kwargs: Any, named: str) -> None:
    with pytest.raises(TypeError, match=f"{named} cannot be sent to the ranks: .*pickle"):
        hvdtrain.run(fn, args, kwargs, np=2)


def test_an_object_whose_own_pickling_fails_is_named_too() -> None:
    class Stubborn:
        def __reduce__(self) -> str:
            raise RuntimeError("no")

    with pytest.raises(TypeError, match=r"x\['a'\], a .*Stubborn, cannot be sent: no"):
        pack({"x": {"a": Stubborn()}}, where="be sent")


def test_settings_that_an_init_of_the_caller_has_chosen_are_not_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "_ours", {"HOROVOD_FUSION_THRESHOLD": "0", "OMPI_MCA_btl": "self"})
    environment = {"HOROVOD_FUSION_THRESHOLD": "0", "OMPI_MCA_btl": "tcp", "HOME": "/"}
    assert tuning.without_ours(environment) == {"OMPI_MCA_btl": "tcp", "HOME": "/"}  # btl was set since


RETURNED = Message({"kind": "result"})
EXITED = Message({"kind": "exit", "code": 3})


def raised(time_s: float, *, others: bool = False) -> Message:
    text = "Horovod has been shut down" if others else "ValueError: mine"
    facts = {"kind": "error", "what": "raised", "host": "h", "time": time_s, "text": text, "others": others}
    return Message(facts)


BY_OTHERS = raised(1, others=True)


@pytest.mark.parametrize(
    ("answers", "cause", "said"),
    [
        ({0: raised(2), 1: raised(1)}, Cause("rank 0", 1, 0), "rank 1 on host h raised:\nValueError: mine"),
        ({0: BY_OTHERS, 1: raised(2)}, Cause("rank 0", 1, 0), "rank 1 on host h raised"),
        ({0: BY_OTHERS}, Cause("rank 1", 137, 1), "rank 1 was killed by signal 9 after 4 s"),
        ({0: raised(1)}, Cause("rank 1", 137, 1), "rank 1 was killed by signal 9 after 4 s"),
        ({0: raised(2), 1: RETURNED}, Cause("rank 1", 139, 1), "rank 0 on host h raised:\nValueError: mine"),
        ({0: BY_OTHERS}, Cause("horovodrun", 137), "horovodrun was killed by signal 9 after 4 s"),
        ({0: BY_OTHERS, 1: EXITED}, Cause("rank 1", 3, 1), "rank 1 ended with status 3 after 4 s"),
        ({0: RETURNED, 1: EXITED}, Cause("horovodrun", 3), "rank 1 ended with status 3 after 4 s"),
        ({0: BY_OTHERS, 1: EXITED}, Cause("rank 0", 1, 0), "rank 1 ended by itself, with status 3"),
        ({0: raised(5), 1: EXITED}, Cause("rank 0", 1, 0), "rank 0 on host h raised:\nValueError: mine"),
        ({0: BY_OTHERS}, Cause("rank 1", 7, 1), "rank 1 ended with status 7 after 4 s"),
        ({0: RETURNED, 1: BY_OTHERS}, Cause("rank 1", 1, 1), "rank 1 on host h raised:\nHorovod has been shut down"),
        ({0: RETURNED}, Cause("horovodrun", 0), "rank 1 ended by itself, with status 0"),
        ({}, Cause("horovodrun", 1), "horovodrun ended with status 1 after 4 s"),
        ({0: RETURNED}, None, "the process that ran the ranks ended with status -9"),
    ],
)
def test_the_reason_is_told_and_not_a_consequence(answers: dict[int, Message], cause: Cause | None, said: str) -> None:
    tails = {rank: [f"last words of {rank}"] for rank in (None, 0, 1)}
    problem = Outcome(2, answers, cause, 4.2, tails, status=-9).problem()
    assert str(problem).startswith(said)
    assert ("last words of None" in str(problem)) == str(problem).startswith("horovodrun")


def test_a_result_that_only_ranks_can_read_is_named() -> None:
    gone = Message({"kind": "result"}, pickle.dumps((types.SimpleNamespace(),)).replace(b"types", b"typos"))
    with pytest.raises(TypeError, match="what rank 1 returned cannot be read here: No module named 'typos'"):
        Outcome(2, {0: Message({"kind": "result"}, pickle.dumps((1,))), 1: gone}).values()


def test_a_rank_that_is_killed_at_its_exit_has_returned_all_the_same() -> None:
    assert Outcome(2, {0: RETURNED, 1: RETURNED}, Cause("rank 1", 139, 1)).problem() is None
