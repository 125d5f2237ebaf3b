"""`hvdtrain.integrations.ray` on a real local Ray of two CPUs."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hvdtrain
from hvdtrain.distributed import world
from hvdtrain.errors import RankFailedError, UsageError

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'hvdtrain[ray]'")

from hvdtrain.integrations.ray import run  # noqa: E402

ROOT = Path(__file__).parents[2]
LIMIT_S = 60


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    ray.init(address="local", num_cpus=2, include_dashboard=False)
    yield
    ray.shutdown()


@pytest.fixture(autouse=True)
def nothing_stays(cluster: None) -> Iterator[None]:
    """Each test leaves the cluster as it was: all CPUs free, no placement group."""
    yield
    until = time.monotonic() + 20
    while ray.available_resources().get("CPU") != 2:
        assert time.monotonic() < until, ray.available_resources()
        time.sleep(0.05)
    groups = ray.util.placement_group_table().values()
    assert {group["state"] for group in groups} <= {"REMOVED"}


def rank() -> int:
    return int(os.environ["HOROVOD_RANK"])


def train(batch_size: int, *callbacks: Any, **options: Any) -> tuple[int, int, list[Any]]:
    """Train a small model, alike everywhere; return rank, size and weights."""
    import torch

    place = hvdtrain.init("torch")
    torch.manual_seed(0)
    x = torch.randn(96, 6)
    y = (x.sum(1) > 0).long()
    net = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
    trainer = hvdtrain.Trainer(
        net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), loss=torch.nn.CrossEntropyLoss()
    )
    trainer.fit((x, y), epochs=3, batch_size=batch_size, callbacks=callbacks, progress=False, **options)
    return place.rank, place.size, [weights.detach().numpy() for weights in net.parameters()]


def test_two_ranks_train_as_one_process_does_and_return_in_rank_order() -> None:
    world.use(world.SoloWorld())
    try:
        _, _, alone = train(8)
    finally:
        world.use(None)
    first, second = run(train, (4,), np=2)
    assert (first[:2], second[:2]) == ((0, 2), (1, 2))
    for mine, theirs, expected in zip(first[2], second[2], alone, strict=True):
        np.testing.assert_array_equal(mine, theirs)
        np.testing.assert_allclose(mine, expected, atol=1e-5)


def test_ranks_have_the_threads_the_settings_and_the_run_that_were_asked_for() -> None:
    def fn(**what: int) -> dict[str, Any]:
        return {**os.environ, **what}

    first, second = run(fn, kwargs={"given": 7}, np=2, environment={"MINE": "yes"})
    assert (first["given"], first["MINE"], first["OMP_NUM_THREADS"]) == (7, "yes", "1")
    assert first["HVDTRAIN_RUN_NAME"].startswith("fn-")
    assert first["HVDTRAIN_RUN_NAME"] == second["HVDTRAIN_RUN_NAME"]
    assert first["HOROVOD_GLOO_RENDEZVOUS_ADDR"] == "127.0.0.1", "ranks of this host listen on loopback alone"


def test_an_exception_is_raised_here_with_its_rank_and_traceback() -> None:
    def fn() -> None:
        if rank() == 1:
            raise LookupError("no such thing")
        time.sleep(1000)

    with pytest.raises(LookupError, match="no such thing") as info:
        run(fn, np=2)
    cause = info.value.__cause__
    assert isinstance(cause, RankFailedError)
    assert cause.rank == 1
    assert 'raise LookupError("no such thing")' in str(cause)


def test_a_killed_rank_ends_the_job_and_is_named() -> None:
    def fn() -> None:
        if rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1000)

    with pytest.raises(RankFailedError, match=r"rank 1 on host \S+ \(pid \d+\) died \(.+\) after \d+ s") as info:
        run(fn, np=2)
    assert info.value.rank == 1


@pytest.mark.parametrize("code", [0, 3])
def test_a_rank_that_leaves_without_a_result_is_named_with_its_status(code: int) -> None:
    def fn() -> None:
        if rank() == 1:
            sys.exit(code)
        if code:
            time.sleep(1000)

    with pytest.raises(RankFailedError, match=f"rank 1 .*status {code}") as info:
        run(fn, np=2)
    assert info.value.rank == 1


def test_ranks_without_room_are_an_error_within_the_limit(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(UsageError, match=r"no room for 3 ranks with 1 CPU each .* within 2 s: it has 2 CPU"):
        run(rank, np=3, start_timeout_s=2)
    assert "there is no room for 3 ranks with 1 CPU each on this Ray cluster, which has 2 CPU" in caplog.text
    with pytest.raises(UsageError, match=r"no room for 1 rank with 1 CPU and 1 GPU on"):
        run(rank, np=1, gpus_per_rank=1, min_np=1, start_timeout_s=2)


def interrupt_when(ready: Callable[[], bool]) -> None:
    """Press Ctrl-C, from another thread, once `ready()`."""

    def wait() -> None:
        until = time.monotonic() + LIMIT_S
        while not ready() and time.monotonic() < until:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=wait).start()


def test_an_interrupt_asks_the_ranks_to_stop_and_is_raised_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fn(folder: Path) -> None:
        try:
            (folder / f"began-{rank()}").touch()
            time.sleep(1000)
        except SystemExit:  # what Ray makes of SIGTERM; a Trainer has a handler of its own
            (folder / f"asked-{rank()}").touch()
            raise

    interrupt_when(lambda: len(list(tmp_path.glob("began-*"))) == 2)
    with pytest.raises(KeyboardInterrupt):
        run(fn, (tmp_path,), np=2)
    assert len(list(tmp_path.glob("asked-*"))) == 2
    assert "asking the ranks to stop" in caplog.text


@pytest.mark.parametrize("elastic", [{}, {"min_np": 1}])
def test_a_second_interrupt_waits_for_nobody(
    elastic: dict[str, int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fn(folder: Path) -> None:
        signal.signal(signal.SIGTERM, lambda *_: (folder / f"deaf-{rank()}").touch())
        (folder / f"began-{rank()}").touch()
        while True:
            time.sleep(1)

    interrupt_when(lambda: len(list(tmp_path.glob("began-*"))) == 2)
    interrupt_when(lambda: len(list(tmp_path.glob("deaf-*"))) == 2)
    with pytest.raises(KeyboardInterrupt):
        run(fn, (tmp_path,), np=2, **elastic)
    assert "ending everything at once" in caplog.text


class Script:
    """Kills the last of two ranks once, then keeps the other one from coming to an end before there are two again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_fit_begin(self, trainer: Any) -> None:
        place = hvdtrain.init()
        with (self.folder / f"log-{os.getpid()}").open("a") as log:
            log.write(f"{place.rank} of {place.size} begins at step {trainer.global_step}\n")

    def on_step_begin(self, trainer: Any, step: int) -> None:
        place, killed = hvdtrain.init(), self.folder / "killed"
        if trainer.global_step == 7 and place.rank == 1 and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if trainer.global_step >= 12 and place.size == 1:
            time.sleep(0.2)


