"""Prove that ranks train right on this host's GPUs, while the host waits for them in each step and while it does not.

`prove` starts ranks under horovodrun, one a GPU. Each runs this module as a script, trains as torch/gpu_proof.py says,
and leaves its weights in a file. They are compared here: bit for bit between ranks, and with one process's.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.horovod_build import probe
from hvdtrain.system import gpus, network
from hvdtrain.system.start_ranks import horovodrun, rank_environment

PATHS = ("blocking", "asynchronous")
ELASTIC = "elastic"
MOST_RANKS = 8
PROGRAM = ("-m", "hvdtrain.horovod_build.gpu_proof")

_GPU_ASYNC = "HVDTRAIN_GPU_ASYNC"
_LIMIT_S = 300.0
# Two names of this host, for Horovod two hosts: the second one loses a rank.
_HOSTS = (network.LOOPBACK, "localhost")
_HOSTS_OF_RANKS = "HOROVOD_HOSTNAME"
_BETWEEN = "|"  # a case and a weight's name, in a rank's file
_OF_ANOTHER_RANK = "HorovodInternalError"
_ALONE, _FACTS = "alone.npz", "facts.json"

Weights = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Proof:
    """The result: what differed, each with the path on which it did; nothing where all is well."""

    device: str  # "cuda"; "cpu" in tests
    ranks: int
    failures: tuple[str, ...]
    seconds: float

    def failed(self, *paths: str) -> list[str]:
        """Return the failures on these paths."""
        return [each for each in self.failures if each.startswith(paths)]

    def __str__(self) -> str:
        ranks = f"{self.ranks} ranks on {'GPUs' if self.device == 'cuda' else 'CPUs'}, {self.seconds:.0f} s"
        if self.failures:
            return f"FAILED, {ranks}"
        return f"equal bits on all ranks and one process's weights, {', '.join([*PATHS, ELASTIC])}, {ranks}"


def ranks_here() -> int:
    """Return the number of ranks of a proof on this host: one a GPU that is visible, at most eight."""
    return min(len(gpus.visible()), MOST_RANKS)


def too_few(ranks: int) -> str:
    """Return why less than two ranks prove nothing."""
    shown = "one GPU is visible, and one rank reduces nothing" if ranks else "no GPU is visible"
    return f"{shown} (nvidia-smi -L, CUDA_VISIBLE_DEVICES)"


def prove(*, ranks: int, device: str = "cuda", program: Sequence[str] = PROGRAM, timeout_s: float = _LIMIT_S) -> Proof:
    """Train with `ranks` processes of this host on each path; what differs is in the Proof, and not raised.

    Args:
        ranks: 2 or more, each with a GPU of its own.
        device: "cuda", or "cpu" for a test of the proof itself.
        program: what each rank runs with this Python.
        timeout_s: the limit of one launch.
    """
    if ranks < 2:
        raise ValueError(f"ranks must be 2 or more: one rank reduces nothing. Received: {ranks}")
    started = time.monotonic()
    options: dict[str, Any] = {"ranks": ranks, "device": device, "program": program, "timeout_s": timeout_s}
    failures = [each for path in (*PATHS, ELASTIC) for each in try_path(path, **options)]
    return Proof(device, ranks, tuple(failures), time.monotonic() - started)


def try_path(path: str, *, ranks: int, device: str, program: Sequence[str], timeout_s: float) -> list[str]:
    """Return what differs on one path, in words that begin with its name."""
    with tempfile.TemporaryDirectory(prefix="hvdtrain-gpu-proof-") as folder:
        trial = _Trial(path, device, ranks, Path(folder))
        error, output = probe.run_ranks(trial.line(program), trial.environment(), timeout_s, Path(folder, "output"))
        said = [fact["error"] for fact in trial.facts() if fact["error"]]
        said.sort(key=lambda error: _OF_ANOTHER_RANK in error)  # the cause first
        found = said[:1] or ([f"{error}\n{probe.tail_of(output)}"] if error else list(trial.differences()))
    return [f"{path}, {each}" for each in found]


class _Trial:
    """One launch: its command, and what its ranks have left in `folder`."""

    def __init__(self, path: str, device: str, ranks: int, folder: Path) -> None:
        self.path, self.device, self.ranks, self.folder = path, device, ranks, folder
        self.slots = (ranks - ranks // 2, ranks // 2)  # on each of the two hosts of an elastic job
        self.left = self.slots[0] if path == ELASTIC else ranks  # ranks that come to the end

    def line(self, program: Sequence[str]) -> list[str]:
        """Return the command."""
        line = [*horovodrun(Path(sys.executable)), "-np", str(self.ranks)]
        if self.path == ELASTIC:
            hosts = zip(_HOSTS, self.slots, strict=True)
            line += ["--min-np", "1", "--network-interfaces", network.interface()]
            line += ["--host-discovery-script", "; ".join(f"echo {host}:{slots}" for host, slots in hosts)]
        return [*line, sys.executable, *program, self.path, self.device, str(self.folder)]

    def environment(self) -> dict[str, str]:
        """Return the ranks' environment."""
        chosen = {
            "KERAS_BACKEND": "torch", "OMP_NUM_THREADS": "1", "NVIDIA_TF32_OVERRIDE": "0", "HVDTRAIN_SOLO": "0",
            _GPU_ASYNC: str(int(self.path == "asynchronous")),
        }  # fmt: skip
        if self.device == "cpu":
            chosen[gpus.VISIBLE] = ""
        return rank_environment(chosen, without=("HOROVOD_",))

    def facts(self) -> list[dict[str, Any]]:
        """Return what the ranks say of themselves, in the order of their numbers."""
        files = self.folder.glob(f"rank-*-{_FACTS}")
        return sorted((json.loads(file.read_text()) for file in files), key=lambda fact: int(fact["rank"]))

    def differences(self) -> Iterator[str]:
        """Yield what is wrong, in one line each."""
        facts = self.facts()
        if len(facts) != self.left:
            yield f"{len(facts)} of {self.left} ranks came to the end"
            return
        for fact in facts:
            if not str(fact["device"]).startswith(self.device):
                yield f"rank {fact['rank']} computed on {fact['device']}, not on {self.device}"
            if self.device == "cuda" and fact["is_async"] != (self.path == "asynchronous"):
                yield f"rank {fact['rank']} {'did not wait' if fact['is_async'] else 'waited'} for its GPU"
        if self.path == ELASTIC:
            yield from self._wrong_sizes([fact["sizes"] for fact in facts])
        everyones = [_cases(self.folder / f"rank-{fact['rank']}.npz") for fact in facts]
        alone = _cases(self.folder / _ALONE)
        for case, tolerance in facts[0]["tolerances"].items():
            yield from _first([
                *(_bits(case, everyones[0], theirs, rank) for rank, theirs in enumerate(everyones) if rank),
                _distance(case, everyones[0], alone, tolerance),
            ])  # fmt: skip

    def _wrong_sizes(self, everyones: Sequence[Sequence[int]]) -> Iterator[str]:
        """Yield what is wrong with the numbers of ranks in each step: all, then those that are left."""
        sizes = list(everyones[0])
        before = sizes.count(self.ranks)
        if any(each != sizes for each in everyones) or not 0 < before < len(sizes):
            yield f"steps were taken by {everyones} ranks: {self.ranks}, then {self.left} were expected"
        elif sizes != [self.ranks] * before + [self.left] * (len(sizes) - before):
            yield f"steps were taken by {sizes} ranks: {self.ranks}, then {self.left} were expected"


