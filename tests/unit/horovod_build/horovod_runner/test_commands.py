"""The command lines of ranks on this host and on others: what is in them, and what must not be."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from horovod.runner.common.util import env as env_util
from horovod.runner.common.util import proof, safe_shell_exec
from horovod.runner.util import remote

# Logs in on this host with a shell of its own, as sshd does: one string for it to run.
SSH = """#!/bin/sh
for last; do :; done
cd "$LOGIN_HOME" && exec env -i PATH="$PATH" HOME="$LOGIN_HOME" "$LOGIN_SHELL" -c "$last"
"""
TELL = """
import json, os, pathlib, sys
parent, lines = os.getppid(), []
while parent > 1:
    lines.append(pathlib.Path(f"/proc/{parent}/cmdline").read_bytes().decode(errors="replace"))
    parent = int(pathlib.Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[1])
lines.append(pathlib.Path("/proc/self/cmdline").read_bytes().decode(errors="replace"))
told = {"folder": os.getcwd(), "env": dict(os.environ), "lines": lines, "input": sys.stdin.read()}
pathlib.Path(sys.argv[1]).write_text(json.dumps(told))
"""
TOKEN = "hunter2-" + "5" * 30
VALUES = {
    "TOKEN": TOKEN,
    "QUOTES": 'it\'s "quoted" `date` $(date) $HOME \\n !x',
    "LINES": "one\ntwo\n\nexport TOKEN='other'\n",
    "BYTES": os.fsdecode(b"\xff\xfe"),
    "EMPTY": "",
    "LONG": "x" * 100_000,
}


@pytest.fixture(params=["sh", "bash"])
def host(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Another host, reached by ssh."""
    shell = shutil.which(request.param)
    if shell is None:
        pytest.skip(f"no {request.param}")
    home = tmp_path / "home"
    home.mkdir()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ssh").write_text(SSH)
    (tmp_path / "bin" / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("LOGIN_HOME", str(home))
    monkeypatch.setenv("LOGIN_SHELL", shell)
    monkeypatch.delenv("OMPI_MCA_plm_rsh_agent", raising=False)
    return SimpleNamespace(home=home, told=tmp_path / "told.json")


def run(host: SimpleNamespace, env: dict[str, str], **options: Any) -> tuple[dict, str]:
    """Run a rank there; return what it tells of itself, and what came by standard error."""
    command = f"env HOROVOD_RANK=1 {sys.executable} -c {remote.quote(TELL)} {host.told}"
    line, text = remote.get_remote_command_and_input(command, env, "there", **options)
    out, err = io.StringIO(), io.StringIO()
    status = safe_shell_exec.execute(line, stdout=out, stderr=err, input=text)
    assert status == 0, err.getvalue()
    return json.loads(host.told.read_text()), err.getvalue()


def test_the_environment_comes_by_standard_input_letter_for_letter(host: SimpleNamespace) -> None:
    told, said = run(host, VALUES)
    assert {name: told["env"][name] for name in VALUES} == VALUES
    assert told["env"]["HOROVOD_RANK"] == "1"
    assert said == ""
    assert told["input"] == ""
    assert not any(TOKEN in line for line in told["lines"])


def test_names_that_no_shell_exports_are_left_out(host: SimpleNamespace) -> None:
    odd = {"BASH_FUNC_x%%": "() { :; }", "a b": "c", "1A": "b", "UID": "7", "SHELLOPTS": "xtrace", "é": "b"}
    told, said = run(host, {**odd, "GOOD": "yes"})
    assert told["env"]["GOOD"] == "yes"
    assert not {name for name, value in odd.items() if told["env"].get(name) == value}
    assert said == ""


@pytest.mark.parametrize(
    "name", ["plain", "with space", "a; touch pwned", "it's", "$(touch pwned)", "line\nbreak", "-x"]
)
def test_the_working_folder_is_the_same_whatever_its_name(name: str, host: SimpleNamespace, tmp_path: Path) -> None:
    folder = tmp_path / name
    folder.mkdir()
    told, said = run(host, {"PWD": "/elsewhere"}, folder=str(folder))
    assert told["folder"] == told["env"]["PWD"] == str(folder)
    assert said == ""
    assert not list(tmp_path.rglob("pwned"))


def test_a_folder_that_is_missing_there_is_told_in_one_line(host: SimpleNamespace, tmp_path: Path) -> None:
    missing = str(tmp_path / "missing $(touch pwned) %s")
    told, said = run(host, {}, folder=missing)
    assert told["folder"] == str(host.home)
    assert said == (
        f"horovodrun: host there has no folder {missing!r} that can be entered: its ranks are started in the home "
        "folder\n"
    )
    assert run(host, {}, folder=missing, say=False)[1] == ""
    assert not list(tmp_path.rglob("pwned"))


def test_kubeflow_has_no_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_MCA_plm_rsh_agent", env_util.KUBEFLOW_MPI_EXEC)
    line, text = remote.get_remote_command_and_input("train", {"A": "b c"}, "there", folder="/a b")
    assert text is None
    assert line.startswith("/etc/mpi/kubexec.sh there ")
    done = subprocess.run(["sh", "-c", f"printf %s {line.partition('there ')[2]}"], capture_output=True, text=True)
    assert done.stdout.endswith("env A='b c' train")


def test_hosts_are_known_from_their_first_connection_on() -> None:
    line = remote.get_remote_command("true", "there")
    assert "StrictHostKeyChecking=accept-new" in line
    assert "StrictHostKeyChecking=no" not in line


def test_the_key_is_never_exported_by_name_and_value() -> None:
    assert not env_util.is_exportable(proof.VARIABLE)
    assert env_util.is_exportable("HVDTRAIN_LOOPBACK")


def test_a_command_without_input_reads_nothing() -> None:
    out = io.StringIO()
    assert safe_shell_exec.execute("cat; echo end", stdout=out) == 0
    assert out.getvalue() == "end\n"


def test_a_command_that_does_not_read_its_input_ends_as_ever() -> None:
    out = io.StringIO()
    assert safe_shell_exec.execute("exit 3", stdout=out, input="x" * 1_000_000) == 3
