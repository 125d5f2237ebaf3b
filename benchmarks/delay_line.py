"""Connect two switches with a delay, as netem does, which small kernels lack.

Run in the switches' network namespace, with their names and the delay in seconds. Each end is a TAP device. This
process moves Ethernet frames from one to the other, as large as TCP makes them (up to 64 KiB): the more a link
carries, the fewer frames there are for each byte.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque

# From Linux's if_tun.h.
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
_UNFINISHED_CHECKSUMS, _LARGE_TCP_4, _LARGE_TCP_6 = 0x01, 0x02, 0x04
_LARGEST = 2**17  # bytes of a frame with its header
_READY = "ready\n"


def plug_in(device: str, bridge: str) -> int:
    """Make a TAP device, plug it into a bridge, and return its file."""
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    # A frame has a header that says how to divide it, which the other end must get too.
    flags = _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR
    fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH22x", device.encode(), flags))
    fcntl.ioctl(file, _TUNSETOFFLOAD, _UNFINISHED_CHECKSUMS | _LARGE_TCP_4 | _LARGE_TCP_6)
    subprocess.run(["ip", "link", "set", device, "master", bridge, "up", "txqueuelen", "100000"], check=True)
    return file


def carry(ends: tuple[int, int], delay_s: float) -> None:
    """Carry frames until standard input ends."""
    other = dict(zip(ends, reversed(ends), strict=True))
    waiting: deque[tuple[float, int, bytes]] = deque()  # due times, ends and frames; in order, as all wait as long
    while True:
        timeout = None if not waiting else max(0.0, waiting[0][0] - time.monotonic())
        readable = select.select([*ends, 0], [], [], timeout)[0]
        if 0 in readable:
            return
        for end in readable:
            waiting.append((time.monotonic() + delay_s, other[end], os.read(end, _LARGEST)))
        while waiting and waiting[0][0] <= time.monotonic():
            _, end, frame = waiting.popleft()
            with contextlib.suppress(OSError):  # the frame is dropped if the device's queue is full
                os.write(end, frame)


if __name__ == "__main__":
    here, there, seconds = sys.argv[1:]
    files = plug_in("delay0", here), plug_in("delay1", there)
    sys.stdout.write(_READY)
    sys.stdout.flush()
    carry(files, float(seconds))
