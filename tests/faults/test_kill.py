"""kill -9 while checkpoints are written: whatever has a final name is whole, and at most one save is lost."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from hvdtrain.checkpoint import Store, read

SAVER = Path(__file__).with_name("saver.py")


def killed_saver(root, first, delay_s):
    """Run the saver, kill it this long after its first save is taken; return what it said last, as numbers."""
    # Without a buffer: `communicate` would lose the lines that it holds.
    process = subprocess.Popen([sys.executable, SAVER, str(root), str(first)], stdout=subprocess.PIPE, bufsize=0)
    try:
        lines = [process.stdout.readline(), process.stdout.readline()]
        assert lines[1].decode() == f"taken {first}\n"
        time.sleep(delay_s)
    finally:
        process.kill()
        rest, _ = process.communicate(timeout=60)
    said = {"asked": first, "taken": first}
    for line in (b"".join(lines) + rest).decode().splitlines(keepends=True):
        word, _, number = line.partition(" ")
        if number.endswith("\n"):
            said[word] = int(number)
    return said["asked"], said["taken"]


@pytest.mark.timeout(900)
def test_a_kill_during_saves_leaves_only_whole_checkpoints_and_the_last_or_the_one_before(
    tmp_path, rng, scale, row, load_script
):
    contents = load_script("faults/saver.py").contents
    store = Store(tmp_path, keep_last=2)
    tries, newest, interrupted, saves = 20 * scale, -1, 0, 0
    for _ in range(tries):
        asked, taken = killed_saver(tmp_path, newest + 1, rng.uniform(0, 0.15))
        saves += taken - newest
        for path in store.newest_first():
            read(path)  # raises if unloadable
        found = store.newest_whole()
        before, newest = newest, found[1].meta["number"] if found else -1
        # A save that was asked for may not have begun, as the one before may still be under way.
        assert max(before, taken - 1) <= newest <= asked
        if found:
            expected = contents(newest)
            for stem, arrays in expected.arrays.items():
                for name, array in arrays.items():
                    np.testing.assert_array_equal(found[1].arrays[stem][name], array)
        interrupted += any(path.name.startswith(".") for path in tmp_path.iterdir())
        store.clear_leftovers()
        assert {path.name for path in tmp_path.iterdir()} == {path.name for path in store.newest_first()}
    assert interrupted > tries // 4, "too few kills fell into a save: this test proves little"
    row("kill -9 of a process that saves", tries, f"{tries} survived; {interrupted} within one of {saves} saves")