def train_elastic(folder: Path) -> tuple[int, int, list[Any]]:
    from hvdtrain.callbacks import Callback, Checkpoint

    callback = type("Scripted", (Script, Callback), {})(folder)
    return train(4, callback, Checkpoint(folder / f"checkpoints-{os.getpid()}", every_steps=3))


def test_an_elastic_job_goes_on_from_its_last_commit_when_a_rank_is_killed_and_takes_a_new_one_in(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    results = run(train_elastic, (tmp_path,), np=2, min_np=1)
    assert [result[:2] for result in results] == [(0, 2), (1, 2)]
    for mine, theirs in zip(results[0][2], results[1][2], strict=True):
        np.testing.assert_array_equal(mine, theirs)
    said = "".join(path.read_text() for path in tmp_path.glob("log-*"))
    assert "0 of 1 begins at step 6\n" in said, "the last commit: the step under way and the one before are lost"
    (survivor,) = re.findall(r"0 of 2 begins at step (?!0)(\d+)", said)
    assert f"1 of 2 begins at step {survivor}\n" in said, "the new rank begins where the other one is"
    assert re.search(r"rank 1 on host \S+ \(pid \d+\) died .*; the other ranks continue", caplog.text)


def train_until_killed() -> None:
    import torch

    import hvdtrain.torch as hvd

    hvd.init()

    @hvd.elastic.run
    def train(state: Any) -> None:
        hvd.allreduce(torch.ones(1), name="step")
        if hvd.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        while True:
            hvd.allreduce(torch.ones(1), name="step")

    train(hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, step=0))


def test_an_elastic_job_ends_when_ranks_may_not_meet_anew() -> None:
    with pytest.raises(RankFailedError, match=r"exceeded limit: 0; the last death: rank 1 on host .* died"):
        run(train_until_killed, np=2, min_np=1, reset_limit=0)


def test_an_exception_of_its_own_ends_an_elastic_job() -> None:
    def fn() -> None:
        if rank() == 1:
            raise LookupError("no such thing")
        time.sleep(1000)

    with pytest.raises(LookupError, match="no such thing") as info:
        run(fn, np=2, min_np=1)
    assert isinstance(info.value.__cause__, RankFailedError)
    assert info.value.__cause__.rank == 1


def test_horovods_driver_leaves_logging_as_it_was() -> None:
    def fn() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    before = list(logging.getLogger().handlers)
    with pytest.raises(RankFailedError, match="died"):
        run(fn, np=1, min_np=1)
    assert logging.getLogger().handlers == before


def test_the_pages_script_runs_as_it_stands(tmp_path: Path) -> None:
    page = (ROOT / "docs/pages/engines/ray.md").read_text()
    (script,) = re.findall(r"```python\n(# train_ray\.py\n.*?)```", page, re.DOTALL)
    (tmp_path / "train_ray.py").write_text(script)
    context = ray.get_runtime_context()
    environment = {**os.environ, "RAY_ADDRESS": context.gcs_address}
    done = subprocess.run(
        [sys.executable, "train_ray.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^\[[\d.]+, [\d.]+\]$", done.stdout, re.MULTILINE)
    assert re.search(r"\(rank 0 pid=\d+\).*epoch 3/3", done.stdout + done.stderr)


def test_the_ray_that_this_user_has_started_here_is_used() -> None:
    with tempfile.TemporaryDirectory(prefix="hvd-") as folder:  # sockets need a short path
        environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        environment["RAY_TMPDIR"] = folder
        head = subprocess.Popen(
            [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--port=0", "--num-cpus=1", "--block",
             "--include-dashboard=false"],
            env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            named, until = Path(folder, "ray", "ray_current_cluster"), time.monotonic() + LIMIT_S
            while not named.exists():
                assert time.monotonic() < until
                assert head.poll() is None
                time.sleep(0.1)
            code = (
                "import os, ray; from hvdtrain.integrations.ray import run\n"
                "print('at', run(lambda: __import__('ray').get_runtime_context().gcs_address, np=1)[0])"
            )
            done = subprocess.run(
                [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True, timeout=100
            )
            assert done.returncode == 0, done.stdout + done.stderr
            assert f"at {named.read_text()}\n" in done.stdout
            assert [path.name for path in Path(folder).iterdir()] == ["ray"]
        finally:
            head.terminate()
            head.wait(LIMIT_S)
