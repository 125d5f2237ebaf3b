"""`make gpus`: build Horovod for the GPUs of this machine, prove it, test and compare it with DDP, a rank a GPU.

It needs what `make gpu` needs, and no network: see gpu.py. All that is found goes into one file, build/gpu/gpus.json,
for whoever could not be there; it is written again after each step. HVDTRAIN_TEST_GPU=cpu takes the same steps without
the build, with two ranks on CPUs, in small and with this Python: so a test knows that the commands are right.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]  # for gpu.py, and for hvdtrain
import gpu  # noqa: E402

from hvdtrain.system.gpus import visible  # noqa: E402

SWITCH = "HVDTRAIN_TEST_GPU"
ON_CPU = os.environ.get(SWITCH) == "cpu"
LIMIT_S = 20 * 60
COMPARISON_S = 90  # about what one takes: none is started that would end too late
STEP_LIMIT_S = 8 * 60
TAIL_LINES = 80
STEPS = ("build", "prove", "ranks", "compare")

# In this order until the time is over, each at the largest number of GPUs first, then at smaller ones.
WORKLOADS = tuple(
    f"gpus-{model}-{precision}" for precision in ("bf16", "fp32") for model in ("resnet50", "gpt-compiled", "gpt")
)
PEERS = ("hvdtrain", "hvdtrain-async")
TARGET = 1.0

PROVE = """
import dataclasses, json, sys
from hvdtrain.horovod_build import gpu_proof
proof = gpu_proof.prove(ranks=int(sys.argv[1]), device=sys.argv[2], timeout_s=120)
print(json.dumps(dataclasses.asdict(proof)))
"""
ASK = [
    ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,pcie.link.gen.max", "--format=csv,noheader"],
    ["nvidia-smi", "topo", "-m"],
    ["git", "rev-parse", "HEAD"],
]


class Record:
    """The file to send back."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.facts: dict[str, Any] = {
            "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "python": sys.version.split()[0],
            "system": f"Linux {platform.release()}, {platform.machine()}, {os.cpu_count()} cores",
            "device": "cpu" if ON_CPU else "cuda",
            "machine": {" ".join(command[:3]): said(command) for command in ASK}, "steps": {},
        }  # fmt: skip

    def note(self, step: str, **what: Any) -> None:
        """Add what a step has found, and write the file."""
        self.facts["steps"].setdefault(step, {}).update(what)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self.facts, indent=1) + "\n")
        part.replace(self.path)


class StepError(RuntimeError):
    """A step has failed; its output is in the record."""


