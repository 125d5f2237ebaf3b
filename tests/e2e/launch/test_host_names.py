"""Jobs of one host whose own name has no address, as in a container without a network, or that of a network's card.

The host is made of namespaces, which need root; nothing of this machine is changed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent
NAME, ADDRESS = "nobody-knows", "10.77.1.1"
GLOO_ALONE = {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}  # as in a build without MPI

UNSHARE = ("unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
# $1: the folder, with the host's own files; then the command.
BEGIN = f"""
set -e
hostname {NAME}
mount --bind "$1/hosts" /etc/hosts
ip link set lo up
ip link add eth0 type bridge
ip address add {ADDRESS}/24 dev eth0
ip link set eth0 up
shift
exec "$@"
"""

SCRIPT = """
import pathlib, sys, torch
import hvdtrain.torch as hvd

hvd.init()
assert hvd.allreduce(torch.ones(9), op=hvd.Sum, name="ones").tolist() == [hvd.size()] * 9
# Of everything on this host that is connected or listens: nothing runs here but the job.
sockets = [line.split() for name in ("tcp", "tcp6") for line in open(f"/proc/net/{name}")]
own = [fields[1] for fields in sockets if fields[3] in ("01", "0A")]
pathlib.Path(sys.argv[1], f"{hvd.rank()}-of-{hvd.size()}.txt").write_text(" ".join(own))
"""


def missing() -> str:
    """Return why no such host can be made here, "" if it can."""
    absent = [name for name in ("unshare", "ip", "mount", "hostname") if shutil.which(name, path=path()) is None]
    if absent:
        return f"no {', '.join(absent)}: apt-get install iproute2 util-linux hostname"
    if os.geteuid() != 0:
        return "namespaces need root"
    tried = subprocess.run([*UNSHARE, "ip", "link", "add", "eth0", "type", "bridge"], capture_output=True, text=True)
    return "" if tried.returncode == 0 else f"no namespaces may be made here: {tried.stderr.strip()}"


def path() -> str:
    return os.pathsep.join([str(BIN), os.environ["PATH"], "/usr/sbin", "/sbin"])


@pytest.fixture(scope="module", autouse=True)
def _hosts_can_be_made() -> None:
    if why := missing():
        pytest.skip(why)


@pytest.mark.parametrize(
    ("command", "hosts", "variables"),
    [
        ("horovodrun -np 2 --gloo", "", {}),
        pytest.param("horovodrun -np 2 --gloo", f"{ADDRESS} {NAME}\n", {}, marks=pytest.mark.long),
        ("hvdtrain run -np 2 --gloo", f"{ADDRESS} {NAME}\n", {}),
        ("horovodrun -np 2 --mpi", "", {}),
        ("", f"{ADDRESS} {NAME}\n", {}),
        ("", "", GLOO_ALONE),
    ],
)
def test_ranks_of_one_host_meet_on_loopback_whatever_its_name_says(
    command: str, hosts: str, variables: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}")
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [*UNSHARE, "sh", "-c", BEGIN, "sh", tmp_path, *command.split(), sys.executable, "script.py", tmp_path],
        env={**os.environ, "PATH": path(), "OMP_NUM_THREADS": "1", "HOME": str(tmp_path), **variables},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    ranks = 2 if command else 1
    addresses = [(tmp_path / f"{rank}-of-{ranks}.txt").read_text().split() for rank in range(ranks)]
    assert ranks == 1 or "--mpi" in command or all(addresses), "ranks over Gloo are connected"
    # 127.0.0.1 and ::1, as the kernel writes them.
    elsewhere = [where for rank in addresses for where in rank if not re.match("0100007F:|0{24}01000000:", where)]
    assert elsewhere == []
    assert ranks > 1 or addresses == [[]], "a process alone opens no port"


def test_several_hosts_without_an_interface_or_an_address_are_told_what_to_set(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("127.0.0.1 localhost\n")
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [*UNSHARE, "sh", "-c", BEGIN, "sh", tmp_path, sys.executable, "script.py", tmp_path],
        env={**os.environ, "PATH": path(), "HOROVOD_SIZE": "2", "HOROVOD_RANK": "0", **GLOO_ALONE},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 1
    assert f"this host's name, {NAME}, has no address" in done.stderr
    assert "set HOROVOD_GLOO_IFACE to the network interface" in done.stderr
