"""A Docker engine for the tests, base images made by debootstrap, and this machine's package sources inside a build.

As a program it installs what that needs, as `make docker-test` wants it; the tests themselves install nothing.
"""

from __future__ import annotations

import contextlib
import functools
import http.server
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

SUITES = {"debian:bookworm-slim": "bookworm", "debian:trixie-slim": "trixie"}
CERTIFICATES = "/etc/host-certificates.crt"
_CERTIFICATE_VARIABLES = ("SSL_CERT_FILE", "PIP_CERT", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
_PROXY_VARIABLES = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
_PACKAGES = {"docker.io": "dockerd", "debootstrap": "debootstrap"}  # and the program of each
_START_LIMIT_S = 60


class NoEngineError(RuntimeError):
    """The images cannot be built here; the message says why."""


class Docker:
    """The `docker` command, with the engine that it talks to."""

    def __init__(self, program: str, host: str | None = None) -> None:
        self.program = program
        self.environment = {**os.environ, "DOCKER_BUILDKIT": "1", "BUILDKIT_PROGRESS": "plain"}
        if host:
            self.environment["DOCKER_HOST"] = host

    def run(self, *words: str, check: bool = True, text: str = "") -> subprocess.CompletedProcess[str]:
        """Run `docker WORDS`, both outputs in stdout; a failure's message ends with the last lines."""
        done = subprocess.run(
            [self.program, *words],
            input=text,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self.environment,
        )
        if check and done.returncode != 0:
            last = "\n".join(done.stdout.splitlines()[-60:])
            raise AssertionError(f"docker {' '.join(words)} failed ({done.returncode}):\n{last}")
        return done


def cache_folder() -> Path:
    """Return the folder on disk that keeps the bases from run to run."""
    base = os.environ.get("HVDTRAIN_CACHE") or Path(
        os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "hvdtrain"
    )
    folder = Path(base) / "docker-test"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def install_what_is_missing() -> None:
    """Install Debian's Docker engine and debootstrap where root may; HVDTRAIN_DOCKER_INSTALL=0 forbids it."""
    missing = [package for package, program in _PACKAGES.items() if shutil.which(program) is None]
    allowed = os.environ.get("HVDTRAIN_DOCKER_INSTALL") != "0" and os.geteuid() == 0
    if not missing or not allowed or shutil.which("apt-get") is None:
        return
    # Debian 13 has the client and BuildKit's part of it in packages of their own.
    parts = "$(apt-cache pkgnames docker- | grep -xE 'docker-(cli|buildx)')" if "docker.io" in missing else ""
    line = f"apt-get update && apt-get install -y --no-install-recommends {' '.join(missing)} {parts}"
    variables = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    subprocess.run(["sh", "-c", line], env=variables, stdin=subprocess.DEVNULL)


def _client() -> str:
    """Return a `docker` that can build with BuildKit: the first on PATH may lack buildx where Debian's can."""
    for program in dict.fromkeys((shutil.which("docker"), "/usr/bin/docker")):
        if program and os.access(program, os.X_OK):
            help_text = Docker(program).run("build", "--help", check=False)
            if help_text.returncode == 0 and "--secret" in help_text.stdout:
                return program
    raise NoEngineError("no docker client with BuildKit (Debian 12: docker.io; 13: docker.io docker-cli docker-buildx)")


@contextlib.contextmanager
def engine() -> Iterator[Docker]:
    """Yield the engine that answers, or a private one, which ends with all that it made.

    Raises:
        NoEngineError: there is none, and none can be started here.
    """
    docker = Docker(_client())
    if docker.run("info", check=False).returncode == 0:
        yield docker
        return
    if os.geteuid() != 0:
        raise NoEngineError("no Docker engine answers, and starting one needs root")
    if missing := [program for program in (*_PACKAGES.values(), "setpriv") if shutil.which(program) is None]:
        raise NoEngineError(f"not on PATH: {', '.join(missing)} (apt-get install {' '.join(_PACKAGES)})")
    # A socket's path has to be short; images have to lie on disk.
    run_folder = Path(tempfile.mkdtemp(prefix="hvdtrain-docker-"))
    data = Path(tempfile.mkdtemp(prefix="engine-", dir=cache_folder()))
    host = f"unix://{run_folder}/socket"
    daemon = ["dockerd", "--data-root", str(data), "--exec-root", str(run_folder / "exec"), "--host", host]
    daemon += ["--pidfile", str(run_folder / "pid"), "--iptables=false", "--ip6tables=false", "--bridge=none"]
    daemon += ["--shutdown-timeout=1"]  # containers that do not end when asked to are killed
    log = run_folder / "log"
    with log.open("wb") as written:
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "TERM", *daemon],  # it ends with this process, however that ends
            stdin=subprocess.DEVNULL,
            stdout=written,
            stderr=written,
            start_new_session=True,
        )
    try:
        docker = Docker(docker.program, host)
        deadline = time.monotonic() + _START_LIMIT_S
        while docker.run("info", check=False).returncode != 0:
            if process.poll() is not None or time.monotonic() > deadline:
                raise NoEngineError(f"dockerd does not start here: {_last_error(log)}")
            time.sleep(0.2)
        yield docker
    finally:
        process.send_signal(signal.SIGTERM)  # it ends its containers first
        process.wait(120)
        for folder in (data, run_folder):
            subprocess.run(["rm", "-rf", "--one-file-system", str(folder)], check=False)


