"""A job of two hosts: another user of the first one, and a third host of the network, which try to take part."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("horovod.torch", exc_type=ImportError)
sys.path.insert(0, str(Path(__file__).parent))
import attacked

from benchmarks import hosts

pytestmark = [
    pytest.mark.timeout(200),
    pytest.mark.skipif(bool(hosts.missing()), reason=hosts.missing() or "-"),
]
TOKEN = "hunter2-0123456789"
# All command lines that ever were, until somebody says that it is enough.
WATCH = r"""
import os, sys, time
seen = set()
while not os.path.exists(sys.argv[1]):
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                seen.add(open(f"/proc/{name}/cmdline", "rb").read().replace(b"\0", b" ").decode(errors="replace"))
            except OSError:
                pass
    time.sleep(0.002)
print("\n".join(sorted(line.replace("\n", " ") for line in seen)))
"""
# Asks the first host's services from another one: whatever its ports are.
ASK = (
    attacked.PORTS
    + r"""
import json
host, there, read = sys.argv[1], json.loads(sys.argv[2]), []
for port in there:
    for path in ("/global/0", "/global/1", "/runfunc/func"):
        if b" 200 " in http((host, port), "GET", path).split(b"\r\n")[0]:
            read.append(path)
        http((host, port), "PUT", path, b"\x00" * 300)
    say((host, port), b"\xff" * 5000)
