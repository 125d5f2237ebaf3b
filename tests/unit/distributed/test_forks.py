"""A fork waits until other threads have come to rest."""

from __future__ import annotations

import os
import subprocess
import sys

SCRIPT = """
import os, time
from hvdtrain.distributed import forks
for _ in range(2):
    forks.prepare()
slept = []
time.sleep = slept.append
child = os.fork()
if child:
    os.waitpid(child, 0)
    print(slept == [forks.SETTLE_S] and forks.SETTLE_S > 0)
else:
    os._exit(0)
"""


def test_a_fork_is_preceded_by_one_pause():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=os.environ, check=True)
    assert done.stdout.strip() == "True", done.stderr
