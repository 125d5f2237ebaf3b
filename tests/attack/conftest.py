"""Another user of this host: programs run with an unprivileged uid beside jobs of this one's."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from attacked import UID

_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", "LANG": "C.UTF-8"}


class Stranger:
    """Runs programs as a user who owns nothing here but `folder`.

    Attributes:
        folder: the one folder in which that user may write, besides /tmp and /dev/shm.
        uid: his.
    """

    uid = UID

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._python = shutil.which("python3", path="/usr/bin:/usr/local/bin") or sys.executable

    def start(self, code: str, *arguments: object) -> subprocess.Popen[str]:
        """Start Python on `code`, which finds `arguments` in sys.argv[1:]; the standard library is all it has."""
        return subprocess.Popen(
            [self._python, "-I", "-S", "-c", code, *map(str, arguments)],
            cwd=self.folder,
            env=_ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            user=UID,
            group=UID,
            extra_groups=[],
            umask=0,
        )

    def run(self, code: str, *arguments: object, timeout_s: float = 60) -> str:
        """Run it to its end and return what it printed; an error in it fails the test."""
        process = self.start(code, *arguments)
        try:
            output = process.communicate(timeout=timeout_s)[0]
        finally:
            process.kill()
        assert process.returncode == 0, f"the attack itself failed ({process.returncode}):\n{output}"
        return output


@pytest.fixture
def stranger() -> Iterator[Stranger]:
    if os.geteuid() != 0:
        pytest.skip("only root can run a program as another user")
    with tempfile.TemporaryDirectory(prefix="hvdtrain-stranger-") as folder:
        os.chown(folder, UID, UID)
        yield Stranger(Path(folder))
