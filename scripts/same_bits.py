"""Record the bits that training leaves, of one run of each exchange, strategy, option and backend; compare later.

    python scripts/same_bits.py record before.json              # on the commit before a change that must change none
    python scripts/same_bits.py compare before.json             # on the commit after it
    python scripts/same_bits.py compare before.json --only torch delayed

On two and three ranks, each case (scripts/same_bits_cases.py) trains straight, and once more from a checkpoint within
an epoch. What is recorded are hashes of the weights, of the optimizer's and the strategy's state, and of the metrics.
Records of two machines, or of two versions of a framework, differ.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "ranks"))
from launch import rank_environment  # noqa: E402
from run import GROUPS as EVERY_GROUP  # noqa: E402

GROUPS = {
    each.name: each for each in EVERY_GROUP if each.name in ("torch", "keras-tensorflow", "keras-torch", "keras-jax")
}
SIZES = (2, 3)
LIMIT_S = 1800

Hashes = dict[str, str]  # "weights", "state", "metrics", each also with "resumed " before it


def run(group: str, size: int, only: list[str]) -> dict[str, Hashes]:
    """Run a group's cases on `size` ranks; return each case's hashes, which are equal on all ranks or say so."""
    with tempfile.TemporaryDirectory() as folder:
        environment = rank_environment(GROUPS[group].environment())
        launcher = [str(Path(sys.executable).parent / "horovodrun"), "-np", str(size), "-H", f"localhost:{size}"]
        script = [sys.executable, str(ROOT / "scripts" / "same_bits_cases.py"), GROUPS[group].framework, folder, *only]
        done = subprocess.run(
            [*launcher, *script], env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        files = sorted(Path(folder).glob("hashes-*.json"))
        if done.returncode or len(files) != size:
            raise SystemExit(
                f"{group} on {size} ranks ended with status {done.returncode}:\n{done.stdout}{done.stderr}"
            )
        first, *others = [json.loads(file.read_text()) for file in files]
        for rank, other in enumerate(others, start=1):
            for case, hashes in other.items():
                if hashes != first[case]:
                    first[case] = {"different": f"rank {rank} has others than rank 0"}
        found: dict[str, Hashes] = first
        return found


def differences(before: dict[str, Hashes], after: dict[str, Hashes], *, all_cases: bool) -> list[str]:
    """Return a line for each case whose hashes are others than before, or that only one of the two has."""
    lines = []
    for case in sorted({*before, *after} if all_cases else after):
        if case not in before or case not in after:
            lines.append(f"{case}: only {'after' if case in after else 'before'}")
            continue
        names = before[case].keys() | after[case].keys()
        changed = sorted(name for name in names if before[case].get(name) != after[case].get(name))
        if changed or "different" in names:
            lines.append(f"{case}: {', '.join(changed) or after[case]['different']}")
    return lines


def main() -> int:
    """Record, or compare; return 1 if a case differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("action", choices=["record", "compare"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--group", action="append", choices=GROUPS)
    parser.add_argument("--np", action="append", type=int)
    parser.add_argument("--only", nargs="*", default=[], help="cases whose names hold one of these words")
    given = parser.parse_args()
    found: dict[str, Hashes] = {}
    for group in given.group or GROUPS:
        for size in given.np or SIZES:
            cases = run(group, size, given.only)
            found |= {f"{group} np={size} {case}": hashes for case, hashes in cases.items()}
            print(f"{group} np={size}: {len(cases)} cases", flush=True)
            if given.action == "record":
                given.file.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    if given.action == "record":
        return 0
    is_whole = not (given.group or given.np or given.only)
    lines = differences(json.loads(given.file.read_text()), found, all_cases=is_whole)
    print("\n".join([*lines, f"{len(found)} cases, {len(lines)} with other bits"]))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
