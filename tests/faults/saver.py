"""Save as fast as the disk allows, in the background, until killed: saver.py FOLDER FIRST_NUMBER.

Prints "asked N" before it hands save N to the writer, and "taken N" once the writer has it. Two saves go to each place,
so that half of them replace one that is there.
"""

from __future__ import annotations

import sys
from itertools import count

import numpy as np

from hvdtrain.checkpoint import Contents, Store, Writer


def contents(number: int) -> Contents:
    """Return arrays that tell their number, about 2 MB."""
    rng = np.random.default_rng(number)
    model = {f"{i}.weight": rng.standard_normal(50_000).astype(np.float32) for i in range(5)}
    return Contents(
        {"model": model, "optimizer": {f"{i}.momentum": -array for i, array in enumerate(model.values())}},
        {"number": number},
    )


if __name__ == "__main__":
    store, writer = Store(sys.argv[1], keep_last=2), Writer()
    store.clear_leftovers()
    for number in count(int(sys.argv[2])):
        saved = contents(number)
        print("asked", number, flush=True)
        writer.submit(store.place(number // 2), saved, then=store.prune)
        print("taken", number, flush=True)
