"""`hvdtrain run` on several hosts, which are namespaces of this machine with an ssh daemon each."""

from __future__ import annotations

import contextlib
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks import hosts

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.timeout(200),
    pytest.mark.skipif(bool(hosts.missing()), reason=hosts.missing() or "-"),
]

LAUNCHERS = {"gloo": "--gloo", "mpi": "--mpi", "mpirun": "--launcher mpirun"}
RANK = {"gloo": "HOROVOD_RANK", "mpi": "OMPI_COMM_WORLD_RANK", "mpirun": "OMPI_COMM_WORLD_RANK"}

# Slow until one rank has been killed, or as long as the test likes.
TRAIN = """
import os, socket, sys, time
from pathlib import Path
import torch, hvdtrain
from hvdtrain.callbacks import Callback

world = hvdtrain.init()
line = f"rank {world.rank} of {world.size} on {socket.gethostname()}, local {world.local_rank} of {world.local_size}"
sys.stdout.write(f"{line}, mark {os.environ.get('MARK')}\\n")
sys.stdout.flush()
torch.manual_seed(0)
x = torch.rand(256, 4)
model = torch.nn.Linear(4, 1)


class Slow(Callback):
    def on_step_end(self, trainer, step):
        if world.is_root:
            Path("steps").write_text(str(trainer.global_step))
        time.sleep(0 if Path("fast").exists() else 0.1)


trainer = hvdtrain.Trainer(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=torch.nn.MSELoss())
trainer.fit((x, x.sum(1, keepdim=True)), epochs=30, batch_size=32, checkpoint_dir="kept", callbacks=[Slow()])
if world.is_root:
    sys.stdout.write(f"steps {trainer.global_step}\\n")
"""

# What the ranks are to each other, what they add up to, and whether they hold the same bits after training.
SEVERAL = """
import hashlib, socket, sys, torch, hvdtrain, hvdtrain.torch as hvd

world = hvdtrain.init()
x = torch.rand(256, 4, generator=torch.Generator().manual_seed(0))
torch.manual_seed(world.rank)
model = torch.nn.Sequential(torch.nn.Linear(4, 300), torch.nn.Tanh(), torch.nn.Linear(300, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
hvdtrain.Trainer(model, optimizer=optimizer, loss=torch.nn.MSELoss()).fit(
    (x, x.sum(1, keepdim=True)), epochs=2, batch_size=16
)
bits = hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in model.parameters())).hexdigest()
total = hvd.allreduce(torch.full((100_000,), 2.0**world.rank), op=hvd.Sum, name="total").unique().tolist()
place = f"local {hvd.local_rank()}/{hvd.local_size()} cross {hvd.cross_rank()}/{hvd.cross_size()}"
sys.stdout.write(f"rank {world.rank}/{world.size} {place} on {socket.gethostname()}, total {total}, bits {bits}\\n")
"""

# No framework: what starts ranks and ends them is the same.
LIGHT = """
import os, signal, socket, sys, time
from pathlib import Path

signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
name = socket.gethostname()
Path(f"on-{name}").write_text("")
while not Path("fast").exists():
    time.sleep(0.05)
Path(f"done-{name}").write_text("")
"""


# A step of rank 1 takes 300 MB, which are not freed; its cgroup may have less than all steps take.
GROWING = """
import os, time
from pathlib import Path
import torch
import hvdtrain.torch as hvd

hvd.init()
if hvd.rank() == 1:
    Path(os.environ["CGROUP"], "cgroup.procs").write_text("0")
net = torch.nn.Linear(512, 512)
optimizer = hvd.DistributedOptimizer(torch.optim.Adam(net.parameters()), net.named_parameters())
x, saved = torch.ones(8, 512), []
for step in range(100):
    if hvd.rank() == 1:
        saved.append(torch.ones(75_000_000))
    net(x).sum().backward()
    optimizer.step()
    time.sleep(0 if step else 3)
"""


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[hosts.Hosts]:
    folder = tmp_path_factory.mktemp("hosts")
    with hosts.Hosts("hosta", "hostb", "hostc", "hostd", folder=folder, silent=["hostd"]) as network:
        # As Docker makes them on every host, for itself and for what was composed: they lead nowhere.
        for name in network.names[:3]:
            for bridge, address in (("docker0", "172.17.0.1/16"), (f"br-{name}", "172.18.0.1/16")):
                for words in (
                    f"link add {bridge} type bridge",
                    f"address add {address} dev {bridge}",
                    f"link set {bridge} up",
                ):
                    network.run(name, "ip", *words.split())
        yield network


