"""The Dockerfile's cpu image, built by a Docker engine on each base, and run as docs/pages/install.md says.

One base: python -m pytest tests/docker -k bookworm
The gpu image, on CPUs: HVDTRAIN_DOCKER_TARGET=gpu (20 GB on disk while it is built)
Without compiling Horovod where this host has the same wheel: HVDTRAIN_DOCKER_WHEELS=host
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import engine

ROOT = Path(__file__).resolve().parents[2]
TARGET = os.environ.get("HVDTRAIN_DOCKER_TARGET") or "cpu"
FRAMEWORKS = {"cpu": ("torch", "tensorflow"), "gpu": ("torch",)}[TARGET]  # that an allreduce is proven for
LABEL = f"hvdtrain-test={os.getpid()}"
# No network but the container's own loopback: there its host name has no address.
ALONE = ("--network", "none")
READ_ONLY = ("--read-only", "--tmpfs", "/tmp", "--env", "HOME=/tmp")

pytestmark = pytest.mark.timeout(2400)  # the first test of a base builds its image


@dataclass(frozen=True)
class Image:
    """A built image, and how to run it."""

    docker: engine.Docker
    name: str

    def run(self, *command: str, options: tuple[str, ...] = ALONE) -> str:
        """Return what a container of its own prints."""
        return self.docker.run("run", "--rm", "--label", LABEL, "--shm-size=1g", *options, self.name, *command).stdout

    def start(self, *command: str, options: tuple[str, ...] = ALONE) -> str:
        """Start a container in the background, and return its id."""
        words = ("run", "--detach", "--label", LABEL, "--shm-size=1g", *options, self.name, *command)
        return self.docker.run(*words).stdout.split()[-1]


@pytest.fixture(scope="session")
def docker() -> Iterator[engine.Docker]:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the engine is ended then too
    try:
        with engine.engine() as docker:
            yield docker
            if left := docker.run("ps", "--all", "--quiet", "--filter", f"label={LABEL}").stdout.split():
                docker.run("rm", "--force", *left)
    except engine.NoEngineError as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="session")
def pip_configuration() -> Iterator[str]:
    with engine.pip_configuration() as text:
        yield text


@pytest.fixture(scope="module", params=engine.SUITES, ids=engine.SUITES.get)
def image(request: pytest.FixtureRequest, docker: engine.Docker, pip_configuration: str) -> Iterator[Image]:
    base, name = request.param, f"hvdtrain-test:{engine.SUITES[request.param]}-{TARGET}"
    made = engine.make_base(docker, base, pip_configuration)
    words = ["build", "--target", TARGET, "--tag", name, "--network", "host", "--build-arg", f"DEBIAN_IMAGE={base}"]
    if os.environ.get("HVDTRAIN_DOCKER_WHEELS") == "host":
        engine.lend_wheels(docker, base)
    docker.run(*words, *engine.proxy_arguments(), str(ROOT))
    yield Image(docker, name)
    docker.run("image", "rm", "--force", name, *([base] if made else []), check=False)


# It counts libraries: torch must have compiled its C++, forward and backward.
COMPILED = """
import pathlib, tempfile, torch
from torch._dynamo.utils import counters
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 2))
x = torch.randn(4, 8)
compiled = torch.compile(model)
loss = compiled(x).square().sum()
loss.backward()
torch.testing.assert_close(loss, model(x).square().sum())
assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"], counters
libraries = list(pathlib.Path(tempfile.gettempdir()).glob("torchinductor_*/**/*.so"))
assert libraries
print("compiled", len(libraries))
"""


@pytest.mark.parametrize("options", [(), READ_ONLY], ids=["writable", "read-only"])
def test_torch_compiles_a_model(image: Image, options: tuple[str, ...]) -> None:
    writable = [word.replace("/tmp", "/tmp:exec") if word == "/tmp" else word for word in options]
    assert "compiled" in image.run("python", "-c", COMPILED, options=(*ALONE, *writable))


def test_image_holds_no_build_tools_but_a_compiler_and_its_user_is_not_root(image: Image) -> None:
    tools = "make cmake ninja"
    found = image.run("sh", "-c", f"id -u; for tool in {tools}; do command -v $tool || true; done")
    assert found.split() == ["1000"]
    image.run("sh", "-c", "test ! -w /opt/hvdtrain && test -w .")
    assert image.run("python", "-c", "import hvdtrain; print(hvdtrain.__file__)").startswith("/opt/hvdtrain/")


def test_path_keeps_the_bases_folders(image: Image) -> None:
    path = image.run("sh", "-c", "echo $PATH").strip().split(":")
    assert path[0] == "/opt/hvdtrain/bin"
    assert {"/usr/local/sbin", "/usr/sbin", "/sbin"} <= set(path)


def test_default_command_proves_every_data_plane(image: Image) -> None:
    output = image.run()
    assert re.findall(r"allreduce (\w+) +(\w+): [0-9.]+ ms", output) == [
        (framework, plane) for framework in FRAMEWORKS for plane in ("mpi", "gloo")
    ]
    assert output.endswith("Training would work.\n")


@pytest.mark.skipif(TARGET != "gpu", reason="of the gpu image: HVDTRAIN_DOCKER_TARGET=gpu")
def test_gpu_image_loads_nccl_from_its_wheel_without_a_driver(image: Image) -> None:
    code = (
        "import horovod.torch as hvd\n"
        "assert hvd.nccl_built() and hvd.cuda_built()\n"
        "print({line.split()[-1] for line in open('/proc/self/maps') if 'libnccl' in line})"
    )
    (loaded,) = ast.literal_eval(image.run("python", "-c", code))
    assert re.fullmatch(r"/opt/hvdtrain/lib/python3\.\d+/site-packages/nvidia/nccl/lib/libnccl\.so\.2", loaded)


def test_engine_finds_the_container_healthy_without_an_allreduce(image: Image) -> None:
    container = image.start("sleep", "300", options=(*ALONE, "--health-interval=1s"))
    state = ""
    deadline = time.monotonic() + 60
    while state != "healthy" and time.monotonic() < deadline:
        time.sleep(0.5)
        state = image.docker.run("inspect", "--format", "{{.State.Health.Status}}", container).stdout.strip()
    log = image.docker.run("inspect", "--format", "{{json .State.Health.Log}}", container).stdout
    assert state == "healthy", log
    assert "no allreduce was tried" in log


@pytest.mark.parametrize("options", [(), READ_ONLY], ids=["writable", "read-only"])
@pytest.mark.parametrize("framework", ["torch", "keras"])
def test_two_ranks_train(image: Image, framework: str, options: tuple[str, ...]) -> None:
    command = ("horovodrun", "-np", "2", "python", "examples/mnist/train.py", "--framework", framework)
    assert_trained(image.run(*command, options=(*ALONE, *options)), framework)


def assert_trained(output: str, framework: str) -> None:
    """Check the table that the example prints at its end; it fails by itself where ranks end with other weights."""
    row = re.search(rf"{framework}\S* +2 +\S+ +(\S+)", output)
    assert row, output
    assert float(row[1]) > 0.9, output


@pytest.fixture(scope="module")
def hosts(image: Image) -> Iterator[tuple[str, str]]:
    """Two networks with a name and an address each, joined by a cable: containers run in them as on two hosts."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("two hosts need root and ip (apt-get install iproute2)")
    addresses = {"host1": "10.78.0.1", "host2": "10.78.0.2"}
    known = [word for name, address in addresses.items() for word in ("--add-host", f"{name}:{address}")]
    containers = [
        image.start("sleep", "infinity", options=("--network", "none", "--hostname", each, *known))
        for each in addresses
    ]
    first, second = (
        image.docker.run("inspect", "--format", "{{.State.Pid}}", container).stdout.strip() for container in containers
    )
    cable = f"ip link add eth0 netns {first} type veth peer name eth0 netns {second}"
    subprocess.run(cable.split(), check=True)
    for pid, address in zip((first, second), addresses.values(), strict=True):
        for words in (f"address add {address}/24 dev eth0", "link set eth0 up"):
            subprocess.run(["nsenter", "--net", "--target", pid, "ip", *words.split()], check=True)
    yield containers[0], containers[1]
    image.docker.run("rm", "--force", *containers)