def said(command: list[str]) -> str:
    """Return what a command prints; "" where it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=gpu.ROOT)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def python() -> str:
    """Return the Python that has Horovod."""
    return sys.executable if ON_CPU else str(gpu.PYTHON)


def environment() -> dict[str, str]:
    """Return the environment of each step."""
    if ON_CPU:
        return {**os.environ, "BENCH_GPU_TRIAL": "1", "CUDA_VISIBLE_DEVICES": ""}
    return {**gpu.offline(), SWITCH: "1"}


def start(command: list[str], *, limit_s: float = STEP_LIMIT_S) -> str:
    """Return what a command prints; StepError with its end where it fails or takes too long."""
    done = subprocess.Popen(
        command, cwd=gpu.ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        output, _ = done.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        done.terminate()  # so that it ends what it has started
        try:
            output, _ = done.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            done.kill()
            output, _ = done.communicate()
        raise StepError(f"no end within {limit_s:.0f} s\n{tail(output)}") from None
    if done.returncode != 0:
        raise StepError(f"exit status {done.returncode}\n{tail(output)}")
    return output


def tail(output: str) -> str:
    """Return the last lines of an output."""
    return "\n".join(output.strip().splitlines()[-TAIL_LINES:])


def sizes() -> list[int]:
    """Return the numbers of ranks: 2, 4 and 8, as far as there are GPUs."""
    there = 2 if ON_CPU else len(visible())
    if there < 2:
        raise gpu.GpuError(f"{there or 'no'} GPU is visible, and ranks want one each: `make gpu` is for one GPU")
    return [size for size in (2, 4, 8) if size <= there] + ([there] if there in (3, 5, 6, 7) else [])


def build(record: Record) -> None:
    """Build Horovod with NCCL; `hvdtrain build` trains on all GPUs. If only that fails, the other steps say more."""
    try:
        gpu.build(through_host=False)
    except gpu.GpuError as error:
        try:
            start([python(), "-c", "import horovod.torch"], limit_s=120)
        except (StepError, OSError):
            raise error from None
        raise StepError(f"built, but not proven: {error}") from None


def prove(record: Record) -> None:
    """Train on all GPUs once more, and say what differs."""
    ranks = 2 if ON_CPU else min(8, len(visible()))
    output = start([python(), "-c", PROVE, str(ranks), "cpu" if ON_CPU else "cuda"])
    proof = json.loads(output.strip().splitlines()[-1])
    record.note("prove", proof=proof)
    if proof["failures"]:
        raise StepError("\n".join(proof["failures"]))


def ranks(record: Record) -> None:
    """Run the rank tests that are marked for it, with a GPU for each rank."""
    failed = []
    for size in [2] if ON_CPU or sizes()[-1] == 2 else [2, 3]:
        command = [python(), "tests/ranks/run.py", "--np", str(size), "--only", "torch", "--max-failures", "20", "--"]
        command += ["-m", "on_gpus and not on_cpus", "-W", "default", "-W", "error:::hvdtrain"]
        try:
            record.note("ranks", **{f"np={size}": tail(start(command)).splitlines()[-1]})
        except StepError as error:
            record.note("ranks", **{f"np={size}": str(error)})
            failed.append(f"np={size}")
    if failed:
        raise StepError(f"rank tests failed: {', '.join(failed)}")


def comparisons() -> Iterator[tuple[int, str]]:
    """Yield (ranks, workload), the largest number of ranks first."""
    if ON_CPU:
        yield from ((2, workload) for workload in ("gpus-gpt-compiled-bf16", "gpus-resnet50-fp32"))
        return
    for size in sorted(sizes(), reverse=True):
        yield from ((size, workload) for workload in WORKLOADS)


def compare(record: Record) -> None:
    """Measure steps against DDP's, as long as there is time."""
    results = record.path.with_suffix("")
    shutil.rmtree(results, ignore_errors=True)
    turns = [
        "--launches",
        "1",
        *(("--rounds", "1", "--seconds", "0.1") if ON_CPU else ("--rounds", "4", "--seconds", "2")),
    ]
    failed = []
    for size, workload in comparisons():
        name = f"{workload}-{size}"
        if time.monotonic() - BEGUN > LIMIT_S - COMPARISON_S:
            record.note("compare", **{name: "not measured: no time left"})
            continue
        command = [python(), "-m", "benchmarks", "--gpu", "--np", str(size), "--workload", workload]
        try:
            start([*command, "--out", str(results), *turns], limit_s=STEP_LIMIT_S / 2)
            record.note("compare", **{name: figures(results / f"{name}.json")})
        except (StepError, OSError, ValueError, KeyError) as error:
            record.note("compare", **{name: f"FAILED: {error}"})
            failed.append(name)
        gpu.say(f"{name}: {json.dumps(record.facts['steps']['compare'][name])[:200]}")
    if failed:
        raise StepError(f"comparisons failed: {', '.join(failed)}")


def figures(path: Path) -> dict[str, Any]:
    """Return what a comparison has measured: medians, ratios to DDP's step, and whether they meet the target."""
    result = json.loads(path.read_text())
    found: dict[str, Any] = {"title": result["title"], "batch_per_rank": result["batch_per_rank"], "target": TARGET}
    for name, peer in result["peers"].items():
        found[name] = {"step_ms": peer["step_ms"], "block_ms": peer["block_ms"]}
        if name in PEERS:
            spread = result["ratios"][f"{name}/ddp"]
            found[name] |= {"step / DDP": spread, "met": spread["median"] <= TARGET}
    return found


BEGUN = time.monotonic()


def main() -> int:
    """Take the steps, and say where the file is."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=gpu.BUILT / ("trial.json" if ON_CPU else "gpus.json"))
    parser.add_argument("steps", nargs="*", metavar="step", help=f"of {', '.join(STEPS)}; default: all")
    options = parser.parse_args()
    if unknown := [each for each in options.steps if each not in STEPS]:
        parser.error(f"no such step: {', '.join(unknown)}. There are: {', '.join(STEPS)}")
    take: dict[str, Callable[[Record], None]] = {"build": build, "prove": prove, "ranks": ranks, "compare": compare}
    wanted = options.steps or [step for step in STEPS if not (ON_CPU and step == "build")]
    failed: list[str] = []
    try:
        sizes()
    except gpu.GpuError as error:
        print(f"gpus: {error}", file=sys.stderr)
        return 1
    record = Record(options.out)
    for step in wanted:
        begun, is_over = time.monotonic(), False
        try:
            take[step](record)
        except (gpu.GpuError, StepError) as error:
            failed.append(f"{step}: {str(error).splitlines()[0]}")
            record.note(step, error=str(error))
            is_over = isinstance(error, gpu.GpuError)
        record.note(step, ok=not any(each.startswith(step) for each in failed), seconds=round(time.monotonic() - begun))
        gpu.say(f"{step}: {time.monotonic() - begun:.0f} s")
        if is_over:
            break
    for line in failed:
        print(f"gpus: {line}", file=sys.stderr)
    gpu.say(f"send back {options.out}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
