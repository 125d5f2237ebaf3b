from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path

import pytest

from hvdtrain.cli import program
from hvdtrain.errors import UsageError
from hvdtrain.launch import arguments
from hvdtrain.launch.arguments import HOROVODRUN_OPTIONS


def test_ours_the_launchers_and_the_program_are_told_apart() -> None:
    line = (
        "-p 2222 -np 2 --max-restarts=1 --gloo -H a:1,b:1 --blacklist-cooldown-range 1 2 python train.py -np 8 --gloo"
    )
    parts = arguments.split(line.split())
    assert parts.ours == ["-np", "2", "--max-restarts=1"]
    assert parts.passed == ["-p", "2222", "--gloo", "-H", "a:1,b:1", "--blacklist-cooldown-range", "1", "2"]
    assert parts.program == ["python", "train.py", "-np", "8", "--gloo"]


def test_the_beginning_of_a_horovodrun_option_takes_its_value() -> None:
    assert arguments.split(["--timeline-file", "t.json", "train.py"]).passed == ["--timeline-file", "t.json"]


def test_mpiruns_options_take_their_values_with_one_dash_or_two() -> None:
    line = "--launcher mpirun -np 2 -x A=1 --mca btl self,vader -mca pml ob1 --oversubscribe train.py --mca"
    parts = arguments.split(line.split())
    assert parts.passed == ["-x", "A=1", "--mca", "btl", "self,vader", "-mca", "pml", "ob1", "--oversubscribe"]
    assert parts.program == ["train.py", "--mca"]


def test_a_launcher_among_the_scripts_own_arguments_is_not_ours() -> None:
    line = "-np 2 --network-interfaces eth0 train.py --launcher mpirun --config model.yaml"
    parts = arguments.split(line.split())
    assert parts.passed == ["--network-interfaces", "eth0"]
    assert parts.program == ["train.py", "--launcher", "mpirun", "--config", "model.yaml"]


def test_two_dashes_end_the_options() -> None:
    assert arguments.split(["-np", "2", "--", "./prog", "-x"]).program == ["./prog", "-x"]


def horovodruns_own_options() -> dict[str, int]:
    """Return option -> number of values, as the installed horovodrun's source defines them."""
    found = importlib.util.find_spec("horovod")
    assert found is not None
    assert found.origin is not None
    tree = ast.parse(Path(found.origin).parent.joinpath("runner", "launch.py").read_text())
    options = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            names = [a.value for a in node.args if isinstance(a, ast.Constant) and str(a.value).startswith("-")]
            given = {k.arg: ast.unparse(k.value).strip("'") for k in node.keywords}
            action = given.get("action", "")
            flag = any(word in action for word in ("true", "false", "bool", "version", "check_build"))
            options |= {name: 0 if flag else int(given.get("nargs", "1")) for name in names}
    return options


def test_the_table_of_horovodruns_options_is_horovodruns() -> None:
    own = horovodruns_own_options()
    assert len(own) > 60
    assert {name: n for name, n in own.items() if name not in ("-np", "--num-proc")} == HOROVODRUN_OPTIONS


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["-np"], "-np needs a value"),
        (["--max-restrats", "3", "x.py"], "Did you mean --max-restarts?"),
        (["--blacklist-cooldown-range", "1"], "needs 2 values"),
    ],
)
def test_a_wrong_option_is_named(words: list[str], error: str) -> None:
    with pytest.raises(UsageError, match=error.replace("?", r"\?")):
        arguments.split(words)


def test_a_script_runs_in_this_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    assert arguments.program(["train.py", "--epochs", "1"]) == [sys.executable, "train.py", "--epochs", "1"]
    line = ["python", "-X", "dev", "-u", "train.py", "other.py"]
    assert arguments.program(line) == line
    assert arguments.program(["python", "-m", "nowhere"]) == ["python", "-m", "nowhere"]
    for words in (["gone.py"], ["python", "-u", "gone.py"]):
        with pytest.raises(UsageError, match=r"there is no script gone\.py"):
            arguments.program(words)
    Path("notes").touch()
    with pytest.raises(UsageError, match="may not be executed"):
        arguments.program(["./notes"])
    with pytest.raises(UsageError, match="say what to run"):
        arguments.program([])


