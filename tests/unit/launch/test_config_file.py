"""`hvdtrain run --config`: a file and flags are one run, flags win, and what is wrong is named with its line."""

from __future__ import annotations

import os
import string
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import assume, given
from hypothesis import strategies as st

from hvdtrain.cli import program
from hvdtrain.errors import UsageError
from hvdtrain.launch import config_file, supervisor
from hvdtrain.launch.arguments import split
from hvdtrain.launch.config_file import Settings
from hvdtrain.system import redact

FILE = """
np: 2
hosts: localhost:2
max-restarts: 1
grace: 2.5
launcher-options: [--network-interfaces, lo, --gloo]
environment:
  OMP_NUM_THREADS: 1
  MODE: on
script: train.py
arguments: [--epochs, 90, --lr, 0.10, --flag, yes]
"""


@pytest.fixture
def start(monkeypatch, tmp_path, capsys):
    """Return what runs `hvdtrain run` up to the start of the job, and returns (options, what is kept, what is said)."""
    pytest.importorskip("horovod")
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    Path("other.py").touch()
    monkeypatch.setattr(os, "environ", os.environ.copy())
    (tmp_path / "mpirun").touch(0o755)  # nothing is started: to be found is enough
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("HVDTRAIN_RUN_NAME", "mine")
    monkeypatch.delenv("HVDTRAIN_RUNS", raising=False)
    started = []

    def run(options, run_dir):
        run_dir.rmdir()
        started.append(options)
        return 0

    monkeypatch.setattr(supervisor, "run", run)

    def call(line):
        monkeypatch.setattr(sys, "argv", ["hvdtrain", "run", *line.split()])
        with pytest.raises(SystemExit) as info:
            program.main()
        said = capsys.readouterr().err
        assert info.value.code == 0, said
        kept = Path("runs/mine/run.yaml")
        return started.pop(), kept.read_text() if kept.exists() else None, said

    return call


def environment(options):
    mine = {name: options.environment.get(name) for name in ("OMP_NUM_THREADS", "MODE")}
    return mine, options.line, options.max_restarts, options.grace_s


def test_a_file_and_flags_are_the_same_run(start, monkeypatch):
    Path("train.yaml").write_text(FILE)
    from_file, kept, said = start("--config train.yaml")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("MODE", "on")
    flags = "-np 2 -H localhost:2 --max-restarts 1 --grace 2.5 --network-interfaces lo --gloo"
    from_flags, kept_flags, said_flags = start(f"{flags} train.py --epochs 90 --lr 0.10 --flag yes")
    assert environment(from_file) == environment(from_flags)
    assert from_file.line[-6:] == ["--epochs", "90", "--lr", "0.10", "--flag", "yes"]
    without = {key: value for key, value in yaml.safe_load(kept).items() if key != "environment"}
    assert without == yaml.safe_load(kept_flags)
    assert "environment OMP_NUM_THREADS=1 MODE=on" in said
    assert "np 2, hosts localhost:2, max-restarts 1, grace 2.5, launcher horovodrun" in said_flags
    assert "script train.py, arguments --epochs 90 --lr 0.10 --flag yes (saved in runs/mine/run.yaml)" in said_flags


def test_what_is_kept_starts_the_same_run_again(start):
    Path("train.yaml").write_text(FILE)
    first, kept, _ = start("--config train.yaml")
    Path("again.yaml").write_text(kept)
    again, kept_again, _ = start("--config again.yaml")
    assert environment(first) == environment(again)
    assert kept == kept_again


def test_open_mpi_5_may_crowd_this_host_but_no_host_that_was_named(start) -> None:
    policy = "PRTE_MCA_rmaps_default_mapping_policy"
    options, *_ = start("-np 1 --launcher mpirun train.py")
    assert options.environment[policy] == ":OVERSUBSCRIBE"
    for line in ("-np 1 -H localhost:1 --launcher mpirun train.py", "-np 1 train.py"):
        options, *_ = start(line)
        assert policy not in options.environment


def test_a_host_without_a_number_takes_one_rank_also_for_horovodrun(start):
    options, *_ = start("-np 1 -H localhost train.py")
    assert options.line[-4:-2] == ["-H", "localhost:1"]
    options, *_ = start("-np 1 -H localhost --launcher mpirun train.py")
    assert "localhost:1" not in options.line