def _cases(file: Path) -> dict[str, Weights]:
    """Return {case: weights}."""
    found: dict[str, Weights] = {}
    with np.load(file, allow_pickle=False) as arrays:
        for name in arrays.files:
            case, _, weight = name.partition(_BETWEEN)
            found.setdefault(case, {})[weight] = arrays[name]
    return found


def _save(file: Path, weights: Weights) -> None:
    arrays: dict[str, Any] = dict(weights)
    np.savez(file, **arrays)


def _first(found: Sequence[str]) -> Iterator[str]:
    """Yield the first difference of a case: the others often follow from it."""
    yield from [each for each in found if each][:1]


def _bits(case: str, first: dict[str, Weights], others: dict[str, Weights], rank: int) -> str:
    """Return in what a rank's weights differ from rank 0's, "" if in no bit."""
    for name, ours in first[case].items():
        theirs = others[case][name]
        if ours.tobytes() != theirs.tobytes():
            distance = np.abs(ours.astype(float) - theirs.astype(float))
            count, most = int((distance != 0).sum()), float(distance.max())
            return f"{case}: {name} of rank {rank} differs from rank 0's in {count} of {ours.size}, by up to {most:g}"
    return ""


def _distance(case: str, ours: dict[str, Weights], alone: dict[str, Weights], tolerance: float) -> str:
    """Return in what the ranks' weights differ from one process's, "" if by no more than `tolerance`."""
    for name, weight in ours[case].items():
        most = float(np.abs(weight.astype(float) - alone[case][name].astype(float)).max())
        if not most <= tolerance:  # NaN too
            return f"{case}: {name} is {most:g} from one process's, and {tolerance:.1g} is allowed"
    return ""


