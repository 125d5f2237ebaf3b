"""`hvdtrain doctor --report`: all that helps, and nothing that says who or where somebody is."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from hvdtrain.cli import program
from hvdtrain.horovod_build.probe import Probe
from hvdtrain.system.machine_names import Scrubber
from hvdtrain.tools import doctor
from hvdtrain.tools.doctor.facts import Facts, Verdict

FACTS = Facts(
    versions={"python": "3.11.7", "hvdtrain": "0.1.0", "horovod": "0.28.1", "torch": "2.13.0+cpu"},
    cuda={"torch": ""},
    horovod_for={"torch": "2.13.0+cpu"},
    horovod_planes=("gloo", "mpi"),
    mpi="mpirun (Open MPI) 4.1.4",
    gpus=("NVIDIA H100, 81559 MiB",),
    gpu_driver="580.65.06",
    interfaces={"lo": "127.0.0.1", "eth0": "10.17.3.99", "enx00e04c68abcd": "192.0.2.7"},
    cpu_cores=8,
    cpu_allowed=4,
    shared_memory_mib=64,
)
SAID = """no answer within 90 s
[node17-secretlab:4242] PMIX ERROR in /home/lovelace/proj/train.py
node17-secretlab.corp.example: connect to 10.17.3.99:5000 or [fe80::1ff:fe23:4567:890a] from 00:1b:44:11:3a:b7 failed
export HF_TOKEN=hf_abcdefghijklmnop; git clone https://lovelace:hunter2@git.example/x; password: correcthorse
File "/mnt/homes/lovelace/venv/lib/horovod/common.py", line 3, version 0.28.1 | lovelace | `x`"""
PRIVATE = (
    "lovelace", "node17", "secretlab", "corp.example", "10.17.3.99", "192.0.2.7", "fe80::", "00:1b:44", "00e04c68abcd",
    "hf_abc", "hunter2", "correcthorse", "sekret", "/mnt/homes", "otherhost",
)  # fmt: skip


@pytest.fixture
def somebody(monkeypatch):
    """Be somebody on some machine, with an environment that tells much."""
    for name in ("USER", "LOGNAME"):
        monkeypatch.setenv(name, "lovelace")
    monkeypatch.setenv("HOME", "/mnt/homes/lovelace")
    monkeypatch.setattr(socket, "gethostname", lambda: "node17-secretlab")
    monkeypatch.setattr(socket, "getfqdn", lambda: "node17-secretlab.corp.example")
    monkeypatch.setenv("HOROVOD_LOG_LEVEL", "debug")
    monkeypatch.setenv("NCCL_DEBUG_FILE", "/mnt/homes/lovelace/nccl.log")
    monkeypatch.setenv("HOROVOD_SECRET_KEY", "sekret")
    monkeypatch.setenv("HOROVOD_HOSTNAME", "otherhost")
    monkeypatch.setenv("MASTER_ADDR", "otherhost")
    monkeypatch.setenv("WANDB_API_KEY", "sekret")
    monkeypatch.setenv("MY_OWN", "sekret")


def report(*, verdicts=()):
    probes = [
        Probe("torch", "mpi", 2, "", 3.0, 1.25),
        Probe("torch", "gloo", 2, SAID, 90.0, command=("/mnt/homes/lovelace/venv/bin/horovodrun", "-np", "2")),
    ]
    return doctor.markdown(FACTS, probes, [*verdicts, *doctor.judge_probes(probes)])


@pytest.mark.usefixtures("somebody")
def test_nothing_private_is_in_the_report():
    text = report()
    assert [line for line in text.splitlines() if any(each in line for each in PRIVATE)] == []


@pytest.mark.usefixtures("somebody")
def test_what_helps_is_in_the_report():
    text = report(verdicts=[Verdict("little-shared-memory", "warning", "/dev/shm holds 64 MiB", "docker run ...")])
    for told in (
        "**Training would not work here.**",
        "| torch | 2.13.0+cpu (CPU) |",
        "| data planes | gloo, mpi |",
        "| MPI | mpirun (Open MPI) 4.1.4 |",
        "NVIDIA H100, 81559 MiB",
        "580.65.06",
        "| CPU cores | 4 of 8 usable |",
        "| torch over mpi | 1.25 ms for 1 MiB, 2 ranks on cpu, 3.0 s in all |",
        "| torch over gloo | FAILED after 90.0 s, 2 ranks |",
        "- warning `little-shared-memory`. Cure: `docker run ...`",
        "- error `allreduce-torch-gloo`. Cure: `~/venv/bin/horovodrun -np 2`",
        "      [HOST:4242] PMIX ERROR in /home/USER/proj/train.py",
        "connect to ADDRESS:5000 or [ADDRESS] from MAC failed",
        'File "~/venv/lib/horovod/common.py", line 3, version 0.28.1',
        "| lo | loopback",
        "| eth0 | private IPv4",
        "| enxMAC | ",
        "| HOROVOD_LOG_LEVEL | debug |",
        "| NCCL_DEBUG_FILE | ~/nccl.log |",
        "| HOROVOD_SECRET_KEY | (hidden) |",
        "| MASTER_ADDR | (hidden) |",
    ):
        assert told in text, told


def test_a_name_that_is_a_frameworks_leaves_versions_readable():
    scrub = Scrubber(users=["torch"], hosts=["localhost"], homes=["/home/torch"], keep=["torch"])
    assert scrub("torch 2.13.0 in /home/torch/x on localhost") == "torch 2.13.0 in ~/x on localhost"


def test_addresses_go_and_versions_stay():
    scrub = Scrubber(users=[], hosts=[], homes=[])
    assert scrub("1.2.3.4, ::1, 127.0.0.1, 2001:db8::7, Open MPI 4.1.4, 12:30:45, gloo::x, std::string") == (
        "ADDRESS, ::1, 127.0.0.1, ADDRESS, Open MPI 4.1.4, 12:30:45, gloo::x, std::string"
    )


FOREIGN = """ssh: Could not resolve hostname gandalf: Name or service not known
ssh: connect to host frodo port 22: Connection refused
bilbo@shire-7.uni-bremen.de: Permission denied (publickey,password).
Warning: Permanently added '[merry]:2222' (ED25519) to the list of known hosts.
Connection to pippin closed.
[nid00123:04242] *** Process received signal ***
node17:123:456 [0] NCCL INFO Bootstrap : Using eth0:10.1.2.3<0>
srun: error: cn-0042: task 3: Exited with exit code 1
  Local host:    samwise
