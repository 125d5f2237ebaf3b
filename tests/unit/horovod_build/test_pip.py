from __future__ import annotations

import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from hvdtrain.horovod_build import packages
from hvdtrain.horovod_build.errors import BuildError


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment without pip, as uv makes them, whose Python looks for what it brings in an empty folder."""
    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare" / "bin" / "python"))
    monkeypatch.setattr(packages.sysconfig, "get_path", lambda name: str(tmp_path / "stdlib"))
    monkeypatch.setattr(packages.sysconfig, "get_config_var", lambda name: None)
    monkeypatch.delenv("UV", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "programs"))
    (tmp_path / "programs").mkdir()
    return tmp_path


def fake_pip(folder: Path) -> None:
    (folder / "pip").mkdir(parents=True)
    (folder / "pip" / "__main__.py").write_text("import sys; print('pip', *sys.argv[1:], sys.prefix)")


def test_the_environments_own_pip_is_taken_first(tmp_path: Path) -> None:
    assert packages.pip_command(tmp_path)[:3] == [sys.executable, "-m", "pip"]
    assert list(tmp_path.iterdir()) == []


def test_without_pip_the_one_that_python_brings_runs_for_this_environment(bare: Path) -> None:
    bundled = bare / "stdlib" / "ensurepip" / "_bundled"
    bundled.mkdir(parents=True)
    with zipfile.ZipFile(bundled / "pip-24.0-py3-none-any.whl", "w") as archive:
        archive.writestr("pip/__main__.py", "import sys; print('pip', *sys.argv[-1:], sys.prefix)")
    done = subprocess.run([*packages.pip_command(bare / "cache"), "list"], capture_output=True, text=True, check=True)
    assert done.stdout == f"pip list {bare / 'bare'}\n"
    assert not list(bare.glob("bare/lib/*/site-packages/*"))


def test_without_ensurepip_uv_fetches_pip(bare: Path) -> None:
    uv = bare / "programs" / "uv"
    fake_pip(bare / "uvs")
    uv.write_text(f"""#!/bin/sh
[ "$1 $2 $4 $6" = "pip install --python --target" ] || exit 1
[ "$8 $9" = "--require-hashes --requirement" ] || exit 1
/bin/mkdir -p "$7" && /bin/cp -r {bare}/uvs/pip "$7"
""")
    uv.chmod(0o755)
    done = subprocess.run([*packages.pip_command(bare / "cache"), "list"], capture_output=True, text=True, check=True)
    assert done.stdout == f"pip --disable-pip-version-check --no-input list {bare / 'bare'}\n"


def test_what_uv_says_is_passed_on(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uv = bare / "uv"
    uv.write_text("#!/bin/sh\necho error: no network >&2; exit 2\n")
    uv.chmod(0o755)
    monkeypatch.setenv("UV", str(uv))  # as `uv run` sets it
    with pytest.raises(BuildError, match=r"uv could not fetch it: error: no network. Run: .* -m ensurepip"):
        packages.pip_command(bare / "cache")
    assert list((bare / "cache" / "build-tools").iterdir()) == []


def test_where_no_pip_can_be_had_the_commands_that_bring_it_are_named(bare: Path) -> None:
    with pytest.raises(BuildError, match=r"without ensurepip, and uv is not on PATH.*-m ensurepip.*uv pip install"):
        packages.pip_command(bare / "cache")
