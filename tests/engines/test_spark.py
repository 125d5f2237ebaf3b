"""Ranks as tasks of a real Spark on this machine, and a DataFrame as their data."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import psutil
import pytest

import hvdtrain
from hvdtrain.errors import HvdTrainError, RankFailedError, UsageError
from hvdtrain.integrations import spark

reason = "needs PySpark and pyarrow: pip install 'hvdtrain[spark]'"
pytest.importorskip("pyspark", reason=reason)
pytest.importorskip("pyarrow", reason=reason)
if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
    pytest.skip("needs Java, in which Spark runs: apt-get install openjdk-17-jre-headless", allow_module_level=True)
pytestmark = [
    pytest.mark.timeout(240),
]


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from pyspark.sql import SparkSession

    folder = tmp_path_factory.mktemp("spark")
    settings = {
        "spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false", "spark.log.level": "OFF",
        "spark.sql.warehouse.dir": str(folder / "warehouse"), "spark.local.dir": str(folder),
        "spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1", "spark.driver.memory": "1g",
    }  # fmt: skip
    builder = SparkSession.builder.master("local[2]").appName("hvdtrain's tests")
    for name, value in settings.items():
        builder = builder.config(name, value)
    found = builder.getOrCreate()
    gateway = found.sparkContext._gateway
    yield found
    found.stop()
    gateway.shutdown()
    gateway.proc.stdin.close()  # PySpark's JVM ends with its standard input
    gateway.proc.wait(30)
    from pyspark import SparkContext

    SparkContext._gateway = SparkContext._jvm = None


@pytest.fixture(autouse=True)
def _leaves_no_rank_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HVDTRAIN_TEST_MARK", str(tmp_path))  # which goes to the ranks
    yield
    until = time.monotonic() + 10
    while ranks(tmp_path) and time.monotonic() < until:
        time.sleep(0.1)
    assert ranks(tmp_path) == []


def ranks(mark: Path) -> list[list[str]]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            variables = process.environ()
            if "HOROVOD_RANK" in variables and variables.get("HVDTRAIN_TEST_MARK") == str(mark):
                found.append(process.cmdline())
    return found


class Cell(io.StringIO):
    """Standard output of a notebook's cell. Calls `on_line` with what is written."""

    def __init__(self, on_line: Callable[[str], None]) -> None:
        super().__init__()
        self._on_line = on_line

    def write(self, text: str) -> int:
        written = super().write(text)
        self._on_line(text)
        return written


# Functions that ranks call are made here, for ranks cannot import this file.
def _make(kind: str) -> Callable[..., Any]:
    def numbers(base: int, *, factor: int) -> Any:
        world = hvdtrain.init()
        print("threads", os.environ["OMP_NUM_THREADS"])
        total = float(world.allreduce(np.ones(2), name="ones")[0])
        return base + factor * world.rank, world.size, world.local_rank, total, os.environ["HVDTRAIN_RUN_NAME"]

    def raises() -> None:
        if hvdtrain.init().rank == 1:
            raise ZeroDivisionError("on purpose")
        time.sleep(200)

    def killed() -> None:
        if hvdtrain.init().rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(200)

    def loses_its_worker() -> None:
        if hvdtrain.init().rank == 1:
            psutil.Process().parents()[1].kill()
        time.sleep(200)

    def stops_in_order() -> None:
        asked = threading.Event()
        signal.signal(signal.SIGUSR1, lambda *_: asked.set())
        print("ready", flush=True)
        if asked.wait(100):
            time.sleep(3 * int(os.environ["HOROVOD_RANK"]))  # which the rank that is done first does not cut short
            print("stopped in order", flush=True)
            sys.exit(75)

    return locals()[kind]  # type: ignore[no-any-return]


def test_each_rank_returns_its_value_in_order_and_prints_live(session: Any, capsys: Any) -> None:
    found = spark.run(_make("numbers"), (10,), {"factor": 3}, np=2)
    (_, *_, name), _ = found
    assert found == [(10, 2, 0, 2.0, name), (13, 2, 1, 2.0, name)]
    assert name.startswith("numbers-")
    shown = capsys.readouterr().out.splitlines()
    assert {"[0] threads 1", "[1] threads 1"} <= set(shown)


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        ("raises", ZeroDivisionError, "on purpose"),
        ("killed", RankFailedError, r"rank 1 on host \S+ was killed by signal 9 after \d+ s, before the function had"),
        ("loses_its_worker", RankFailedError, r"rank 1 on host \S+ was lost with its Spark task"),
    ],
)
def test_a_rank_that_fails_ends_all_of_them_and_is_named(session: Any, kind: str, error: Any, words: str) -> None:
    begun = time.monotonic()
    with pytest.raises(error, match=words) as raised:
        spark.run(_make(kind), np=2)
    assert time.monotonic() - begun < 100  # the other sleeps for 200 s
    if kind == "raises":
        assert "rank 1 on host" in str(raised.value.__cause__)
        assert 'raise ZeroDivisionError("on purpose")' in str(raised.value.__cause__)


