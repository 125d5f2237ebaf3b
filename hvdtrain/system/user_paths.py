"""Read the paths that users give: "~" is their home folder, as in a shell."""

from __future__ import annotations

import os
from pathlib import Path


def expanded(path: str | os.PathLike[str]) -> Path:
    """Return a path with "~" and "~name" at its beginning replaced; a folder of that name is "./~".

    No shell does so for "~" in quotes, in Python, or after "--out=".
    """
    return Path(os.path.expanduser(path))
