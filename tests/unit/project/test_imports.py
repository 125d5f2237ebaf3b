"""What import-linter cannot see: imports by text."""

from __future__ import annotations

import re
from pathlib import Path

import hvdtrain

PACKAGE = Path(hvdtrain.__file__).parent
FRAMEWORKS = re.compile(r"""import_module\(\s*f?["']hvdtrain\.(\{|torch|keras|tensorflow)""")


def test_the_core_imports_frameworks_folders_in_one_place() -> None:
    own = {PACKAGE / "torch", PACKAGE / "keras", PACKAGE / "horovod_build" / "added"}
    core = [path for path in PACKAGE.rglob("*.py") if not own & set(path.parents) and path != PACKAGE / "__init__.py"]
    found = {path.relative_to(PACKAGE).as_posix() for path in core if FRAMEWORKS.search(path.read_text())}
    assert found == {"distributed/frameworks.py"}
    quoted = re.compile(r"""["']hvdtrain\.(torch|keras)\.\w+["']""")
    assert not [path for path in core if quoted.search(path.read_text())]
