"""Hosts that are several for all that a launcher sees, on this machine: namespaces on a switch, reached by ssh.

Tests of several hosts (tests/engines, tests/attack) use them, and the benchmark of slow links.

Each has its own network, name, processes, /tmp, /dev/shm and ssh daemon; the files elsewhere are this machine's, as on
a shared disk. They end with the process that made them, however that ends: a host's first process waits for the end of
its standard input, and the kernel takes the rest of its namespaces with it. Nothing of this machine is changed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

SWITCH = "HVDTRAIN_TEST_HOSTS"
PROGRAMS = ("ip", "unshare", "nsenter", "sshd", "ssh", "ssh-keygen")
REPOSITORY = Path(__file__).resolve().parents[1]

_NAMESPACES = ("--net", "--uts", "--ipc", "--pid", "--mount")
_NETWORK = "10.77.0."  # the further ones are 10.78.0. and so on
_NETWORKS_BITS = 24
_READY = "ready\n"
_GROUPS = "/sys/fs/cgroup"
_HIDDEN = ("/tmp", "/dev/shm", "/run")
_BIND, _RECURSIVE = 0x1000, 0x4000

# ssh and its daemon know nothing but what is here: no password, no agent, nobody's own keys.
_CLIENT = """
Host *
    IdentityFile /etc/ssh/key
    IdentityAgent none
    UserKnownHostsFile /etc/ssh/known_hosts
    BatchMode yes
"""
_DAEMON = """
Port 22
HostKey /etc/ssh/host_key
AuthorizedKeysFile /etc/ssh/key.pub
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
StrictModes no
PidFile none
LogLevel ERROR
"""


def path() -> str:
    """Return where programs are looked for: this Python's folder first, and those of daemons too."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"], "/usr/sbin", "/sbin"])


def missing() -> str:
    """Return why there can be no hosts here, "" if there can."""
    absent = [name for name in PROGRAMS if shutil.which(name, path=path()) is None]
    if absent:
        return f"no {', '.join(absent)}: apt-get install iproute2 util-linux openssh-server"
    if os.geteuid() != 0:
        return "network namespaces need root"
    tried = subprocess.run(["unshare", *_NAMESPACES, "true"], capture_output=True, text=True)
    return "" if tried.returncode == 0 else f"no namespaces may be made here: {tried.stderr.strip()}"