def test_an_interrupt_lets_ranks_stop_in_order_and_leaves_sparks_own_handler(session: Any) -> None:
    before, interrupted = signal.getsignal(signal.SIGINT), []

    def on_line(text: str) -> None:
        if text.count("ready") and not interrupted:
            interrupted.append(text)
            threading.Timer(2.0, os.kill, (os.getpid(), signal.SIGINT)).start()  # the other rank is ready, too

    shown = Cell(on_line)
    with contextlib.redirect_stdout(shown), pytest.raises(KeyboardInterrupt):
        spark.run(_make("stops_in_order"), np=2)
    assert sorted(line for line in shown.getvalue().splitlines() if "stopped" in line) == [
        "[0] stopped in order", "[1] stopped in order",
    ]  # fmt: skip
    assert signal.getsignal(signal.SIGINT) is before


def test_more_ranks_than_slots_are_refused_at_once_and_taken_slots_after_the_limit(session: Any) -> None:
    with pytest.raises(ValueError, match=r"Spark \(local\[2\]\) has 2. Received: np=3. Use fewer ranks, or master"):
        spark.run(_make("raises"), np=3)
    context = session.sparkContext
    other = threading.Thread(target=lambda: context.parallelize([0], 1).map(lambda _: time.sleep(8)).collect())
    other.start()
    try:
        time.sleep(1)
        with pytest.raises(UsageError, match=r"0 of 2 ranks had been started after 3 s. .* other jobs may hold them"):
            spark.run(_make("raises"), np=2, start_timeout_s=3)
    finally:
        other.join()


def table(session: Any, rows: int) -> tuple[Any, Any, Any]:
    from pyspark.ml.linalg import Vectors

    rng = np.random.default_rng(0)
    x, y = rng.random((rows, 4)), rng.integers(0, 3, rows)
    data = [(Vectors.dense(each), float(each[0]), int(label), "text") for each, label in zip(x, y, strict=True)]
    return session.createDataFrame(data, ["x", "first", "y", "note"]).repartition(3), x, y


def test_two_ranks_trained_from_a_data_frame_equal_one_process_on_the_same_rows(session: Any, tmp_path: Path) -> None:
    frame, _, _ = table(session, 203)
    path = str(tmp_path / "shared")
    assert spark.write_parquet(frame, path, columns=["x", "first", "y"]) == 203

    def train(batch_size: int) -> Any:
        import torch

        columns = hvdtrain.read_parquet(path, {"x": ["x", "first"], "y": "y"}, cache_dir=tmp_path)
        world = hvdtrain.init("torch")
        torch.manual_seed(0)
        model = torch.nn.Linear(5, 3, dtype=torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        trainer = hvdtrain.Trainer(model, optimizer=optimizer, loss=torch.nn.CrossEntropyLoss())
        data = (columns["x"], columns["y"])
        history = trainer.fit(data, epochs=2, batch_size=batch_size, run_dir=None, progress=False)
        return world.size, history["loss"], [value.numpy() for value in model.state_dict().values()]

    two = spark.run(train, (8,), np=2)
    assert [size for size, *_ in two] == [2, 2]
    for mine, others in zip(two[0][2], two[1][2], strict=True):
        np.testing.assert_array_equal(mine, others)
    (one,) = spark.run(train, (16,), np=1)
    np.testing.assert_allclose(two[0][1], one[1], rtol=1e-6)
    for found, wanted in zip(two[0][2], one[2], strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-10)


def test_a_data_frame_arrives_in_its_order_and_what_ranks_cannot_read_is_refused(session: Any, tmp_path: Path) -> None:
    frame, x, y = table(session, 50)
    path = str(tmp_path / "data")
    with pytest.raises(ValueError, match=r"column 'note' is of string.*leave it out by columns="):
        spark.write_parquet(frame, path)
    with pytest.raises(ValueError, match=r"has no column 'z'\. It has: x, first, y, note"):
        spark.write_parquet(frame, path, columns=["z"])
    assert not Path(path).exists()
    spark.write_parquet(frame.orderBy("first"), path, columns=["x", "y"])
    found = hvdtrain.read_parquet(path, cache_dir=tmp_path)
    order = np.argsort(x[:, 0])
    np.testing.assert_array_equal(found["x"], x[order])
    np.testing.assert_array_equal(found["y"], y[order])
    with pytest.raises(FileExistsError, match="Say overwrite=True"):
        spark.write_parquet(frame, path, columns=["y"])
    with pytest.raises(ValueError, match="the DataFrame has no rows"):
        spark.write_parquet(frame.where("y > 5"), path, columns=["y"], overwrite=True)


def test_the_pages_script_runs(tmp_path: Path, load_script: Callable[[str], ModuleType]) -> None:
    blocks = load_script("readme/run_blocks.py")
    page = (blocks.ROOT / "docs/pages/engines/spark.md").read_text(encoding="utf-8")
    script, command = blocks.read(page)
    where = "/tmp/hvdtrain-spark-table"
    assert where in script.text
    path = blocks.save_block(script, tmp_path)
    path.write_text(path.read_text().replace(where, str(tmp_path / "table")))
    environment = {**os.environ, "SPARK_LOCAL_IP": "127.0.0.1", "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        ["bash", "-euc", command.text], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "2000 rows" in done.stdout
    found = re.findall(r"rank (\d) of 2: accuracy (\S+)", done.stdout)
    assert [rank for rank, _ in found] == ["0", "1"]
    assert found[0][1] == found[1][1] > "0.8"


def test_without_a_session_the_error_says_how_to_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    from pyspark import SparkContext

    monkeypatch.setattr(SparkContext, "_active_spark_context", None)
    with pytest.raises(HvdTrainError, match=r"no SparkSession is active.*SparkSession.builder.getOrCreate"):
        spark.run(_make("raises"), np=2)
