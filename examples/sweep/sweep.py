"""A sweep of learning rates and batch sizes: several trainings at once on this machine, and a table of the results.

    python sweep.py                       # two trainings at once, of one process each
    python sweep.py --ranks 2 --at-once 1 # one at a time, of two ranks
    python sweep.py --lr 0.01 0.1 1 --batch-size 16 64

Stop it with Ctrl-C: the same command trains only what is left, each from its last checkpoint. To train a pair again,
remove its folder. Trainings at once get cores of their own: ranks that share a core wait for each other.
train.py is the training; replace it by yours.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

TRAIN = Path(__file__).with_name("train.py")


def command(folder: Path, lr: float, batch_size: int, ranks: int) -> list[str]:
    """Return the command line of one training."""
    script = [str(TRAIN), "--lr", str(lr), "--batch-size", str(batch_size), "--folder", str(folder)]
    launcher = ["-m", "hvdtrain.cli", "run", "-np", str(ranks)] if ranks > 1 else []
    return [sys.executable, *launcher, *script]


def train(line: list[str], folder: Path, slots: SimpleQueue[list[int]]) -> str:
    """Train in the next free slot, if there is no result yet; return what became of it."""
    if (folder / "result.json").exists():
        return "done before"
    folder.mkdir(parents=True, exist_ok=True)
    cores = slots.get()
    try:
        with (folder / "log.txt").open("a") as log:
            limited = ["taskset", "--cpu-list", ",".join(map(str, cores)), *line]
            status = subprocess.run(limited, stdout=log, stderr=log, stdin=subprocess.DEVNULL, check=False).returncode
    finally:
        slots.put(cores)
    return "trained" if status == 0 else f"exit status {status}: see {folder / 'log.txt'}"


def main() -> int:
    """Train every pair, and print the table, the best first; return 1 if a training failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lr", type=float, nargs="+", default=[0.01, 0.1, 1.0], help="%(default)s")
    parser.add_argument("--batch-size", type=int, nargs="+", default=[16, 64], help="%(default)s")
    parser.add_argument("--ranks", type=int, default=1, help="ranks of each training; %(default)s")
    parser.add_argument("--at-once", type=int, default=2, help="trainings at once; %(default)s")
    parser.add_argument("--folder", type=Path, default=Path("runs/sweep"), help="%(default)s")
    args = parser.parse_args()

    cores = sorted(os.sched_getaffinity(0))
    slots: SimpleQueue[list[int]] = SimpleQueue()
    for slot in range(args.at_once):  # with fewer cores than slots, some share one
        slots.put(cores[slot :: args.at_once] or cores)
    pairs = list(itertools.product(args.lr, args.batch_size))
    folders = [args.folder / f"lr-{lr:g}-batch-{size}" for lr, size in pairs]
    lines = [command(folder, *pair, args.ranks) for folder, pair in zip(folders, pairs, strict=True)]
    with ThreadPoolExecutor(args.at_once) as pool:
        outcomes = list(pool.map(train, lines, folders, itertools.repeat(slots)))

    rows, failed = [], False
    for (lr, size), folder, outcome in zip(pairs, folders, outcomes, strict=True):
        if outcome.startswith("exit status"):
            failed = True
            print(f"lr {lr:g}, batch size {size}: {outcome}", file=sys.stderr)
            continue
        result = json.loads((folder / "result.json").read_text())
        loss, accuracy = result["loss"], result["accuracy"]
        order = math.inf if math.isnan(loss) else loss  # what diverged comes last
        rows.append((order, f"{lr:7g} {size:10} {loss:8.4f} {accuracy:9.4f}  {outcome}"))
    print("     lr batch size     loss  accuracy", *(row for _, row in sorted(rows)), sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
