"""A fork waits until other threads have come to rest."""

from __future__ import annotations

import os
import subprocess
import sys

SCRIPT = """
import os, time
from hvdtrain.distributed import world
for _ in range(2):
    world._pause_before_forks()
slept = []
time.sleep = slept.append
child = os.fork()
if child:
    os.waitpid(child, 0)
    print(slept == [world.FORK_PAUSE_S] and world.FORK_PAUSE_S > 0)
else:
    os._exit(0)
"""


def test_a_fork_is_preceded_by_one_pause():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=os.environ, check=True)
    assert done.stdout.strip() == "True", done.stderr