def test_containers_of_two_hosts_train_together_over_ssh(image: Image, hosts: tuple[str, str], tmp_path: Path) -> None:
    for source in (ROOT / "examples" / "mnist").glob("*.py"):
        shutil.copy(source, tmp_path)
    shell(documented("mkdir keys"), tmp_path, {"sudo ": ""}, image.docker.environment)
    os.chown(tmp_path, 1000, 1000)
    same = {"docker run": f"{image.docker.program} run", "hvdtrain:gpu": image.name, "--gpus all": f"--label {LABEL}"}
    there = {**same, "--network host": f"--network container:{hosts[1]}"}
    daemon = shell(documented("docker run -d --gpus all"), tmp_path, there, image.docker.environment).split()[-1]
    for plane in ("--mpi", "--gloo"):
        here = {
            **same,
            "--network host": f"--network container:{hosts[0]}",
            "-np 8 -H host1:4,host2:4": f"-np 2 {plane} -H host1:1,host2:1",
        }
        before = image.docker.run("logs", daemon).stdout.count("Accepted publickey for hvdtrain")
        command = documented("docker run --rm --gpus all --shm-size=1g --network")
        assert_trained(shell(command, tmp_path, here, image.docker.environment), "torch")
        assert image.docker.run("logs", daemon).stdout.count("Accepted publickey for hvdtrain") > before
    image.docker.run("rm", "--force", daemon)


def documented(start: str) -> str:
    """Return the block of install.md that begins with `start`."""
    text = (ROOT / "docs" / "pages" / "install.md").read_text(encoding="utf-8")
    (block,) = (each for each in re.findall(r"```bash\n(.*?)```", text, re.DOTALL) if each.startswith(start))
    return str(block)


def shell(text: str, folder: Path, other: Mapping[str, str], environment: Mapping[str, str]) -> str:
    """Run a documented block in `folder`, with what this machine has in place of what the document names."""
    for name, value in other.items():
        assert name in text, f"install.md has no longer {name!r} in:\n{text}"
        text = text.replace(name, value)
    done = subprocess.run(
        ["bash", "-ec", text],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, f"{text}\n{done.stdout}"
    return done.stdout
