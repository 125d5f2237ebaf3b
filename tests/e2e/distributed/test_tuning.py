"""Decisions of `init` take effect in each framework, under horovodrun, where the user has set nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hvdtrain.distributed import tuning
from hvdtrain.system import open_mpi

HOROVODRUN = Path(sys.executable).with_name("horovodrun")
ASKED = {
    "torch": "import torch; import hvdtrain.torch as hvd; hvd.init(); threads = torch.get_num_threads()",
    "tensorflow": (
        "import tensorflow as tf; import hvdtrain.keras as hvd; hvd.init(); "
        "threads = tf.config.threading.get_intra_op_parallelism_threads()"
    ),
}


# Each framework is given its threads by the same code: tests/unit/distributed/test_tuning.py.
@pytest.mark.parametrize("framework", ["torch", pytest.param("tensorflow", marks=pytest.mark.long)])
def test_each_rank_computes_with_its_share_of_the_cores(framework: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    folder = str(tmp_path)
    script.write_text(f"{ASKED[framework]}\nopen(f'{folder}/{{hvd.rank()}}.txt', 'w').write(str(threads))\n")
    clean = {name: value for name, value in os.environ.items() if "NUM_THREADS" not in name and "INTRAOP" not in name}
    command = [HOROVODRUN, "-np", "2", sys.executable, script]
    done = subprocess.run(
        command, env=clean | {"KERAS_BACKEND": "tensorflow"}, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr[-3000:]
    share = max(1, tuning.usable_cores() // 2)
    assert [int((tmp_path / f"{rank}.txt").read_text()) for rank in range(2)] == [share, share]


def test_ranks_of_one_host_load_no_network_transport_and_listen_nowhere(tmp_path: Path) -> None:
    # What is one library in the package index's Open MPI is many plugins in Debian's, of which few are loaded.
    names = ("libX11",) if open_mpi.spaces_marks() else ("mca_btl_tcp", "libfabric", "libX11")
    script = tmp_path / "script.py"
    script.write_text(
        "import psutil, torch; import hvdtrain.torch as hvd; hvd.init()\n"
        "assert hvd.allreduce(torch.ones(9)).sum() == 9\n"
        "loaded = open('/proc/self/maps').read()\n"
        f"found = [name for name in {names} if name in loaded]\n"
        "found += [str(c.laddr) for c in psutil.Process().net_connections() if c.status == 'LISTEN']\n"
        f"open(f'{tmp_path}/{{hvd.rank()}}.txt', 'w').write(' '.join(found) or 'none')\n"
    )
    done = subprocess.run([HOROVODRUN, "-np", "2", sys.executable, script], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]
    assert [(tmp_path / f"{rank}.txt").read_text() for rank in range(2)] == ["none", "none"]
