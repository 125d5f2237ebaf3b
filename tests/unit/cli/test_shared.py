"""The common part of all commands: help, one line for bad input, tracebacks on request, completion."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from hvdtrain.cli import program
from hvdtrain.distributed.watchdog import rank_exit
from hvdtrain.horovod_build import build
from hvdtrain.system import settings
from hvdtrain.training import preemption

COMMANDS = ("build", "doctor", "bench", "plan", "report", "run")


@pytest.fixture
def call(monkeypatch, capsys, tmp_path):
    """Return what runs a command line in this process, in an empty folder, and returns (status, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HVDTRAIN_DEBUG", "0")

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["hvdtrain", *arguments])
        with pytest.raises(SystemExit) as info:
            program.main()
        return info.value.code, *capsys.readouterr()

    return run


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_an_example(call, command):
    status, out, _ = call(command, "--help")
    assert status == 0
    assert out.startswith(f"Usage: hvdtrain {command}")
    assert f"Example: hvdtrain {command}" in out


def test_the_overview_shows_whole_sentences_and_every_exit_status(call):
    status, out, _ = call("--help")
    assert status == 0
    assert "..." not in out.partition("Commands:")[2]
    statuses = [line.split()[0] for line in out.partition("Exit status:")[2].splitlines() if line.strip()]
    assert statuses == ["0", "1", "2", str(settings.EXIT_STOPPED), str(rank_exit.STALLED), "130", "other"]
    assert settings.EXIT_STOPPED == preemption.EXIT_CODE


def test_without_a_command_the_overview_is_the_answer(call):
    status, out, err = call()
    assert (status, out) == (2, "")
    assert "Exit status:" in err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("biuld", "hvdtrain: there is no command biuld. Did you mean build?"),
        ("xyzzy", "hvdtrain: there is no command xyzzy. There are build, doctor, bench, plan, report, run"),
        ("--versoin", "hvdtrain: there is no option --versoin. Did you mean --version?"),
        ("--debug", "hvdtrain: say which command. Type: hvdtrain --help"),
        ("doctor --jsno", "hvdtrain doctor: there is no option --jsno. Did you mean --json?"),
        ("doctor --xyzzy", "hvdtrain doctor: there is no option --xyzzy. Type: hvdtrain doctor --help"),
        ("doctor json", "hvdtrain doctor: it takes no argument. Received: json. Did you mean --json?"),
        ("doctor --json=1", "hvdtrain doctor: option '--json' does not take a value. Type: hvdtrain doctor --help"),
        ("doctor --json --report", "hvdtrain doctor: --json and --report are two forms of one answer"),
        ("doctor --report --no-allreduce", "hvdtrain doctor: --report holds the live allreduces"),
        ("doctor --gpu --no-allreduce", "hvdtrain doctor: --gpu starts processes. Leave out --no-allreduce"),
        ("doctor --out x", "hvdtrain doctor: --out is for --report. Type: hvdtrain doctor --report --out x"),
        ("build --jobs x", "hvdtrain build: --jobs must be a whole number, at least 1. Received: x"),
        ("build --jobs=0", "hvdtrain build: --jobs must be a whole number, at least 1. Received: 0"),
        ("build --without tensroflow", "Received: tensroflow. Did you mean tensorflow?"),
        ("build --sdist gone.tar.gz", "hvdtrain build: --sdist must be a file. There is none at gone.tar.gz"),
        ("build --wheel-dir /dev/null/x", "hvdtrain build: --wheel-dir must be a folder. /dev/null is a file"),
        ("build --out /dev/null/x", "hvdtrain build: --out must be a folder. /dev/null is a file"),
        ("build --out a --wheel-dir b", "hvdtrain build: the wheel goes into one folder. Received: a, b. Give --out"),
        ("build --cuda-arch abc", "hvdtrain build: --cuda-arch must be architectures such as 80,90. Received: abc"),
        ("bench -np two", "hvdtrain bench: -np must be a whole number. Received: two"),
        ("bench --ranks=two", "hvdtrain bench: --ranks must be a whole number. Received: two"),
        ("bench --steps", "hvdtrain bench: --steps needs a value. Type: hvdtrain bench --help"),
        ("bench --timeout soon", "hvdtrain bench: --timeout must be a number. Received: soon"),
        ("plan --step 5", "hvdtrain plan: --step: '5' is not a time: write a number and one of ns, us"),
        ("plan --gradeints 8MB", "hvdtrain plan: there is no option --gradeints. Did you mean --gradients?"),
        ("report gone", "hvdtrain report: there is no folder gone"),
        ("run", "hvdtrain run: say how many ranks: hvdtrain run -np 2 train.py"),
        ("run -np 2 --lancher mpirun x.py", "of horovodrun. Did you mean --launcher?"),
        ("run --config gone.yaml", "hvdtrain run: --config gone.yaml cannot be read: No such file or directory"),
    ],
)
def test_bad_input_is_one_line_that_says_what_to_type(call, line, said):
    status, out, err = call(*line.split())
    assert (status, out) == (2, "")
    assert said in err
    assert err.startswith("hvdtrain")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("doctor --report --out dir", "hvdtrain doctor: --out must be a file. dir is a folder. Type: --out dir/report"),
        ("report dir/run --out dir", "hvdtrain report: --out must be a file. dir is a folder. Type: --out dir/report"),
        ("plan --measured dir/deep.json", "hvdtrain plan: dir/deep.json is not JSON: maximum recursion depth"),
        ("run -np {big} x.py", "hvdtrain run: -np must be a whole number, at least 1. Received: -np 999"),
        ("run -np 2 -H a:{big} sh", "hvdtrain run: -H must be like host1:2,host2:2. Received: -H a:999"),
        ("run --config dir/big.yaml", "big.yaml, line 1: np must be a whole number, at least 1. Received: 999"),
        ("bench -np 2 -H a:{big}", "hvdtrain bench: -H must be like host1:2,host2:2. Received: -H a:999"),
        ("build --out secret", "hvdtrain build: --out must be a folder that can be written. /"),
        ("bench --script dir/secret", "hvdtrain bench: --script must be a file that can be read. dir/secret cannot"),
        ("run -np 2 dir/secret.py", "the script dir/secret.py cannot be read: permission denied. Type: chmod u+r dir/"),
        ("report dir/run --out secret.html", "secret.html cannot be written: permission denied. Name a file elsewhere"),
    ],
)
def test_what_is_out_of_reach_or_out_of_bounds_is_one_line_too(call, monkeypatch, line, said):
    may = os.access  # root may do anything
    monkeypatch.setattr(os, "access", lambda path, mode: "secret" not in str(path) and may(path, mode))
    big = "9" * 5000  # Python refuses to read more than 4300 digits
    folder = Path("dir/run")
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text('{"kind": "epoch", "global_step": 1, "metrics": {"loss": 1}}\n')
    Path("dir/deep.json").write_text("[" * 100_000)
    Path("dir/big.yaml").write_text(f"np: {big}\n")
    for name in ("dir/secret", "dir/secret.py", "secret.html"):
        Path(name).touch()
    Path("secret").mkdir()
    status, out, err = call(*line.format(big=big).split())
    assert (status, out) == (2, "")
    assert said in err
    assert err.startswith("hvdtrain")
    assert err.count("\n") == 1