print(json.dumps(read))
"""
)
PLACE = """
import os, socket, sys
from pathlib import Path
rank, name = os.environ["HOROVOD_RANK"], socket.gethostname()
facts = [name, os.getcwd(), os.environ["TOKEN"] == sys.argv[1], len(os.environ.get("HVDTRAIN_JOB_KEY", ""))]
Path(os.environ["OUT"], f"place-{rank}").write_text(repr(facts))
"""


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[hosts.Hosts]:
    folder = tmp_path_factory.mktemp("hosts")
    folder.chmod(0o755)
    with hosts.Hosts("hosta", "hostb", "hostc", folder=folder) as network:
        yield network


@pytest.fixture
def folder(network: hosts.Hosts, request: pytest.FixtureRequest) -> Path:
    path = network.folder / re.sub(r"\W", "-", request.node.name)
    path.mkdir()
    return path


class Run(attacked.Command):
    """A command on hosta."""

    limit_s = 90.0

    def __init__(self, network: hosts.Hosts, folder: Path, *command: str, cwd: Path | None = None) -> None:
        python = Path(sys.executable).parent
        process = network.start(
            "hosta", str(python / command[0]), *command[1:], cwd=cwd or folder, log=folder / "output",
            OMP_NUM_THREADS="1", TOKEN=TOKEN, OUT=str(folder),
        )  # fmt: skip
        super().__init__(folder, process)


def stranger(network: hosts.Hosts, host: str, code: str, *arguments: str) -> subprocess.Popen[str]:
    """Start Python as another user of a host."""
    line = network.command(host, [*attacked.AS_STRANGER, code, *arguments], cwd=Path("/"))
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, stdin=subprocess.DEVNULL)


def listening(network: hosts.Hosts, host: str) -> dict[int, str]:
    """Return {port: address} of what listens on a host, but for its ssh daemon."""
    code = "import json, sys\n" + attacked.PORTS.replace('"127.0.0.1" if host == "0.0.0.0" else host', "host")
    said = network.run(host, sys.executable, "-I", "-S", "-c", f"{code}\nprint(json.dumps(sorted(ports())))").stdout
    return {port: address for address, port in json.loads(said) if port != 22}


def keys(line: str) -> bool:
    """Return whether a command line holds pickled settings with a key in them."""
    for word in line.split():
        try:
            raw = base64.b64decode(word, validate=True)
        except ValueError:
            continue
        # Their key is the one field of bytes: 32 of them, behind SHORT_BINBYTES.
        if b"ettings" in raw and re.search(rb"key\x94C ", raw):
            return True
    return False


@pytest.mark.parametrize(
    "launcher",
    [["horovodrun", "--gloo"], ["horovodrun", "--mpi"], ["hvdtrain", "run", "--gloo"]],
    ids=["gloo", "mpi", "run"],
)
def test_no_key_and_no_value_stands_on_a_command_line_of_any_host(
    launcher: list[str], network: hosts.Hosts, folder: Path
) -> None:
    watchers = [stranger(network, host, WATCH, str(folder / "enough")) for host in ("hosta", "hostb")]
    script = (
        "import os, sys, time\nfrom pathlib import Path\n"
        "rank = os.environ.get('HOROVOD_RANK', os.environ.get('OMPI_COMM_WORLD_RANK'))\n"
        "key = os.environ.get('HVDTRAIN_JOB_KEY', '') + os.environ['TOKEN']\n"
        "Path(sys.argv[1], f'key-{rank}').write_text(key)\n"
        "time.sleep(0.5)\n"
    )
    (folder / "train.py").write_text(script)
    program = [sys.executable, "train.py"] if launcher[0] == "horovodrun" else ["train.py"]
    options = ["--disable-cache", "-np", "2", "-H", "hosta:1,hostb:1"]
    Run(network, folder, *launcher, *options, *program, str(folder)).end()
    (folder / "enough").touch()
    lines = [line for each in watchers for line in each.communicate(timeout=30)[0].splitlines()]
    assert any("train.py" in line for line in lines)
    assert not [line for line in lines if keys(line)]
    assert not [line for line in lines if TOKEN in line]
    told = {(folder / f"key-{rank}").read_text() for rank in (0, 1)}
    assert len(told) == 1
    key = told.pop().removesuffix(TOKEN)
    assert len(key) == 64
    assert not [line for line in lines if key in line]


def test_a_job_listens_at_its_interface_alone_and_answers_no_other_host(network: hosts.Hosts, folder: Path) -> None:
    before = {host: listening(network, host) for host in ("hosta", "hostb")}
    (folder / "train.py").write_text(attacked.TRAIN)
    run = Run(
        network, folder, "horovodrun", "--gloo", "-np", "2", "-H", "hosta:1,hostb:1",
        sys.executable, "train.py", str(folder),
    )  # fmt: skip
    run.wait_for("began-0", "began-1")
    time.sleep(3)  # rank 0 imports torch and says where it is
    there = {host: listening(network, host) for host in before}
    new = {host: {p: a for p, a in there[host].items() if p not in before[host]} for host in there}
    assert set(new["hosta"].values()) == {"10.77.0.1"}
    assert set(new["hostb"].values()) <= {"10.77.0.2"}
    asked = stranger(network, "hostc", ASK, "10.77.0.1", json.dumps(sorted(new["hosta"])))
    assert json.loads(asked.communicate(timeout=60)[0]) == []
    output = run.end()
    assert output.count(f"of 2: {attacked.total(2)}") == 2
    assert output.count("refused a request from 10.77.0.3 that was not made with this job's key") == 1
    assert "Traceback" not in output


def test_an_elastic_job_listens_at_its_interface_alone(network: hosts.Hosts, folder: Path) -> None:
    before = listening(network, "hosta")
    (folder / "discover").write_text("#!/bin/sh\nprintf 'hosta:1\\nhostb:1\\n'\n")
    (folder / "discover").chmod(0o755)
    script = (
        "import os, sys, time\nfrom pathlib import Path\n"
        "import horovod.torch as hvd, torch\nhvd.init()\n"
        "state = hvd.elastic.TorchState(model=torch.nn.Linear(1, 1))\n"
        "@hvd.elastic.run\n"
        "def train(state):\n"
        "    Path(sys.argv[1], f'began-{hvd.rank()}').touch()\n"
        "    while not Path(sys.argv[1], 'go').exists(): time.sleep(0.02)\n"
        "    print('total', hvd.allreduce(torch.ones(1), op=hvd.Sum).item())\n"
        "train(state)\n"
    )
    (folder / "train.py").write_text(script)
    run = Run(
        network, folder, "horovodrun", "--gloo", "-np", "2", "--min-np", "2", "--max-np", "2",
        "--host-discovery-script", str(folder / "discover"), sys.executable, "train.py", str(folder),
    )  # fmt: skip
    run.wait_for("began-0", "began-1")
    there = {port: address for port, address in listening(network, "hosta").items() if port not in before}
    assert set(there.values()) == {"10.77.0.1"}
    assert run.end().count("total 2.0") == 2


@pytest.mark.parametrize("name", ["with space", "a; touch $OUT/pwned", "it's"])
def test_ranks_elsewhere_start_in_the_same_folder_whatever_its_name(
    name: str, network: hosts.Hosts, folder: Path
) -> None:
    cwd = folder / name.replace("/", "\\")
    cwd.mkdir()
    (cwd / "place.py").write_text(PLACE)
    run = Run(
        network, folder, "horovodrun", "--gloo", "-np", "2", "-H", "hosta:1,hostb:1", sys.executable, "place.py", TOKEN,
        cwd=cwd,
    )  # fmt: skip
    run.end()
    assert (folder / "place-0").read_text() == repr(["hosta", str(cwd), True, 64])
    assert (folder / "place-1").read_text() == repr(["hostb", str(cwd), True, 64])
    assert not list(folder.rglob("pwned"))


def test_a_folder_that_another_host_has_not_is_told_in_one_line(network: hosts.Hosts, folder: Path) -> None:
    (folder / "place.py").write_text(PLACE)
    network.run("hosta", "mkdir", "-p", "/run/mine alone")
    (folder / "start").write_text('cd "/run/mine alone" && exec "$@"')
    launcher = [str(Path(sys.executable).parent / "horovodrun"), "--gloo", "-np", "3", "-H", "hosta:1,hostb:2"]
    run = Run(network, folder, "/bin/sh", "start", *launcher, sys.executable, str(folder / "place.py"), TOKEN)
    output = run.end()
    said = [line for line in output.splitlines() if "has no folder" in line]
    assert len(said) == 1, run.output()
    assert "horovodrun: host hostb has no folder '/run/mine alone' that can be entered" in said[0]
    assert "/run/mine alone" in (folder / "place-0").read_text()


def test_a_host_with_another_key_than_before_gets_nothing(network: hosts.Hosts, folder: Path) -> None:
    (folder / "train.py").write_text("")
    known = network._files / "ssh" / "known_hosts"
    was = known.read_text()
    hosts._call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "other"))
    other = (folder / "other.pub").read_text()
    known.write_text(
        "".join(f"hostb,10.77.0.2 {other}" if "hostb" in line else f"{line}\n" for line in was.splitlines())
    )
    try:
        for launcher, program in (
            (["horovodrun", "--gloo"], [sys.executable, "-c", ""]),  # which it may have reached within the hour
            (["horovodrun", "--gloo", "--disable-cache"], [sys.executable, "-c", ""]),
            (["hvdtrain", "run", "--gloo"], ["train.py"]),
        ):
            run = Run(network, folder, *launcher, "-np", "2", "-H", "hosta:1,hostb:1", *program)
            assert run.process.wait(60) != 0
            said = re.findall(r"[Hh]ost hostb has a changed ssh host key.*ssh-keygen.* -R ", run.output())
            assert len(said) == 1, run.output()
    finally:
        known.write_text(was)