File "/mnt/nfs/users/saruman/train.py", line 3: saruman wrote it
/scratch/gollum/x ~grima/y /data/home/elrond/.cache/z owned by user arwen
horovodrun -np 4 -H alpha:2,beta:2 train.py, then alpha failed
rank 3 on host elwing was lost; hosts galadriel and gamma9 cannot be reached
connect to [fe80::1%eth0]:22, tcp://10.0.0.5:4242, ip-10-0-0-12.ec2.internal, https://wiki.mycorp.com/x
uid=1001(eomer) user=denethor dgx-a100-07.cluster: lost"""
READABLE = """torch 2.13.0+cpu, libfoo.so.1, horovod.torch.mpi_ops, torch.nn.Module, memcpy@GLIBC_2.14, np.int64
torch@2.13 /usr/lib/x86_64-linux-gnu/libnccl.so.2.30.7: undefined symbol: std::string
host memory 5 GiB; the host is up; no host name; hosts that cannot be reached; on host memory; as user root
see https://github.com/horovod/horovod/issues/1 and https://download.pytorch.org/whl
/usr/local/lib/python3.11/site-packages/horovod/common.py:12: UserWarning: x=1 key: 'a' num_tokens=3 12:30:45
RuntimeError: Gloo connectFullMesh failed with [../third_party/gloo/tcp/pair.cc:144] no error at 0x7f33"""


def test_other_hosts_and_other_users_are_not_told():
    scrub = Scrubber(users=["me"], hosts=["mine"], homes=["/home/me"])
    told = scrub(FOREIGN)
    names = (
        "gandalf frodo bilbo shire bremen merry pippin nid00123 node17 cn-0042 samwise saruman gollum grima "
        "elrond arwen alpha beta elwing galadriel gamma9 fe80 10. ec2 mycorp eomer denethor dgx"
    )
    assert [name for name in names.split() if name in told] == []
    for kept in (
        "Could not resolve hostname HOST",
        "USER@HOST: Permission denied",
        "NCCL INFO Bootstrap",
        "-H HOST:2,HOST:2",
    ):
        assert kept in told


def test_versions_modules_and_files_stay_readable():
    assert Scrubber(users=["me"], hosts=["mine"], homes=["/home/me"])(READABLE) == READABLE


@pytest.mark.usefixtures("somebody")
def test_hosts_that_the_environment_names_are_known(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "rivendell")
    assert Scrubber(users=[], homes=[])("lost rivendell and otherhost") == "lost HOST and HOST"


def test_the_report_goes_to_stdout_or_into_a_file(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(doctor, "gather", lambda: Facts(versions={"python": "3.11.7"}))
    monkeypatch.chdir(tmp_path)

    def call(*words):
        monkeypatch.setattr("sys.argv", ["hvdtrain", "doctor", *words])
        with pytest.raises(SystemExit) as info:
            program.main()
        return info.value.code, capsys.readouterr().out

    status, printed = call("--report")
    assert status == 1, "nothing to train with"
    assert "- error `no-framework`. Cure: `pip install 'torch>=" in printed
    assert call("--report", "--out", "issue.md") == (1, "wrote issue.md: read it, then paste it into an issue\n")
    assert Path("issue.md").read_text() == printed
