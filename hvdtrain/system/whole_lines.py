"""Let a rank write whole lines where PYTHONUNBUFFERED=1, as containers set it, would send them in pieces.

A launcher prefixes each piece that it reads with the rank: `[1,0]<stderr>:    [1,0]<stderr>:raise ...`.
"""

from __future__ import annotations

import io
import os
import sys

from hvdtrain.system.settings import RANK_VARIABLES


def begin() -> None:
    """Write each line of standard output and error in one piece, if a launcher has started this process."""
    if any(name in os.environ for name in RANK_VARIABLES):
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper) and stream.write_through:
                stream.reconfigure(line_buffering=True, write_through=False)