class Run:
    """One `hvdtrain run` on hosta."""

    def __init__(
        self, network: hosts.Hosts, folder: Path, program: str, options: str, *, ranks: int = 2, **variables: str
    ) -> None:
        self.network, self.folder = network, folder
        (folder / "train.py").write_text(program)
        line = [str(Path(sys.executable).parent / "hvdtrain"), "run", "-np", str(ranks), *options.split(), "train.py"]
        self.process = network.start("hosta", *line, cwd=folder, log=folder / "log", **variables)

    def output(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def there(self, name: str) -> bool:
        return (self.folder / name).exists()

    def step(self) -> int:
        return int((self.folder / "steps").read_text() or 0) if self.there("steps") else 0

    def wait_for(self, condition: Callable[[], object], limit_s: float = 100) -> None:
        deadline = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.05)

    def send(self, number: int) -> None:
        """Send a signal to `hvdtrain run` itself, which is below what took it to its host."""
        psutil.Process(self.process.pid).children()[0].send_signal(number)

    def let_go(self) -> None:
        (self.folder / "fast").touch()

    def status(self) -> int:
        return self.process.wait(100)

    def ranks(self, host: str) -> list[int]:
        """Return the ranks' processes on a host, the shell of ssh's among them."""
        return [
            pid
            for name in ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK")
            for rank in "01"
            for pid in self.network.processes(host, having={name: rank})
        ]


@pytest.fixture
def start(network: hosts.Hosts) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def begin(program: str, options: str, **how: Any) -> Run:
        folder = network.folder / f"run-{time.monotonic_ns()}"
        folder.mkdir()
        runs.append(Run(network, folder, program, options, **how))
        return runs[-1]

    yield begin
    network.plug("hostb")
    for run in runs:
        run.process.kill()
        run.process.wait()


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_rank_killed_on_another_host_is_named_and_training_goes_on(start: Callable[..., Run], launcher: str) -> None:
    run = start(TRAIN, f"-H hosta:1,hostb:1 {LAUNCHERS[launcher]}", MARK="mine", HVDTRAIN_RUNS="runs")
    run.wait_for(lambda: run.step() >= 12)
    (rank,) = [
        pid for pid, line in run.network.processes("hostb", having={RANK[launcher]: "1"}).items() if "train.py" in line
    ]
    psutil.Process(rank).kill()
    run.let_go()
    assert run.status() == 0, run.output()
    output = run.output()
    assert re.search(r"hvdtrain run: restart 1 of 3: rank 1 on host hostb was killed", output), output
    for rank, name in enumerate(("hosta", "hostb")):
        assert output.count(f"rank {rank} of 2 on {name}, local 0 of 1, mark mine") == 2, output
    assert "steps 120" in output
    # Written by rank 0 alone, and found again.
    assert output.count("epoch 1/30 ") == output.count("epoch 30/30 ") == 1
    assert [path.name for path in (run.folder / "kept").iterdir() if "30" in path.name]
    (kept,) = (run.folder / "runs").iterdir()
    assert (kept / "metrics.jsonl").exists()
    assert "memory ran out" not in output


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_what_a_rank_on_another_host_held_is_said_when_its_memory_ran_out(
    start: Callable[..., Run], cgroup: Path, launcher: str
) -> None:
    options = f"-H hosta:1,hostb:2 --max-restarts 0 {LAUNCHERS[launcher]}"
    run = start(GROWING, options, ranks=3, CGROUP=str(cgroup))
    assert run.status() != 0, run.output()
    (line,) = [line for line in run.output().splitlines() if "memory ran out" in line]
    what = "memory ran out on host hostb, so the kernel ended rank 1 on host hostb; it held activations "
    assert line.startswith(f"hvdtrain run: {what}"), line
    assert "optimizer state 2.1 MB, weights 1.05 MB, gradients 1.05 MB" in line
    assert "The largest is activations: a smaller batch, with backward_passes_per_step," in line


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_several_ranks_of_several_hosts_know_their_places_and_hold_the_same_bits(
    start: Callable[..., Run], launcher: str
) -> None:
    run = start(SEVERAL, f"-H hosta:2,hostb:1,hostc:1 {LAUNCHERS[launcher]}", ranks=4)
    assert run.status() == 0, run.output()
    lines = sorted(re.findall(r"rank (./4 .*), bits (\w{64})$", run.output(), re.MULTILINE))
    assert [place for place, _ in lines] == [
        "0/4 local 0/2 cross 0/3 on hosta, total [15.0]",
        "1/4 local 1/2 cross 0/1 on hosta, total [15.0]",
        "2/4 local 0/1 cross 1/3 on hostb, total [15.0]",
        "3/4 local 0/1 cross 2/3 on hostc, total [15.0]",
    ], run.output()
    assert len({bits for _, bits in lines}) == 1