def _last_error(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines() or ["no output"]
    return next((line for line in reversed(lines) if "failed" in line or "rror" in line), lines[-1])


def make_base(docker: Docker, image: str, pip_configuration: str) -> bool:
    """Make Debian's image under its own name, unless the engine has it; return whether it was made."""
    if docker.run("image", "inspect", image, check=False).returncode == 0:
        return False
    suite = SUITES[image]
    archive = cache_folder() / f"{suite}.tar"
    with tempfile.TemporaryDirectory(dir=cache_folder()) as scratch:
        if not archive.exists():
            root, partial = Path(scratch, "root"), Path(scratch, "root.tar")
            command = ["debootstrap", "--variant=minbase", suite, str(root)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            subprocess.run(["tar", "-C", str(root), "-cf", str(partial), "."], check=True)
            partial.rename(archive)
        path = "ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        docker.run("import", "--change", path, "--change", 'CMD ["bash"]', str(archive), f"hvdtrain-bare:{suite}")
        # What a build needs of this machine is a layer of the base: the Dockerfile knows nothing of it.
        lines = [f"FROM hvdtrain-bare:{suite}", "COPY pip.conf /etc/pip.conf"]
        context = Path(scratch, "context")
        context.mkdir()
        (context / "pip.conf").write_text(pip_configuration)
        if certificates := _certificates():
            shutil.copy(certificates, context / "certificates")
            lines += [f"COPY certificates {CERTIFICATES}", f"ENV SSL_CERT_FILE={CERTIFICATES}"]
        docker.run("build", "--tag", image, "--file", "-", str(context), text="\n".join(lines))
    return True


def lend_wheels(docker: Docker, image: str) -> None:
    """Put this host's wheels of Horovod into the cache of a build: it compiles none that has the same key."""
    wheels = cache_folder().parent / "wheels"
    cache = "/root/.cache/hvdtrain/wheels"
    mounts = f"--mount=type=cache,target={Path(cache).parent} --mount=type=bind,target=/lent"
    text = f"FROM {image}\nRUN {mounts} mkdir -p {cache} && cp -r /lent/. {cache}\n"
    docker.run("build", "--network", "none", "--file", "-", str(wheels), text=text)


def proxy_arguments() -> list[str]:
    """Return the build arguments that give a build this machine's proxies."""
    return [word for name in _PROXY_VARIABLES if name in os.environ for word in ("--build-arg", name)]


def _certificates() -> str:
    found = [os.environ[name] for name in _CERTIFICATE_VARIABLES if Path(os.environ.get(name, "")).is_file()]
    return found[0] if found else ""


@contextlib.contextmanager
def pip_configuration() -> Iterator[str]:
    """Yield this machine's pip configuration for a build: paths in it are served on the loopback interface."""
    listing = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    found = re.findall(r"^(global|install|:env:)\.\.?([\w-]+)='(.*)'$", listing, re.MULTILINE)
    found.sort(key=lambda setting: setting[0] == ":env:")  # a variable wins over a file
    settings = {name: value for _, name, value in found}
    if _certificates():
        settings["cert"] = CERTIFICATES
    with tempfile.TemporaryDirectory() as folder, _served(Path(folder)) as address:
        lines = ["[global]"]
        for name, value in settings.items():
            if name == "cert":  # pip reads no certificates from an address
                lines.append(f"cert = {value}")
                continue
            words = (_as_served(word, Path(folder), address) for word in value.replace("\\n", " ").split())
            lines.append(f"{name} = {' '.join(words)}")
        yield "\n".join(lines) + "\n"


def _as_served(word: str, folder: Path, address: str) -> str:
    """Return the address on the server of a path: of a folder, or of a file, such as that of constraints.

    An index links to files beside itself: what is above it is served.
    """
    path = Path(word.removeprefix("file://"))
    if not path.is_absolute() or not path.exists():
        return word
    above = path.parent if word.startswith("file://") and path.is_dir() else path
    link = folder / above.as_posix().strip("/").replace("/", "-")
    if not link.is_symlink():
        link.symlink_to(above)
    return "/".join((address, link.name, *path.relative_to(above).parts)) + "/" * path.is_dir()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def _served(folder: Path) -> Iterator[str]:
    handler = functools.partial(_Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


if __name__ == "__main__":
    install_what_is_missing()