def test_flags_win_over_the_file(start):
    Path("train.yaml").write_text(FILE)
    options, kept, _ = start("-H localhost:9 --config train.yaml -np 3 --max-restarts=0 --mpi --verbose")
    assert yaml.safe_load(kept) == {
        "np": 3,
        "hosts": "localhost:9",
        "max-restarts": 0,
        "grace": 2.5,
        "launcher": "horovodrun",
        "launcher-options": ["--network-interfaces", "lo", "--mpi", "--verbose"],
        "environment": {"OMP_NUM_THREADS": "1", "MODE": "on"},
        "script": "train.py",
        "arguments": ["--epochs", "90", "--lr", "0.10", "--flag", "yes"],
    }
    assert "--gloo" not in options.line


def test_another_script_takes_the_place_of_the_files_with_its_arguments(start):
    Path("train.yaml").write_text(FILE)
    assert start("--config train.yaml other.py --lr 1")[0].line[-3:] == ["other.py", "--lr", "1"]


def test_arguments_alone_are_added_to_the_files(start):
    Path("train.yaml").write_text(FILE)
    assert start("--config train.yaml -- --epochs 1")[0].line[-4:] == ["--flag", "yes", "--epochs", "1"]


def test_the_files_launcher_tells_what_options_mean(start):
    Path("mpi.yaml").write_text("np: 2\nlauncher: mpirun\nlauncher-options: [-x, A=1, -x, B=1, --bind-to, core]\n")
    options, _, _ = start("--config mpi.yaml -x B=2 --bind-to none train.py")
    given = options.line[options.line.index("-x") : options.line.index("train.py") - 1]
    assert given == ["-x", "A=1", "-x", "B=2", "--bind-to", "none"]


def test_a_launcher_on_the_command_line_wins_over_the_files(start):
    Path("train.yaml").write_text("np: 2\nlauncher: horovodrun\nscript: train.py\n")
    options, _, _ = start("--launcher mpirun --config train.yaml -x TOKEN=abc123")
    assert Path(options.line[0]).name == "mpirun"
    assert options.line[options.line.index("-x") :][:2] == ["-x", "TOKEN=abc123"]


def test_no_run_folder_is_made_where_none_is_wanted(start, monkeypatch):
    monkeypatch.setenv("HVDTRAIN_RUNS", "")
    assert start("-np 2 train.py")[1] is None
    assert not Path("runs").exists()


def test_a_tokenizer_is_no_secret(start):
    _, kept, _ = start("-np 2 train.py --tokenizer bert --max-tokens 512")
    assert yaml.safe_load(kept)["arguments"] == ["--tokenizer", "bert", "--max-tokens", "512"]