def rank_main(path: str, device: str, folder: Path) -> int:
    """Run as one rank: train, and write weights and facts for the parent."""
    fact: dict[str, Any] = {"rank": os.environ.get("HOROVOD_RANK", "0"), "error": "", "tolerances": {}}
    try:
        if path == ELASTIC:
            _show_own_gpus(device)
        ours, alone = _train(path, fact)
        _save(folder / f"rank-{fact['rank']}.npz", ours)
        if alone:
            _save(folder / _ALONE, alone)
    except Exception as problem:  # noqa: BLE001  whatever it was, the parent shows it
        fact["error"] = f"rank {fact['rank']}: {type(problem).__name__}: {problem}"
        traceback.print_exc()
    (folder / f"rank-{fact['rank']}-{_FACTS}").write_text(json.dumps(fact))
    return 1 if fact["error"] else 0


def _train(path: str, fact: dict[str, Any]) -> tuple[Weights, Weights]:
    """Train all cases; add this rank's facts, and return its weights and, on rank 0, one process's."""
    world = importlib.import_module("hvdtrain.distributed.world").init("torch")
    trainings = importlib.import_module("hvdtrain.distributed.frameworks").load("torch", "gpu_proof")
    is_async = importlib.import_module("hvdtrain.distributed.gpu_path").is_async()
    fact |= {"rank": world.rank, "device": world.device, "is_async": is_async}
    if path == ELASTIC:
        sizes, *weights = trainings.lose_a_rank(world, victim=_is_victim)
        fact |= {"rank": world.rank, "sizes": sizes}
        results = [("a rank that dies", *weights)]
    else:
        results = list(trainings.train(world))
    ours: Weights = {}
    alone: Weights = {}
    for case, mine, theirs, tolerance in results:
        ours |= {f"{case}{_BETWEEN}{name}": value for name, value in mine.items()}
        alone |= {f"{case}{_BETWEEN}{name}": value for name, value in theirs.items()}
        fact["tolerances"][case] = tolerance
    return ours, alone


def _is_victim() -> bool:
    """Return whether this is the rank that dies: the first one of the second host."""
    return os.environ[_HOSTS_OF_RANKS] == _HOSTS[1] and os.environ["HOROVOD_LOCAL_RANK"] == "0"


def _show_own_gpus(device: str) -> None:
    """Let the two hosts of an elastic job, which are one machine, divide its GPUs."""
    if device == "cuda":
        shown = [each.uuid for each in gpus.visible()[:MOST_RANKS]]
        first = len(shown) - len(shown) // 2
        own = shown[:first] if os.environ[_HOSTS_OF_RANKS] == _HOSTS[0] else shown[first:]
        os.environ[gpus.VISIBLE] = ",".join(own)


if __name__ == "__main__":
    sys.exit(rank_main(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
