"""A stranger who talks to the server at which the ranks of a Spark job meet."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Stranger

pytest.importorskip("horovod.torch", exc_type=ImportError)
pytest.importorskip("pyspark", reason="needs PySpark: pip install 'hvdtrain[spark]'")
if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
    pytest.skip("needs Java, in which Spark runs", allow_module_level=True)
sys.path.insert(0, str(Path(__file__).parent))
from attacked import Job, listening, total
from test_rendezvous import READ_AND_WRITE
from test_spark import JOB

pytestmark = pytest.mark.timeout(240)
MEET = """
def rank():
    import os, time
    folder, mine = pathlib.Path(sys.argv[1]), os.environ["HOROVOD_RANK"]
    (folder / f"began-{mine}").touch()
    while mine != "0" and not (folder / "attacked").exists():
        time.sleep(0.02)
    import horovod.torch as hvd, torch
    hvd.init()
    return hvd.allreduce(torch.full((1000,), 10.0 ** hvd.rank()), op=hvd.Sum).unique().tolist()
"""


def test_a_stranger_neither_reads_nor_writes_where_a_spark_jobs_ranks_are(tmp_path: Path, stranger: Stranger) -> None:
    begin, end = JOB.index("def rank():"), JOB.index("if __name__")
    script = JOB[:begin] + MEET.replace("sys.argv[1]", repr(str(tmp_path))) + "\n" + JOB[end:]
    (tmp_path / "job.py").write_text(script)
    job = Job(tmp_path, ["python", str(tmp_path / "job.py"), str(tmp_path)])
    try:
        job.wait_for("up")
        before = json.dumps(sorted(listening()))
        (tmp_path / "go").touch()
        job.wait_for("began-0", "began-1")
        assert json.loads(stranger.run(READ_AND_WRITE, before)) == []
        (tmp_path / "attacked").touch()
        output = job.end()
    finally:
        job.kill()
    assert f"returned [{total(2)}, {total(2)}]" in output
    assert "refused a request from 127.0.0.1 that was not made with this job's key" in output
