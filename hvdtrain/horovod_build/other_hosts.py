"""What a wheel needs of a host that did not build it, and which of that this host lacks."""

from __future__ import annotations

import platform
import re
import shlex
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path

from hvdtrain.horovod_build import installed, owners
from hvdtrain.horovod_build.find import Found
from hvdtrain.system import open_mpi

# x86 extensions that Horovod's half-precision code is written for; the compiler uses those that the building CPU has.
_CPU_EXTENSIONS = ("f16c", "avx", "fma")
_SYMBOL_VERSIONS = {"GLIBC": rb"\bGLIBC_(\d+)\.(\d+)", "GLIBCXX": rb"\bGLIBCXX_(\d+)\.(\d+)(?:\.(\d+))?"}


def cpu_extensions() -> tuple[str, ...]:
    """Return the extensions of this host's CPU that the compiler uses."""
    with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        # The first core's line: on hosts with many cores the whole file takes long.
        present = next((line.split() for line in file if line.startswith("flags")), [])
    return tuple(each for each in _CPU_EXTENSIONS if each in present)


def needed_versions(libraries: Iterable[bytes]) -> dict[str, tuple[int, ...]]:
    """Return the newest symbol versions that libraries name: {"GLIBC": (2, 34), "GLIBCXX": (3, 4, 30)}."""
    contents = list(libraries)
    newest = {}
    for name, pattern in _SYMBOL_VERSIONS.items():
        found = [match for content in contents for match in re.findall(pattern, content)]
        if found:
            newest[name] = max(tuple(int(number) for number in match if number) for match in found)
    return newest


def requirements(wheel: Path, found: Found, *, architectures: str = "") -> list[str]:
    """Return what a host needs for this wheel, one line a thing, with what checks it there."""
    with zipfile.ZipFile(wheel) as archive:
        needed = needed_versions(archive.read(name) for name in archive.namelist() if name.endswith(".so"))
    python = f"{platform.python_implementation()} {sys.version_info[0]}.{sys.version_info[1]}"
    lines = [
        f"{python} on {platform.machine()} (pip refuses others)",
        f"{' and '.join(map(str, found.frameworks))}, exactly (init and doctor refuse others)",
    ]
    system = {"GLIBC": "glibc {} or newer", "GLIBCXX": "libstdc++ with GLIBCXX_{} or newer"}
    texts = [system[name].format(".".join(map(str, version))) for name, version in needed.items()]
    if texts:
        lines.append(f"{' and '.join(texts)} (doctor says if it is older)")
    if extensions := cpu_extensions():
        lines.append(f"a CPU with {', '.join(extensions)} (init and doctor refuse others)")
    if found.mpi:
        lines.append(f"Open MPI {open_mpi.major(found.mpi.version)}, as here (doctor refuses another one)")
    if found.gpu and found.nccl:
        lines.append(
            f"GPUs of {architectures}, and NCCL {found.nccl.version.partition('.')[0]} (doctor compares NCCL's)"
        )
    return [*lines, "hvdtrain in this version (init warns if another makes other changes to Horovod)"]


def closing_lines(wheel: Path, needs: Iterable[str], *, is_proven: bool) -> list[str]:
    """Return the end of `hvdtrain build --out`: the command for the other hosts, and what they need."""
    proof = "proven on this host" if is_proven else "not proven: --no-install was given"
    path = shlex.quote(str(wheel))
    lines = [
        f"For other hosts: {wheel} ({proof})",
        "On each, in an environment with hvdtrain:",
        # pip leaves an installed Horovod alone if it has the same version, whatever it was built for.
        f"  pip install --no-deps --force-reinstall {path} && hvdtrain doctor",
        "Each needs, as this host has:",
        *(f"  {line}" for line in needs),
    ]
    if why := owners.who_can_change(wheel.parent):
        lines.append(f"Take care: {why}, and every host runs what is in this wheel")
    return lines


def lacks() -> str:
    """Say in a sentence which extension of the CPU this host lacks for the installed Horovod; "" if it has all."""
    needed = str(installed.record().get("cpu", "")).split()
    if missing := sorted(set(needed) - set(cpu_extensions())) if needed else []:
        return (
            f"The installed Horovod was built for CPUs with {', '.join(missing)}, which this host's CPU lacks: it "
            "would end with an illegal instruction."
        )
    return ""


def lacks_libc() -> str:
    """Say in a sentence that this host's glibc is too old for the installed Horovod; "" if it is not."""
    folder, (name, here) = installed.package_folder("horovod"), platform.libc_ver()
    if folder is None or name != "glibc":
        return ""
    needed = needed_versions(path.read_bytes() for path in folder.glob("*/*.so")).get("GLIBC", (0,))
    if needed > tuple(map(int, re.findall(r"\d+", here))):
        return f"The installed Horovod needs glibc {'.'.join(map(str, needed))}, and this host has {here}."
    return ""
