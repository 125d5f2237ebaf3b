"""The GPUs that CUDA will show this process, as its driver lists them; found without starting CUDA."""

from __future__ import annotations

import os
import re
import subprocess
from typing import NamedTuple

from hvdtrain.system import toolchain

VISIBLE = "CUDA_VISIBLE_DEVICES"

# "GPU 0: NVIDIA A100 (UUID: GPU-...)", below which stand its slices: "  MIG 1g.5gb  Device 0: (UUID: MIG-...)".
_LISTED = re.compile(r"^\s*(?:GPU (\d+): (.*)|(MIG \S+).*:) \(UUID: (\S+)\)", re.MULTILINE)

# What nvidia-smi says of a GPU that has fallen off the bus (Xid 79), or has stopped with another error.
_LOST = re.compile(r"unable to determine the device handle|GPU is lost|fallen off the bus", re.IGNORECASE)


class Gpu(NamedTuple):
    """A GPU, or a MIG instance of one."""

    uuid: str
    name: str


def visible() -> list[Gpu]:
    """Return what CUDA will show this process, in its order; [] where nvidia-smi is silent.

    GPUs are counted as nvidia-smi does, which is CUDA's order among equal ones.
    """
    cards = _cards()
    names = os.environ.get(VISIBLE, ",".join(map(str, range(len(cards))))).split(",")
    shown: list[Gpu] = []
    for name in names:
        found = _named(name.strip(), cards)
        if found is None:  # CUDA does not read on after a name that it does not know
            break
        shown.append(found)
        if names_instances(name):  # a process has one, whatever else is named
            break
    return shown


def lost() -> str:
    """Return what nvidia-smi says of a GPU that no longer answers, and what helps; "" if all answer."""
    done = _listing()
    lines = [] if done is None else (done.stdout + done.stderr).splitlines()
    said = next((line.strip() for line in lines if _LOST.search(line)), "")
    where = "`dmesg | grep Xid` has the cause, a reboot helps"
    return f"a GPU no longer answers (nvidia-smi: {said}): {where}" if said else ""


def why_unusable(cuda: str, *, may_be_lost: bool = True) -> str:
    """Return why a program built for this CUDA version ("13.0") finds no GPU where there are some, and what helps.

    "" if they are hidden, or nothing is found to be wrong. Without `may_be_lost`, only the driver is asked.
    """
    if os.environ.get(VISIBLE, "0").strip() in ("", "-1"):
        return ""
    on_cpus = f'Or train on CPUs: {VISIBLE}=""'
    if may_be_lost and (said := lost()):
        return f"{said}. {on_cpus}"
    drivers, _ = toolchain.gpu_drivers()
    if drivers and (oldest := toolchain.old_driver(drivers[0], cuda)):
        return (
            f"the NVIDIA driver is {drivers[0]}, and CUDA {cuda} needs {oldest} or newer: apt-get install "
            f"nvidia-driver-{oldest} (Ubuntu's name). {on_cpus}"
        )
    return ""


def names_instances(visible: str) -> bool:
    """Return whether a value of CUDA_VISIBLE_DEVICES names MIG instances: CUDA shows a process the first one alone."""
    return visible.strip().startswith("MIG-")


def _named(name: str, cards: list[list[Gpu]]) -> Gpu | None:
    """Return what a number, a UUID or the beginning of one stands for."""
    for number, (card, *instances) in enumerate(cards):
        if name == str(number) or (name and card.uuid.startswith(name)):
            return instances[0] if instances else card  # of instances that are not named, CUDA takes the first
        for each in instances:
            if name and each.uuid.startswith(name):
                return each
    return None


def _cards() -> list[list[Gpu]]:
    """Return all GPUs, each with its MIG instances behind it."""
    done = _listing()
    cards: list[list[Gpu]] = []
    for number, name, mig, uuid in _LISTED.findall("" if done is None or done.returncode else done.stdout):
        if number:
            cards.append([Gpu(uuid, name)])
        elif cards:
            cards[-1].append(Gpu(uuid, f"{cards[-1][0].name} {mig}"))
    return cards


def _listing() -> subprocess.CompletedProcess[str] | None:
    """Return what nvidia-smi says of the GPUs; None where it does not run, or does not end."""
    try:
        return subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