def test_what_was_typed_cannot_break_the_line(call):
    assert call("report", "a\nb") == (
        2,
        "",
        "hvdtrain report: there is no folder a b. Runs are in runs/, see: ls runs\n",
    )


def test_a_bug_is_one_line_and_a_traceback_on_request(call, monkeypatch):
    def fail(options):
        raise KeyError("boom")

    monkeypatch.setattr(build, "build", fail)
    status, _, err = call("build")
    assert status == 1
    assert err.startswith("hvdtrain build: KeyError: 'boom'. This is a bug of hvdtrain. HVDTRAIN_DEBUG=1")
    assert err.count("\n") == 1
    for line in (["--debug", "build"], ["build", "--debug"]):
        monkeypatch.setenv("HVDTRAIN_DEBUG", "0")
        status, _, err = call(*line)
        assert status == 1
        assert "Traceback (most recent call last)" in err
        assert os.environ["HVDTRAIN_DEBUG"] == "1", "ranks hear of it too"


def test_ctrl_c_is_130(call, monkeypatch):
    def interrupt(options):
        raise KeyboardInterrupt

    monkeypatch.setattr(build, "build", interrupt)
    status, _, err = call("build")
    assert status == 130
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("hvdtrain pl", {"plan"}),
        ("hvdtrain build --dr", {"--dry-run"}),
        ("hvdtrain build --without t", {"torch", "tensorflow"}),
        ("hvdtrain plan --algorithm tr", {"tree"}),
        ("hvdtrain run -np 2 --max", {"--max-restarts"}),
        ("hvdtrain run -np 2 --gloo --gra", {"--grace"}),
        ("hvdtrain run --launcher mpi", {"mpirun"}),
    ],
)
def test_the_shell_completes_commands_options_and_values(call, monkeypatch, words, offered):
    monkeypatch.setenv("_HVDTRAIN_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    status, out, _ = call()
    assert status == 0
    assert set(out.split()) == offered


def test_completion_changes_nothing(call, monkeypatch, tmp_path):
    monkeypatch.setenv("_HVDTRAIN_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "hvdtrain run --config gone.yaml --gr")
    monkeypatch.setenv("COMP_CWORD", "4")
    assert call()[0] == 0
    assert list(Path(tmp_path).iterdir()) == []
