"""`make models` installs Lightning and runs these tests; elsewhere they are left out, since they cannot be imported."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = ["*"] if importlib.util.find_spec("lightning") is None else []