class Hosts:
    """Hosts on one switch, the i-th with address 10.77.0.<i + 1> on eth0.

    Args:
        names: of the hosts; they stand for the addresses on eth0.
        folder: for their files; beside this repository and this Python the only one under /tmp that they see.
        silent: those of them without an ssh daemon.
        networks: how many switches; on the second the i-th host has 10.78.0.<i + 1>, on eth1.
    """

    def __init__(self, *names: str, folder: Path, silent: Sequence[str] = (), networks: int = 1) -> None:
        self.names, self.folder, self._silent, self._networks = names, folder, silent, networks
        self._first: dict[str, subprocess.Popen[str]] = {}
        self._pids: dict[str, int] = {}
        self._files = folder / f"hosts-{secrets.token_hex(4)}"
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("SSH_", "PYTEST_"))},
            "PATH": path(),
            "HOME": "/run/home",  # horovodrun keeps there for an hour which hosts it has reached
        }

    def __enter__(self) -> Hosts:
        """Start them."""
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """End them, with all that runs on them."""
        for first in self._first.values():
            assert first.stdin is not None
            first.stdin.close()
        for first in self._first.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                first.wait(10)
            first.kill()
            first.wait()
            assert first.stdout is not None
            first.stdout.close()

    def _start(self) -> None:
        etc = self._files / "ssh"
        etc.mkdir(parents=True)
        for name in ("key", "host_key"):
            _call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(etc / name))
        (etc / "ssh_config").write_text(_CLIENT)
        public = (etc / "host_key.pub").read_text()
        addresses = {name: f"{_NETWORK}{i + 1}" for i, name in enumerate(self.names)}
        (etc / "known_hosts").write_text("".join(f"{n},{a} {public}" for n, a in addresses.items()))
        listed = "".join(f"{address} {name}\n" for name, address in addresses.items())
        (self._files / "names").write_text(f"127.0.0.1 localhost\n{listed}")
        for name in ("switch", *self.names):
            address = "" if name in ("switch", *self._silent) else addresses[name]
            self._first[name] = subprocess.Popen(
                ["unshare", *_NAMESPACES, "--fork", "--kill-child", "--mount-proc", sys.executable, "-I", __file__,
                 name, address, str(self._files), str(REPOSITORY), sys.prefix, sys.base_prefix, str(self.folder)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=self.environment,
            )  # fmt: skip
        for name, first in self._first.items():
            assert first.stdout is not None
            assert first.stdout.readline() == _READY, f"{name} did not start"
            self._pids[name] = psutil.Process(first.pid).children()[0].pid
        self._connect("bridge", "eth0", addresses)
        for i in range(1, self._networks):
            there = {f"{n}-{i}": a.replace(_NETWORK, f"10.{77 + i}.0.") for n, a in addresses.items()}
            self._connect(f"bridge{i}", f"eth{i}", there)
        for name in self.names:
            if name not in self._silent:
                self._wait_for_ssh(addresses[name])

    def _connect(self, bridge: str, interface: str, addresses: Mapping[str, str]) -> None:
        """Make a switch, and plug hosts in; {port of the switch, a host's name before the first "-": its address}."""
        self._add_bridge(bridge)
        for port, address in addresses.items():
            name = port.partition("-")[0]
            ends = ("type", "veth", "peer", "name", interface, "netns", str(self._pids[name]))
            self._in_switch("link", "add", port, *ends)
            self._in_switch("link", "set", port, "master", bridge, "up")
            self.run(name, "ip", "address", "add", f"{address}/{_NETWORKS_BITS}", "dev", interface)
            self.run(name, "ip", "link", "set", interface, "up")

    def _wait_for_ssh(self, address: str) -> None:
        probe = f"import socket; s = socket.create_connection(({address!r}, 22), 1); s.sendall(b'SSH-2.0-probe\\r\\n')"
        deadline = time.monotonic() + 20
        while self.run(self.names[0], sys.executable, "-IS", "-c", probe, check=False).returncode:
            assert time.monotonic() < deadline, f"no ssh daemon at {address}"
            time.sleep(0.05)

    def _add_bridge(self, name: str) -> None:
        self._in_switch("link", "add", name, "type", "bridge")
        self._in_switch("link", "set", name, "up")

    def _in_switch(self, *arguments: str) -> None:
        _call("nsenter", "--target", str(self._pids["switch"]), "--net", "ip", *arguments)

    def delay(self, host: str, delay_s: float) -> None:
        """Delay all that is sent to a host, and from it: it gets a switch of its own, behind `delay_line`."""
        self._add_bridge("far")
        self._in_switch("link", "set", host, "master", "far")
        line = [sys.executable, "-I", str(Path(__file__).with_name("delay_line.py")), "bridge", "far", str(delay_s)]
        self._first["delay line"] = started = subprocess.Popen(
            ["nsenter", "--target", str(self._pids["switch"]), "--net", *line],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=self.environment,
        )  # fmt: skip
        assert started.stdout is not None
        assert started.stdout.readline() == _READY, "the delay line did not start"

    def command(self, host: str, command: Sequence[str], *, cwd: Path | None = None) -> list[str]:
        """Return the command line that runs `command` on a host."""
        return ["nsenter", "--target", str(self._pids[host]), *_NAMESPACES, f"--wd={cwd or self.folder}", *command]

    def run(
        self, host: str, *command: str, cwd: Path | None = None, check: bool = True, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a host to its end; its output and errors come as one."""
        done = subprocess.run(
            self.command(host, command, cwd=cwd), env={**self.environment, **variables}, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0 or not check, f"{host}: {' '.join(command)}: {done.stdout}"
        return done

    def start(
        self, host: str, *command: str, cwd: Path | None = None, log: Path, **variables: str
    ) -> subprocess.Popen[bytes]:
        """Start a command on a host, all its output going to `log`."""
        with log.open("wb") as out:
            return subprocess.Popen(
                self.command(host, command, cwd=cwd), env={**self.environment, **variables}, stdin=subprocess.DEVNULL,
                stdout=out, stderr=out,
            )  # fmt: skip

    def processes(self, host: str, *, having: Mapping[str, str]) -> dict[int, list[str]]:
        """Return pid (here, not on the host) -> command line of a host's processes with these variables."""
        found = {}
        for process in psutil.Process(self._pids[host]).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                variables = process.environ()
                if all(variables.get(name) == value for name, value in having.items()):
                    found[process.pid] = process.cmdline()
        return found

    def unplug(self, host: str) -> None:
        """Pull a host's cable: what is sent to it and from it is lost without a word."""
        self._in_switch("link", "set", host, "down")

    def plug(self, host: str) -> None:
        """Put it back."""
        self._in_switch("link", "set", host, "up")


def output_of(*command: str) -> subprocess.CompletedProcess[str]:
    """Run one of the system's programs, wherever daemons' are."""
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PATH": path()})


def _call(*command: str) -> None:
    done = output_of(*command)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"


# ---- on the host


def first_process(name: str, address: str, files: Path, shared: Sequence[str]) -> None:
    """Be a host's first process: set it up, then bury orphans until standard input ends."""
    socket.sethostname(name)
    # Opened before /tmp is hidden, shown in its place again afterwards.
    kept = {path: os.open(path, os.O_PATH) for path in (*shared, str(files))}
    groups = os.open(_GROUPS, os.O_PATH)
    for where in _HIDDEN:
        _mount(None, where, "tmpfs")
    _mount(None, "/sys", "sysfs")  # which shows the network of whoever mounts it
    _mount(f"/proc/self/fd/{groups}", _GROUPS)
    for path_, number in kept.items():
        if path_.startswith(tuple(f"{where}/" for where in _HIDDEN)):
            os.makedirs(path_, exist_ok=True)
            _mount(f"/proc/self/fd/{number}", path_)
    _mount(str(files / "names"), "/etc/hosts")
    _mount(str(files / "ssh"), "/etc/ssh")
    if Path("~/.ssh").expanduser().is_dir():
        _mount(None, str(Path("~/.ssh").expanduser()), "tmpfs")
    for folder in ("/run/home", "/run/sshd"):
        os.mkdir(folder, 0o755)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    if address:
        configuration = Path("/run/sshd_config")
        configuration.write_text(_DAEMON)
        program = shutil.which("sshd")
        assert program is not None  # missing() says so before
        subprocess.Popen([program, "-D", "-e", "-f", str(configuration)], stdin=subprocess.DEVNULL, stdout=2)
    sys.stdout.write(_READY)
    sys.stdout.flush()
    while not select.select([sys.stdin], [], [], 0.2)[0]:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _mount(source: str | None, target: str, kind: str | None = None) -> None:
    libc: Any = ctypes.CDLL(None, use_errno=True)
    flags = 0 if kind else _BIND | _RECURSIVE
    given = [None if text is None else text.encode() for text in (source or kind, target, kind)]
    if libc.mount(*given, flags, None):
        raise OSError(ctypes.get_errno(), f"mount {source} on {target}")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the test run's
    first_process(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4:])
