import platform
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def folder() -> Path:
    """Return the folder that keeps what was compiled."""
    if platform.machine() != "x86_64":
        pytest.skip("the stand-in's float16 is x86_64's")
    return Path(__file__).parents[2] / "build" / "standin"