def test_secrets_are_neither_shown_nor_kept_nor_taken_for_values(start):
    Path("train.yaml").write_text("np: 2\nscript: train.py\nenvironment: {WANDB_API_KEY: abc123}\n")
    options, kept, said = start(
        "--config train.yaml --launcher mpirun -x MY_TOKEN=abc123 train.py --to https://me:abc123@host/ --token abc123"
    )
    assert options.environment["WANDB_API_KEY"] == "abc123"
    assert options.line[-1] == "abc123"
    assert "abc123" not in kept + said
    Path("again.yaml").write_text(kept)
    for where in ("launcher-options", "WANDB_API_KEY", "arguments"):
        with pytest.raises(UsageError, match=f"{where} was a secret, and secrets are not saved"):
            config_file.read("again.yaml")
        lines = Path("again.yaml").read_text().splitlines(keepends=True)
        hidden = next(line for line in lines if "(hidden)" in line)
        lines[lines.index(hidden)] = hidden.replace("(hidden)", "given-anew")
        Path("again.yaml").write_text("".join(lines))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("np: 2\nmax_restart: 1", "c.yaml, line 2: there is no key max_restart. Did you mean max-restarts?"),
        ("np: 2\n--grace: 1", "line 2: there is no key --grace. Did you mean grace?"),
        ("xyzzy: 1", "line 1: there is no key xyzzy. There are np, hosts, max-restarts"),
        (
            "log-level: DEBUG",
            "there is no key log-level, but horovodrun has the option. Write launcher-options: [--log-level, ...]",
        ),
        ("\nnp: two", "c.yaml, line 2: np must be a whole number, at least 1. Received: two"),
        ("np: 0", "np must be a whole number, at least 1. Received: 0"),
        ("np: 2.0", "np must be a whole number, at least 1. Received: 2.0"),
        ("np: true", "np must be a whole number, at least 1. Received: true"),
        ("np: [2]", "np must be a whole number, at least 1. Received: a list"),
        ("np:", "np must be a whole number, at least 1. Received: nothing"),
        ("np: 2\nnp: 3", "c.yaml, line 2: np appears twice. Remove one of them"),
        ("max-restarts: -1", "max-restarts must be a whole number, at least 0. Received: -1"),
        ("grace: soon", "grace must be a number of seconds, 0 or more. Received: soon"),
        ("launcher: horvodrun", "launcher must be horovodrun or mpirun. Received: horvodrun. Did you mean horovodrun?"),
        ("script: a.py\narguments: --epochs 3", "arguments must be a list of words, such as [--epochs, 90]. Received"),
        ("script: a.py\narguments: [[1]]", "arguments must be a list of words, such as [--epochs, 90]. Received: a li"),
        ("arguments: [1]", "arguments are a script's. Add the key script, such as script: train.py"),
        ("environment: [A]", "environment must be names and values, such as OMP_NUM_THREADS: 1. Received: a list"),
        ("environment:\n  A: [1]", "line 2: environment A must be text or a number. Received: a list"),
        ("environment: {A=B: 1}", "Received the name: 'A=B'"),
        ("launcher-options: [--log-levle, X]", "launcher-options: --log-levle is an option neither of hvdtrain run"),
        ("launcher-options: [--log-level]", "launcher-options: --log-level needs a value"),
        ("launcher-options: [-np, 2]", "launcher-options: -np is hvdtrain run's own. Write the key np"),
        ("launcher-options: [eth0]", "launcher-options: eth0 is no option, nor the value of one"),
        ("- np", "c.yaml must hold keys and values, such as np: 2. Received: a list"),
        ("np: 2\n\tgrace: 1", "c.yaml, line 2 is not YAML: found character '\\t'"),
        ("np: 2\n---\nnp: 3", "c.yaml, line 2 is not YAML: but found another document"),
        ("script: !!python/name:os.system x", "script must be text, such as train.py. Received: x"),
        ("np: *other", "c.yaml, line 1 is not YAML: found undefined alias 'other'"),
    ],
)
def test_what_is_wrong_in_a_file_is_one_line_with_its_place(tmp_path, monkeypatch, text, said):
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text(text)
    with pytest.raises(UsageError) as info:
        config_file.read("c.yaml")
    assert said in str(info.value)
    assert "\n" not in str(info.value)


def test_a_file_that_cannot_be_read_is_said_so(tmp_path):
    (tmp_path / "c.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="is not text in UTF-8"):
        config_file.read(str(tmp_path / "c.yaml"))
    with pytest.raises(UsageError, match="cannot be read: Is a directory"):
        config_file.read(str(tmp_path))


def test_an_empty_file_says_nothing(tmp_path):
    (tmp_path / "c.yaml").write_text("# nothing yet\n")
    assert config_file.read(str(tmp_path / "c.yaml")) == Settings()


WORDS = st.text(string.ascii_letters + string.digits + " :#'\"-=.\\é[]{}!&*%@`|>~\t", max_size=12)


@given(
    settings=st.builds(
        Settings,
        ranks=st.integers(1, 999).map(str),
        options=st.sampled_from([[], ["-H", "a:1,b:2"], ["--gloo", "--log-level", "DEBUG"]]),
        environment=st.dictionaries(st.text(string.ascii_uppercase, min_size=1, max_size=3), WORDS, max_size=3),
        program=st.lists(WORDS.filter(lambda word: not word.startswith("-")), max_size=1).flatmap(
            lambda script: st.lists(WORDS, max_size=4).map(lambda words: [*script, *words] if script else [])
        ),
    )
)
def test_every_word_survives_being_kept(tmp_path_factory, settings):
    assume(redact.words(settings.program) == settings.program)
    assume(redact.variables(settings.environment) == settings.environment)
    path = settings.save(str(tmp_path_factory.mktemp("runs")), "x")
    assert config_file.read(str(path)) == settings


def test_the_scripts_own_config_is_the_scripts() -> None:
    assert (
        split(["-np", "2", "train.py", "--config", "gone.yaml"], launcher_in=config_file.read).program[1] == "--config"
    )