def test_mpirun_by_hand_keeps_off_bridges_that_every_host_has(network: hosts.Hosts) -> None:
    folder = network.folder / "by-hand"
    folder.mkdir()
    (folder / "train.py").write_text(SEVERAL)
    line = "mpirun --allow-run-as-root -np 2 -H hosta:1,hostb:1 --bind-to none -x PATH python train.py"
    done = network.run("hosta", *line.split(), cwd=folder)
    assert sorted(re.findall(r"rank (./2) .* on (\w+), total (\S+),", done.stdout)) == [
        ("0/2", "hosta", "[3.0]"),
        ("1/2", "hostb", "[3.0]"),
    ], done.stdout


def test_a_stopped_rank_is_named_on_whatever_host_it_is(start: Callable[..., Run]) -> None:
    run = start(TRAIN, "-H hosta:1,hostb:2 --mpi --max-restarts 0", ranks=3, HVDTRAIN_STALL_S="8")
    run.wait_for(lambda: run.step() >= 4)
    for pid in run.network.processes("hostb", having={RANK["mpi"]: "2"}):
        psutil.Process(pid).suspend()
    assert run.status() == 76, run.output()  # a rank waited too long
    assert re.search(r"rank 1 \(host hostb\) has waited .*\.$", run.output(), re.MULTILINE), run.output()
    assert re.search(r"rank 2 is missing: its process \(pid \d+\) is stopped", run.output()), run.output()
    assert run.output().count("Stack of the main thread") == 1
    assert "rank 2 on host hostb hung" in run.output().splitlines()[-1]


def test_a_host_whose_network_goes_is_named_and_the_job_goes_on_when_it_is_back(start: Callable[..., Run]) -> None:
    quick = {f"OMPI_MCA_oob_tcp_keepalive_{name}": "1" for name in ("time", "intvl", "probes")}
    run = start(LIGHT, "-H hosta:1,hostb:1 --launcher mpirun", **quick)
    run.wait_for(lambda: run.there("on-hosta") and run.there("on-hostb"))
    run.network.unplug("hostb")
    run.wait_for(lambda: "host hostb cannot be reached by ssh" in run.output())
    run.let_go()
    run.network.plug("hostb")
    assert run.status() == 0, run.output()
    assert "restart 1 of 3: host hostb no longer answers after" in run.output()
    assert "hvdtrain run: hostb can be reached" in run.output()
    assert run.there("done-hosta")
    assert run.there("done-hostb")


