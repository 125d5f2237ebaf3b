"""What needs no Spark: where ranks go, who is let in, what is imported."""

from __future__ import annotations

import multiprocessing.connection
import socket
import subprocess
import sys
import threading
from typing import Any

import pytest

import hvdtrain
from hvdtrain.errors import PackageMissingError
from hvdtrain.integrations import spark
from hvdtrain.integrations.spark import wire
from hvdtrain.integrations.spark.job import SparkJob
from hvdtrain.integrations.spark.task import Place, rank_order, visible_gpus


def test_ranks_of_a_host_stand_together_with_the_first_partitions_host_first() -> None:
    assert rank_order(["b", "a", "b", "c", "a"]) == [0, 2, 1, 4, 3]
    assert rank_order(["a"]) == [0]


def test_a_rank_sees_the_gpus_of_its_hosts_ranks_by_local_rank_and_nothing_is_set_without() -> None:
    places = [Place("a", "10.0.0.1", ["3", "1"]), Place("a", "10.0.0.1", ["0"]), Place("b", "10.0.0.2", [])]
    assert visible_gpus(0, places) == visible_gpus(1, places) == {"CUDA_VISIBLE_DEVICES": "3,0"}
    assert visible_gpus(2, places) == {}


def test_who_has_another_key_or_says_nothing_is_not_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "_STRANGER_S", 1)
    door = wire.Door("127.0.0.1", "127.0.0.1")
    try:
        with socket.create_connection((door.address.host, door.address.port)):
            assert door.let_in() is None
        refused: list[Any] = []

        def knock() -> None:
            try:
                wire.knock(wire.Address(door.address.host, door.address.port, b"x" * 32))
            except (multiprocessing.AuthenticationError, EOFError, OSError) as error:
                refused.append(error)

        stranger = threading.Thread(target=knock)
        stranger.start()
        assert door.let_in() is None
        stranger.join()
        assert refused
    finally:
        door.close()


def test_both_sides_hear_each_other_and_an_end() -> None:
    door = wire.Door("127.0.0.1", "127.0.0.1")
    found: list[Any] = []
    task = threading.Thread(target=lambda: found.append(wire.knock(door.address)))
    task.start()
    mine = door.let_in()
    task.join()
    door.close()
    assert mine is not None
    wire.tell(mine, kind="stop")
    assert wire.hear(found[0]) == {"kind": "stop"}
    assert wire.own_address(mine) == "127.0.0.1"
    found[0].close()
    assert wire.hear(mine) is None
    mine.close()


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("calling z.\n: o.a.SparkException: Job aborted\nat x", "o.a.SparkException: Job aborted"),
        ("calling z.\n: o.a.SparkException: x\nTraceback\nModuleNotFoundError: No module named 'hvdtrain'\n at y",
         "ModuleNotFoundError: No module named 'hvdtrain'"),
        ("plain", "plain"),
    ],
)  # fmt: skip
def test_of_sparks_stacks_the_line_is_told_that_says_what_is_wrong(text: str, line: str) -> None:
    job = SparkJob(context=None)
    job.error = RuntimeError(text)
    job.close(0)
    assert job.reason() == line


def test_neither_pyspark_nor_horovod_nor_pyarrow_is_imported_before_it_is_used() -> None:
    code = (
        "import hvdtrain, sys; from hvdtrain.integrations import spark; hvdtrain.read_parquet; "
        "print([name for name in ('pyspark', 'horovod', 'pyarrow', 'torch') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_missing_packages_are_named_with_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pyspark", "pyspark.sql", "pyarrow"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(PackageMissingError, match=r"PySpark is not installed. Run: pip install 'hvdtrain\[spark\]'"):
        spark.run(print, np=2)
    with pytest.raises(PackageMissingError, match=r"pip install 'hvdtrain\[spark\]'"):
        spark.write_parquet(None, "somewhere")
    with pytest.raises(PackageMissingError, match=r"pyarrow is not installed. Run: pip install 'hvdtrain\[parquet\]'"):
        hvdtrain.read_parquet("somewhere")


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"np": 0}, ValueError, "np, the number of ranks"),
        ({"np": 2, "output": "some"}, ValueError, 'output must be "all" or "root"'),
        ({"np": 2, "start_timeout_s": 0}, ValueError, "start_timeout_s must be > 0"),
        ({"np": 2, "args": "x"}, TypeError, "args must be a tuple"),
    ],
)
def test_what_cannot_be_asked_for_is_refused_before_anything_is_started(
    arguments: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        spark.run(print, **arguments)
