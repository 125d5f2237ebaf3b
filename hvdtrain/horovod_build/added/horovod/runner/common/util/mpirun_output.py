"""Pass mpirun's output on while somebody reads it."""

from __future__ import annotations

import os
import select
import stat
import threading

STDOUT, STDERR = 1, 2


class Output:
    """Stands between a process and those of our own streams that are pipes: their readers may leave at any time.

    mpirun ends the job, or crashes, once it has written into a pipe that nobody reads. Other streams are inherited.

    Attributes:
        stdout: what the process gets as such, None to inherit ours.
        stderr: likewise; the same pipe where ours are one, so that the order of lines is kept.
    """

    def __init__(self) -> None:
        self._copies: list[_Copy] = []
        self.stdout = self.stderr = None
        if _can_lose_its_reader(STDOUT):
            is_one = _can_lose_its_reader(STDERR) and os.path.samestat(os.fstat(STDOUT), os.fstat(STDERR))
            self._copies.append(_Copy(STDOUT, *([STDERR] if is_one else [])))
            self.stdout = self._copies[0].pipe
            self.stderr = self.stdout if is_one else None
        if self.stderr is None and _can_lose_its_reader(STDERR):
            self._copies.append(_Copy(STDERR))
            self.stderr = self._copies[-1].pipe

    def start(self) -> None:
        """Begin to copy: the process has been started."""
        for each in self._copies:
            each.start()

    def finish(self) -> None:
        """Wait until what the process had written when it ended is passed on, however slowly that is read."""
        for each in self._copies:
            each.finish()


class _Copy:
    """Copies what comes through a pipe to one of our own streams; the same stream may have several numbers."""

    def __init__(self, *numbers: int) -> None:
        self._numbers = numbers
        self._source, self.pipe = os.pipe()
        self._ended, self._end = os.pipe()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        os.close(self.pipe)
        self._thread.start()

    def finish(self) -> None:
        os.close(self._end)
        self._thread.join()

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._source, select.POLLIN)
        poll.register(self._ended, select.POLLIN)
        # The process has ended and nothing is left: something that it started may hold the pipe for longer.
        while self._source in dict(poll.poll()):
            data = os.read(self._source, 2**16)
            if not data:
                return
            self._write(memoryview(data))

    def _write(self, data: memoryview) -> None:
        while data:
            try:
                data = data[os.write(self._numbers[0], data) :]
            except BlockingIOError:  # whoever shares the pipe has set it so
                room = select.poll()
                room.register(self._numbers[0], select.POLLOUT)
                room.poll()
            except OSError:  # nobody reads it
                nowhere = os.open(os.devnull, os.O_WRONLY)
                for number in self._numbers:
                    os.dup2(nowhere, number)
                os.close(nowhere)


def _can_lose_its_reader(number: int) -> bool:
    try:
        mode = os.fstat(number).st_mode
    except OSError:  # it is closed
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)