def test_over_gloo_a_silent_host_ends_the_job_with_a_word(start: Callable[..., Run]) -> None:
    run = start(TRAIN, "-H hosta:1,hostb:1 --gloo --max-restarts 0 --gloo-timeout-seconds 3")
    run.wait_for(lambda: run.step() >= 4)
    run.network.unplug("hostb")
    assert run.status() == 1, run.output()
    assert "rank 0 on host hosta heard nothing from another one for 3 s, whose host, network or process" in run.output()


def test_an_elastic_job_goes_on_without_a_host_that_fell_silent(
    network: hosts.Hosts, start: Callable[..., Run]
) -> None:
    found = network.folder / "found"
    found.write_text("#!/bin/sh\necho hosta:1\necho hostb:1\n")
    found.chmod(0o755)
    run = start(TRAIN, f"--gloo --min-np 1 --max-np 2 --host-discovery-script {found} --max-restarts 0")
    run.wait_for(lambda: run.step() >= 4)
    network.unplug("hostb")
    run.let_go()
    assert run.status() == 0, run.output()  # ssh says after 30 s that nobody answers
    assert "epoch 30/30 " in run.output()
    for pid in run.ranks("hostb"):  # where nobody could reach it, the lost rank still waits for the others
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(pid).kill()


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_ranks_that_are_all_elsewhere_stop_when_they_are_asked_to(start: Callable[..., Run], launcher: str) -> None:
    run = start(LIGHT, f"-H hostb:1,hostc:1 {LAUNCHERS[launcher]}")
    run.wait_for(lambda: run.there("on-hostb") and run.there("on-hostc"))
    run.send(signal.SIGTERM)
    assert run.status() == 75, run.output()
    assert not run.ranks("hostb") + run.ranks("hostc")


def test_ranks_elsewhere_do_not_outlive_a_launcher_that_is_killed(start: Callable[..., Run]) -> None:
    run = start(LIGHT, "-H hostb:1,hostc:1 --gloo")
    run.wait_for(lambda: run.there("on-hostb") and run.there("on-hostc"))
    assert run.ranks("hostb")
    assert run.ranks("hostc")
    run.send(signal.SIGKILL)
    run.wait_for(lambda: not run.ranks("hostb") + run.ranks("hostc"))


def test_a_host_without_ssh_is_named_before_anything_is_started(start: Callable[..., Run]) -> None:
    run = start(LIGHT, "-H hosta:1,hostd:1 --gloo")
    run.wait_for(lambda: "trying for 30 s" in run.output())
    run.send(signal.SIGTERM)
    assert run.status() == 143, run.output()
    assert "host hostd cannot be reached by ssh: connect to host hostd port 22: Connection refused" in run.output()
    assert not run.there("on-hosta")


ECHO = """
import socket, sys, time
server = socket.create_server(("", 5000))
sys.stdout.write("listening\\n")
sys.stdout.flush()
connection = server.accept()[0]
while data := connection.recv(2**20):
    connection.sendall(data)
"""
ASK = """
import os, socket, sys, threading, time
connection = socket.create_connection(("hvfar", 5000))
began = time.monotonic()
connection.sendall(b"1")
connection.recv(1)
sent, received = os.urandom(8_000_000), bytearray()
seconds = time.monotonic() - began
threading.Thread(target=connection.sendall, args=(sent,)).start()
while len(received) < len(sent):
    received += connection.recv(2**20)
sys.stdout.write(f"{seconds} {received == sent}")
"""


@pytest.mark.skipif(not Path("/dev/net/tun").exists(), reason="no TUN devices")
def test_the_benchmarks_far_host_answers_late_and_whole(tmp_path):
    with hosts.Hosts("hvnear", "hvfar", folder=tmp_path) as network:
        network.delay("hvfar", 0.05)
        server = network.start("hvfar", sys.executable, "-c", ECHO, log=tmp_path / "echo")
        while b"listening" not in (tmp_path / "echo").read_bytes():
            time.sleep(0.05)
        seconds, whole = network.run("hvnear", sys.executable, "-c", ASK).stdout.split()
        assert float(seconds) >= 0.1
        assert whole == "True"
        assert server.wait(10) == 0