def test_slots_come_from_the_list_or_the_file(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# mine\nalpha slots=3\nbeta\n\n")
    assert arguments.hosts(["--hostfile", str(file)]) == {"alpha": 3, "beta": 1}
    assert arguments.hosts(["-H", "alpha:2,beta:1"]) == {"alpha": 2, "beta": 1}
    assert arguments.hosts(["--hosts=alpha"]) == {"alpha": 1}
    assert arguments.hosts([]) == {}
    for bad in ("alpha:0", "alpha:two", ":2", ""):
        with pytest.raises(UsageError, match="must be like"):
            arguments.hosts(["-H", bad])
    with pytest.raises(UsageError, match="cannot be read"):
        arguments.hosts(["--hostfile", str(tmp_path / "gone")])


def test_more_ranks_than_room_are_refused() -> None:
    with pytest.raises(UsageError, match="more than the 3 slots"):
        arguments.check_ranks(4, slots={"a": 1, "b": 2}, elastic=False, cores=8)
    with pytest.raises(UsageError, match="-np 4 is more than the 3 tasks of this job on a:1,b:2"):
        arguments.check_ranks(4, slots={"a": 1, "b": 2}, room="tasks of this job on {}", elastic=False, cores=8)
    with pytest.raises(UsageError, match="insist with -H localhost:9"):
        arguments.check_ranks(9, slots={}, elastic=False, cores=2)
    assert arguments.check_ranks(9, slots={"localhost": 9}, elastic=False, cores=2) == ""
    assert arguments.check_ranks(3, slots={}, elastic=False, cores=2) == "3 ranks share 2 cores"
    assert arguments.check_ranks(2, slots={}, elastic=False, cores=2) == ""


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("-np two train.py", "-np must be a whole number, at least 1. Received: -np two"),
        ("-np 0 train.py", "Received: -np 0"),
        ("train.py", "say how many ranks"),
        ("-np 2", "say what to run"),
        ("-np 2 gone.py", "there is no script gone.py"),
        ("-np 2 --max-restarts -1 train.py", "--max-restarts must be a whole number, at least 0"),
        ("-np 2 --grace nan train.py", "--grace must be a number of seconds"),
        ("-np 2 --launcher srun train.py", "--launcher must be horovodrun or mpirun"),
        ("-np 3 -H localhost:2 train.py", "more than the 2 slots"),
        ("-np 2 --host-discovery-script false train.py", "--host-discovery-script false failed with status 1"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_status_2(
    line: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    monkeypatch.setattr(sys, "argv", ["hvdtrain", "run", *line.split()])
    with pytest.raises(SystemExit) as info:
        program.main()
    assert info.value.code == 2
    said = capsys.readouterr().err
    assert error in said
    assert said.startswith("hvdtrain run: ")
    assert said.count("\n") == 1


def test_without_horovod_it_says_how_to_build_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "horovod" else found(name, *a))
    monkeypatch.setattr(sys, "argv", ["hvdtrain", "run", "-np", "2", "train.py"])
    with pytest.raises(SystemExit) as info:
        program.main()
    assert info.value.code == 2
    assert "Run `hvdtrain build`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "placed"),
    [
        ("", False),
        ("-H a:1 --mca btl self", False),
        ("--bind-to core", True),
        ("-map-by slot:PE=2", True),
        ("--mca hwloc_base_binding_policy core", True),
    ],
)
def test_mpiruns_options_that_place_ranks_are_known(options: str, placed: bool) -> None:
    assert arguments.places_ranks(options.split()) == placed
