"""What `hvdtrain.run` refuses before it starts anything."""

from __future__ import annotations

import functools
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

import hvdtrain
from hvdtrain import tuning
from hvdtrain.errors import HvdTrainError
from hvdtrain.runner import supervise
from hvdtrain.runner.pickling import pack


def nothing() -> None: ...


@pytest.fixture(autouse=True)
def _starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def start() -> None:
        raise AssertionError("it was about to start something")

    monkeypatch.setattr(supervise, "make_run_dir", start)
    monkeypatch.setattr(tuning, "usable_cores", lambda: 2)
    for name in ("HOROVOD_RANK", "HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_run_is_a_function_also_after_its_package_was_imported_and_loads_no_framework() -> None:
    code = (
        "import sys, hvdtrain\n"
        "light = set(sys.modules)\n"
        "import hvdtrain.runner.function, hvdtrain.runner.command\n"
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
    output: Any = "first"
    with pytest.raises(ValueError, match=r"output must be .* Received: output='first'"):
        hvdtrain.run(nothing, np=2, output=output)


def test_a_rank_cannot_start_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_SIZE", "2")
    with pytest.raises(HvdTrainError, match=r"it starts the ranks itself, and horovodrun \(HOROVOD_SIZE=2, 2 ranks\)"):
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
