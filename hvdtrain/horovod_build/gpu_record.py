"""The records of proofs on this host's GPUs, beside the wheels in the cache; `init` reads them, see `gpu_proof`.

A record counts for GPUs that it names, and as long as driver, GPU model, NCCL, torch, hvdtrain and Horovod's build are
those of the proof.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hvdtrain.horovod_build import cache, find, installed, owners
from hvdtrain.horovod_build.errors import BuildError
from hvdtrain.horovod_build.gpu_proof import Proof
from hvdtrain.system import gpus, private_files, toolchain

COMMAND = "hvdtrain doctor --gpu"
_FOLDER = "gpu-proofs"
_DEVICE = "cuda"


class Answer(NamedTuple):
    """Whether a proof holds, and why or why not."""

    holds: bool
    why: str


def setup(shown: Sequence[gpus.Gpu]) -> dict[str, str]:
    """Return what a proof on these GPUs is for, by name."""
    drivers, _ = toolchain.gpu_drivers()
    torch = find.find_torch()
    return {
        "driver": drivers[0] if drivers else "",
        "GPU": ", ".join(sorted({each.name for each in shown})),
        "NCCL": find.nccl_version(),
        "torch": torch.version if torch else "",
        "hvdtrain": str(importlib.import_module("hvdtrain").__version__),
        "Horovod's build": str(installed.record().get("key", "")),
    }


def keep(proof: Proof) -> Path:
    """Write the record of a proof on GPUs, in place of an earlier one of the same GPUs; return the file."""
    if proof.device != _DEVICE:
        raise ValueError(f"Only a proof on GPUs can be kept. Received: one on {proof.device}")
    shown = gpus.visible()
    uuids = sorted(each.uuid for each in shown)
    name = hashlib.sha256(",".join(uuids).encode()).hexdigest()[:16]
    path = cache.cache_folder()[0] / _FOLDER / f"{name}.json"
    record = {
        "device": proof.device, "time": time.time(), "gpus": uuids, "ranks": proof.ranks, "setup": setup(shown),
        "failures": proof.failures,
    }  # fmt: skip
    part = path.with_suffix(f".{os.getpid()}")
    with owners.alone():
        private_files.make_folder(path.parent)
        private_files.write_text(part, json.dumps(record, indent=2) + "\n")
    os.replace(part, path)
    return path


def answer() -> Answer:
    """Return whether a proof holds for the GPUs that this process sees; the latest one counts."""
    shown = gpus.visible()
    uuids = {each.uuid for each in shown}
    try:
        records = [each for each in _records() if uuids and uuids <= set(each["gpus"])]
        latest = max(records, key=lambda each: float(each["time"]), default=None)
        if latest is None:
            return Answer(False, f"no proof for this host's GPUs: {COMMAND}")
        return _judge(latest, setup(shown))
    except (BuildError, OSError, AttributeError, KeyError, TypeError, ValueError) as problem:
        return Answer(False, f"the record of this host's proof cannot be read ({problem}): {COMMAND}")


def _judge(record: dict[str, Any], now: dict[str, str]) -> Answer:
    date = time.strftime("%Y-%m-%d", time.gmtime(record["time"]))
    then: dict[str, str] = record["setup"]
    changed = [f"{name} {then.get(name) or 'unknown'}, now {value or 'unknown'}" for name, value in now.items()
               if not value or then.get(name) != value]  # fmt: skip
    if changed:
        short = [each for each in changed if not each.startswith("Horovod's build")] or ["another build of Horovod"]
        return Answer(False, f"proven on {date} with {'; '.join(short)}: {COMMAND}")
    if record["failures"]:
        return Answer(False, f"the proof on {date} failed: {record['failures'][0].splitlines()[0]}")
    return Answer(True, f"proven here on {date}")


def _records() -> Iterator[dict[str, Any]]:
    """Yield what the records hold; one that another user can write is an error."""
    for path in sorted((cache.locate()[0] / _FOLDER).glob("*.json")):
        for each in (path, path.parent):
            if why := owners.who_can_change(each, sticky=False):
                raise BuildError(why)
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["device"] == _DEVICE:
            yield record
