"""What `init` decides takes hold in each framework, under horovodrun, where nobody has set anything."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hvdtrain import tuning

HOROVODRUN = Path(sys.executable).with_name("horovodrun")
ASKED = {
    "torch": "import torch; import hvdtrain.torch as hvd; hvd.init(); threads = torch.get_num_threads()",
    "tensorflow": (
        "import tensorflow as tf; import hvdtrain.keras as hvd; hvd.init(); "
        "threads = tf.config.threading.get_intra_op_parallelism_threads()"
    ),
}


@pytest.mark.parametrize("framework", ASKED)
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
