"""Choose the rank tests of this world size, and the folder that the ranks of one test share.

Every test says at which world sizes it holds: `@pytest.mark.world_size(2)` or `world_size(2, 3)`. At other sizes it
is deselected. A test without the mark is an error, because it would run nowhere and look green. The other marks say
where it runs beside its first place: PyTorch for the Trainer's tests, the torch backend for Keras's.

Start them with `python tests/ranks/run.py`. Horovod is started by the conftest of each framework's folder, not here.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def _world_size() -> int:
    """Return the number of ranks that the launcher announced; 1 without a launcher."""
    for name in ("HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE"):
        if name in os.environ:
            return int(os.environ[name])
    return 1


WORLD_SIZE = _world_size()
# One process cannot hold a rank test's claim, and need not pay for importing the frameworks to say so.
collect_ignore_glob = ["*"] if WORLD_SIZE == 1 else []


MARKS = {
    "world_size(*sizes)": "the numbers of ranks at which a test of tests/ranks runs",
    "every_backend": "runs on each of Keras's backends, at 2 ranks, without --all too",
    "on_keras": "of the Trainer: runs on PyTorch and on Keras's torch backend, without --all too",
    "three_ranks": "of Keras: runs at 3 ranks too, on the torch backend: uneven shares, sets of ranks",
    "two_suffice": "of PyTorch: runs at 3 ranks with --all alone, where it shows no more than at 2",
    "in_graphs": "of Keras: runs on TensorFlow, whose graphs it is about, without --all too, and not on torch",
    "over_gloo": "of PyTorch: runs over Gloo too: collectives, join, errors",
    "on_gpus": "of PyTorch: runs in `make gpus` too, where each rank has a GPU; by default its tensors are there",
    "on_cpus": "of a file for on_gpus: holds on CPUs alone",
}


def pytest_configure(config: pytest.Config) -> None:
    for mark, meaning in MARKS.items():
        config.addinivalue_line("markers", f"{mark}: {meaning}")


def pytest_report_header() -> str | None:
    return "tests/ranks is left out: start it with python tests/ranks/run.py" if WORLD_SIZE == 1 else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    selected: list[pytest.Item] = []
    deselected: list[pytest.Item] = []
    for item in items:
        if not item.path.is_relative_to(HERE):
            selected.append(item)
            continue
        mark = item.get_closest_marker("world_size")
        sizes = mark.args if mark else ()
        if not sizes or not all(isinstance(size, int) and size > 1 for size in sizes):
            raise pytest.UsageError(
                f"{item.nodeid} does not say at which world sizes it runs. "
                f"Received: {'no world_size mark' if mark is None else f'world_size{mark.args}'}. "
                "Add @pytest.mark.world_size(2) or @pytest.mark.world_size(2, 3)."
            )
        (selected if WORLD_SIZE in sizes else deselected).append(item)
    if deselected:
        config.hook.pytest_deselected(items=deselected)
        items[:] = selected


@pytest.fixture
def fail_reads(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Let reads of a checkpoint's arrays fail after so many, with a message; returns the names that were asked for."""
    from hvdtrain.checkpoint import StoredArray
    from hvdtrain.errors import CheckpointError

    def fail(*, after: int, message: str) -> list[str]:
        done: list[str] = []

        def failing(read: Callable[..., object]) -> Callable[..., object]:
            def fail_or_read(self: StoredArray, *args: int) -> object:
                done.append(self.name)
                if len(done) > after:
                    raise CheckpointError(message)
                return read(self, *args)

            return fail_or_read

        for name in ("read", "read_piece"):
            monkeypatch.setattr(StoredArray, name, failing(getattr(StoredArray, name)))
        return done

    return fail


@pytest.fixture
def shared_tmp_path(request: pytest.FixtureRequest) -> Path:
    """A folder of this test's own, empty at its start, that all ranks of the test see under the same path."""
    base = os.environ.get("HVDTRAIN_RANKS_DIR")
    if base is None:
        pytest.fail("shared_tmp_path needs the folder that python tests/ranks/run.py makes: start the tests with it")
    nodeid = request.node.nodeid
    name = re.sub(r"\W+", "-", nodeid.rpartition("::")[2])[:40]
    digest = hashlib.sha256(nodeid.encode()).hexdigest()[:12]
    path = Path(base) / "shared" / f"{name}-{digest}"
    path.mkdir(parents=True, exist_ok=True)
    return path
