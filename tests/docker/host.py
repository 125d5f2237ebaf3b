"""What the steps' runner takes from this machine: tools, a bare Debian, pip's configuration, caches."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

INSIDE = "HVDTRAIN_STEPS_INSIDE"  # set once this script runs in a mount namespace of its own
CERTIFICATE_VARIABLES = ("SSL_CERT_FILE", "PIP_CERT", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
PROXY_VARIABLES = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
SUITES = {"debian:bookworm-slim": "bookworm", "debian:trixie-slim": "trixie"}
STARTED = time.monotonic()


class StepError(RuntimeError):
    """A step of the Dockerfile, or a check of the result, failed."""


def say(text: str) -> None:
    """Print at once, with the time since the start."""
    print(f"[{time.monotonic() - STARTED:6.1f} s] {text}", flush=True)


def cache_folder() -> Path:
    """Return the folder that keeps the bare Debian and the build caches between runs."""
    base = os.environ.get("HVDTRAIN_CACHE") or Path(
        os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "hvdtrain"
    )
    folder = Path(base) / "docker-steps"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@dataclass
class Host:
    """What of this machine the steps may use: pip's configuration, proxies, certificates."""

    variables: dict[str, str] = field(default_factory=dict)
    read_only: list[Path] = field(default_factory=list)
    certificate: Path | None = None

    @classmethod
    def look(cls) -> Host:
        """Read pip's configuration and the environment."""
        host = cls(variables={name: os.environ[name] for name in PROXY_VARIABLES if name in os.environ})
        listing = subprocess.run(
            [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
        ).stdout
        for line in listing.splitlines():
            key, _, value = line.partition("=")
            section, _, name = key.partition(".")
            if section in ("global", "install", ":env:") and not name.startswith("."):
                host.variables["PIP_" + name.upper().replace("-", "_")] = value.strip("'\"")
            elif section == ":env:":
                host.variables["PIP_" + name.strip(".").upper().replace("-", "_")] = value.strip("'\"")
        for value in host.variables.values():
            for word in value.split():
                path = Path(word.removeprefix("file://"))
                # A folder of wheels or an index; the index may link to files beside itself.
                if path.is_absolute() and path.is_dir():
                    host.read_only.append(path.parent if word.startswith("file://") else path)
        found = [os.environ[name] for name in CERTIFICATE_VARIABLES if Path(os.environ.get(name, "")).is_file()]
        if found:
            # Not at its own path: installing ca-certificates writes there.
            host.certificate = Path(found[0])
            host.variables |= dict.fromkeys(CERTIFICATE_VARIABLES, "/run/host-certificates.crt")
        return host


def bare_root(image: str, root: Path) -> None:
    """Make a root like the Debian image's; the archive is kept, since debootstrap takes most of a minute."""
    suite = SUITES.get(image)
    if suite is None:
        raise StepError(f"no way to make {image} without Docker; known: {', '.join(SUITES)}")
    archive = cache_folder() / f"{suite}.tar"
    if not archive.exists():
        say(f"  debootstrap {suite}")
        with tempfile.TemporaryDirectory(dir=cache_folder()) as scratch:
            made = Path(scratch) / "root"
            options = ["--variant=minbase", suite, str(made)]  # debootstrap knows its mirror
            subprocess.run(["debootstrap", *options], check=True, stdout=subprocess.DEVNULL)
            partial = Path(scratch) / "root.tar"
            subprocess.run(["tar", "-C", str(made), "-cf", str(partial), "."], check=True)
            partial.rename(archive)
    root.mkdir(parents=True)
    subprocess.run(["tar", "-C", str(root), "-xf", str(archive)], check=True)


def why_not() -> str:
    """Return why the steps cannot run here, "" if they can."""
    if os.geteuid() != 0:
        return "chroot needs root"
    missing = [tool for tool in ("debootstrap", "chroot", "unshare", "mount") if shutil.which(tool) is None]
    if missing:
        return f"not on PATH: {', '.join(missing)} (apt-get install debootstrap)"
    if INSIDE not in os.environ:
        probe = subprocess.run(
            ["unshare", "--mount", "sh", "-c", "mount -t tmpfs tmpfs /mnt"], capture_output=True, text=True
        )
        return f"mounts are not allowed here: {probe.stderr.strip()}" if probe.returncode else ""
    return ""


def remove(work: Path) -> None:
    """Unmount everything under `work`, then delete it: never the other way round."""
    mounts = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    below = [mount for mount in mounts if Path(mount).is_relative_to(work)]
    for mount in reversed(below):
        subprocess.run(["umount", "--lazy", mount], check=False)
    left = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    if any(Path(mount).is_relative_to(work) for mount in left):
        print(f"left in place, something under it is still mounted: {work}")
        return
    subprocess.run(["rm", "-rf", "--one-file-system", str(work)], check=False)
