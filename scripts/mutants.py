"""Put known defects into a copy of the tree, one at a time, and see that tests of `make test` fail.

    make mutants                                # all of them: about a quarter of an hour on two idle cores
    python scripts/mutants.py sharding bf16     # those whose name holds one of these words
    python scripts/mutants.py --list

A defect (scripts/defects.py) is a text of one file that is replaced by another. Its command is a part of `make test`.
Each command runs on the unchanged copy first, since a command that fails anyway catches nothing.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from defects import DEFECTS, Command, Defect

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 400


def copy_of_the_tree(folder: Path) -> Path:
    """Copy what git knows, and new files that it does not ignore."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


@contextmanager
def put_into(tree: Path, defect: Defect) -> Iterator[None]:
    """Change the file while the block runs.

    Raises:
        ValueError: `before` does not stand in the file exactly once.
    """
    path = tree / defect.file
    text = path.read_text(encoding="utf-8")
    if text.count(defect.before) != 1:
        raise ValueError(
            f"{defect.name}: {defect.before!r} stands {text.count(defect.before)} times in {defect.file}, not once. "
            "Adapt the defect to the code of today."
        )
    path.write_text(text.replace(defect.before, defect.after), encoding="utf-8")
    try:
        yield
    finally:
        path.write_text(text, encoding="utf-8")


def run(command: Command, tree: Path) -> tuple[bool, str]:
    """Run a command in the copy; return whether it passed, and the end of what it printed."""
    # Without bytecode: a file that changes twice in a second would be taken for the one that was compiled.
    settings = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(tree), "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen(
        command,
        cwd=tree,
        env=os.environ | settings,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        process.terminate()  # run.py then ends its ranks
        output, _ = process.communicate()
        return False, f"{output[-2000:]}\nno end within {LIMIT_S} s"
    return process.returncode == 0, output[-3000:]


def look(defects: Sequence[Defect], tree: Path) -> int:
    """Run all defects; return how many no test caught."""
    for number, command in enumerate(dict.fromkeys(defect.command for defect in defects), start=1):
        print(f"unchanged {number}: {' '.join(command[1:])}", flush=True)
        passed, output = run(command, tree)
        if not passed:
            raise SystemExit(f"{output}\nThis fails without any defect: it would catch nothing.")
    alive = 0
    for number, defect in enumerate(defects, start=1):
        began = time.monotonic()
        with put_into(tree, defect):
            passed, _ = run(defect.command, tree)
        alive += passed
        seconds = time.monotonic() - began
        print(f"{number:3} {'ALIVE ' if passed else 'caught'} {defect.name} ({seconds:.0f} s)", flush=True)
        if passed:
            print(f"    {defect.file}: {defect.before!r} -> {defect.after!r}\n    {' '.join(defect.command)}")
    return alive


def main(arguments: Sequence[str]) -> int:
    """Run what the command line asks for, and return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("words", nargs="*", help="only defects whose name holds one of these")
    parser.add_argument("--list", action="store_true", help="say what there is, and run nothing")
    options = parser.parse_args(arguments)
    chosen = [each for each in DEFECTS if not options.words or any(word in each.name for word in options.words)]
    if options.list:
        print(*(each.name for each in chosen), sep="\n")
        return 0
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hvdtrain-mutants-") as folder:
        alive = look(chosen, copy_of_the_tree(Path(folder)))
    print(f"{len(chosen) - alive} of {len(chosen)} defects caught in {time.monotonic() - began:.0f} s")
    return 1 if alive or not chosen else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
