"""The command line: `hvdtrain build`, `doctor`, `bench`, `plan`, `report` and `run`."""

from __future__ import annotations

import functools
import os
import re
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from hvdtrain.cli.plan import plan
from hvdtrain.cli.report import report
from hvdtrain.cli.shared import (
    COUNT,
    FILE,
    NEW_FILE,
    SECONDS,
    Command,
    Debug,
    Group,
    TyperUsageError,
    check_page,
    completed,
    one_of,
    option,
    quantity,
    whole_number,
)
from hvdtrain.errors import HvdTrainError, UsageError
from hvdtrain.system import redact
from hvdtrain.system.settings import DEBUG, RUN_NAME
from hvdtrain.system.user_paths import expanded

_FAILED, _USAGE, _INTERRUPTED = 1, 2, 130

# The only list of exit statuses in the help. \b preserves the lines.
_EXIT_STATUSES = """\b
Exit status:
  0      success
  1      failure; one line says why (doctor: training would not work here)
  2      the command line or the config is wrong; one line says what to type
  75     run: orderly stop on request; the same command resumes from the checkpoint
  76     run: a rank waited too long for other ranks
  130    Ctrl-C
  other  run: the status of the rank that failed first; 128 + n for signal n
"""

app = typer.Typer(cls=Group, pretty_exceptions_enable=False, rich_markup_mode=None)


def _version(asked: bool) -> None:
    if asked:
        from hvdtrain import __version__

        print(f"hvdtrain {__version__}")
        raise typer.Exit


@app.callback(epilog=_EXIT_STATUSES)
def hvdtrain(
    version: Annotated[
        bool, option("Say which version this is.", "--version", callback=_version, is_eager=True)
    ] = False,
    debug: Debug = False,
) -> None:
    """Distributed training with Horovod for PyTorch and Keras 3.

    Example: hvdtrain run -np 4 train.py

    `hvdtrain COMMAND --help` says what a command takes.
    """


def _folder(text: str) -> Path:
    path = expanded(text)
    there = next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())
    if not there.is_dir():
        raise ValueError(f"must be a folder. {there} is a file")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"must be a folder that can be written. {there} cannot")
    return path


def _architectures(text: str) -> str:
    if not re.fullmatch(r"\d+\.?\d(,\d+\.?\d)*", text):
        raise ValueError(f"must be architectures such as 80,90. Received: {text}")
    return text


_PARTS, _FRAMEWORK = one_of("torch", "tensorflow", "mpi", "nccl"), one_of("torch", "keras")
_ARCHITECTURES = quantity(_architectures, "LIST")


@app.command(cls=Command)
def build(
    without: Annotated[list[str] | None, option("Build without this part; may be repeated.", **_PARTS)] = None,
    rebuild: Annotated[bool, option("Compile even if the cache has the wheel.", "--rebuild")] = False,
    dry_run: Annotated[bool, option("Say what would be built, and stop.", "--dry-run")] = False,
    force: Annotated[
        bool,
        option("Accept framework versions older than tested ones, and untested ones whose proof failed.", "--force"),
    ] = False,
    out: Annotated[
        list[Path] | None,
        option("Put a copy of the wheel there, for other hosts.", "--out", "--wheel-dir", **quantity(_folder, "DIR")),
    ] = None,
    sdist: Annotated[Path | None, option("Horovod's sdist as a file, for machines without a network.", **FILE)] = None,
    through_host: Annotated[
        bool, option("Let GPU tensors travel through host memory: NCCL refuses two ranks on one GPU.", "--through-host")
    ] = False,
    cuda_arch: Annotated[
        str | None, option('GPU architectures, e.g. "80,90"; default: the GPUs that are here.', **_ARCHITECTURES)
    ] = None,
    jobs: Annotated[int | None, option("Compiler processes at once; default: one per core.", **whole_number(1))] = None,
    install: Annotated[bool, option("Install the wheel into this environment and prove it.")] = True,
    debug: Debug = False,
) -> None:
    """Build Horovod for the frameworks installed here, and prove it.

    The wheel is installed and proven by an allreduce and a training step of two processes, for each framework and
    data plane. A version that no test has seen stays installed only if that succeeds. With two GPUs or more, torch
    trains on each of them too, as hvdtrain doctor --gpu does.

    Example: hvdtrain build --without mpi

    Example: hvdtrain build --out /shared/wheels
    """
    from hvdtrain.horovod_build.build import BuildOptions
    from hvdtrain.horovod_build.build import build as run_build

    if len(folders := {*(out or ())}) > 1:
        raise UsageError(f"the wheel goes into one folder. Received: {', '.join(map(str, out or ()))}. Give --out once")
    # The variable is for setups that run this command for the user, so that the user cannot add --without.
    left_out = {*(without or ()), *(["mpi"] if os.environ.get("HVDTRAIN_MPI") == "0" else [])}
    chosen = BuildOptions(
        without=frozenset(left_out), rebuild=rebuild, dry_run=dry_run, force=force, out=next(iter(folders), None),
        sdist=sdist, through_host=through_host, cuda_arch=cuda_arch, jobs=jobs, install=install,
    )  # fmt: skip
    run_build(chosen)


@app.command(cls=Command)
def doctor(
    json: Annotated[bool, option("Print one JSON object.", "--json")] = False,
    report: Annotated[
        bool, option("Print Markdown to paste into an issue: no addresses, names or secrets.", "--report")
    ] = False,
    out: Annotated[Path | None, option("Write the report there instead of printing it.", **NEW_FILE)] = None,
    no_allreduce: Annotated[
        bool, option("Start no processes: only check that what is installed fits.", "--no-allreduce")
    ] = False,
    gpu: Annotated[
        bool, option("Train on this host's GPUs too, and keep the proof, for init: one rank a GPU.", "--gpu")
    ] = False,
    debug: Debug = False,
) -> None:
    """Say what is installed and whether training would work.

    The exit status is 1 where it would not; what to type next is said last. Where the proof of --gpu holds, PyTorch's
    steps run ahead of the GPU (HVDTRAIN_GPU_ASYNC).

    Example: hvdtrain doctor --report --out report.md
    """
    if json and report:
        raise UsageError("--json and --report are two forms of one answer. Give one of them")
    if gpu and no_allreduce:
        raise UsageError("--gpu starts processes. Leave out --no-allreduce")
    if report and no_allreduce:
        raise UsageError("--report holds the live allreduces. Leave out --no-allreduce")
    if out is not None and not report:
        raise UsageError(f"--out is for --report. Type: hvdtrain doctor --report --out {out}")
    if out is not None:
        check_page(out)
    from hvdtrain.tools.doctor import run as run_doctor

    raise typer.Exit(run_doctor(as_json=json, report=report, out=out, allreduce=not no_allreduce, gpu=gpu))


@app.command(cls=Command)
def bench(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="-- ARGS", help="The script's own arguments, after --.")
    ] = None,
    ranks: Annotated[int, option("Number of ranks.", "-np", "--ranks", **COUNT)] = 2,
    hosts: Annotated[
        str | None, option("host1:slots,host2:slots; default: here.", "-H", "--hosts", metavar="LIST")
    ] = None,
    script: Annotated[Path | None, option("Time the steps of this script of yours instead.", **FILE)] = None,
    steps: Annotated[
        int | None, option("Measured steps; default 30, with a script 100. 0: until the script ends.", **COUNT)
    ] = None,
    framework: Annotated[
        str | None, option("Default: torch, or keras on KERAS_BACKEND where there is no torch.", **_FRAMEWORK)
    ] = None,
    max_bytes: Annotated[int | None, option("The largest message; default 64 MiB.", **COUNT)] = None,
    link: Annotated[
        str | None, option("Speed between hosts, such as 25Gb/s: the floor of a flat ring over it.", metavar="RATE")
    ] = None,
    quick: Annotated[bool, option("Up to 1 MiB, a small model and few steps.", "--quick")] = False,
    timeout: Annotated[float, option("Seconds after which everything is ended.", **SECONDS)] = 300,
    json: Annotated[bool, option("Print one JSON object; hvdtrain plan reads it.", "--json")] = False,
    debug: Debug = False,
) -> None:
    """Measure allreduce and the parts of a step, and say what to do.

    The ranks are started here; allreduce is measured by size, the step is a standard model's or your script's.

    Example: hvdtrain bench -np 2 --script train.py --steps 50 -- --epochs 1
    """
    from hvdtrain.tools.bench.run import BenchOptions
    from hvdtrain.tools.bench.run import run as run_bench

    chosen = BenchOptions(
        ranks=ranks, hosts=hosts, framework=framework, max_bytes=max_bytes, link=link, quick=quick, steps=steps,
        timeout_s=timeout, script=script, arguments=arguments or (), as_json=json,
    )  # fmt: skip
    run_bench(chosen)


app.command(cls=Command)(plan)
app.command(cls=Command)(report)


class RunCommand(Command):
    """Reads its own options and passes every other one to the launcher, as it was written."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Split the command line, and read our own options."""
        from hvdtrain.launch import arguments, config_file

        read = functools.lru_cache(config_file.read)  # once: it may be a pipe
        try:
            parts = arguments.split(args, launcher_in=lambda file: read(file).launcher)
        except UsageError:
            if not ctx.resilient_parsing:
                raise
            parts = arguments.Split()  # for a shell's completion of an incomplete command line
        ctx.obj = parts, read
        return super().parse_args(ctx, parts.ours)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the parts of the usage line."""
        return ["-np N", "[OPTIONS]", "[ANY OPTION OF horovodrun]", "[python] train.py [ARGS]..."]


@app.command(cls=RunCommand)
def run(
    ctx: typer.Context,
    ranks: Annotated[str | None, option("Number of ranks.", "-np", "--num-proc", metavar="N")] = None,
    max_restarts: Annotated[
        str | None, option("Restart a failed job at most K times; 0 for never.  [default: 3]", metavar="K")
    ] = None,
    grace: Annotated[
        str | None,
        option(
            "Time for ranks to write a checkpoint after SIGTERM, SIGINT or SIGUSR1.  [default: 30]", metavar="SECONDS"
        ),
    ] = None,
    launcher: Annotated[
        str | None, option("What starts the ranks.  [default: horovodrun]", **completed("horovodrun", "mpirun"))
    ] = None,
    config: Annotated[
        str | None, option("Read options from this YAML file; the command line wins.", metavar="FILE")
    ] = None,
    debug: Debug = False,
) -> None:
    """Run a script on several ranks, and restart it when a process dies.

    The remaining processes of a failed job are ended before the restart. A script with a checkpoint resumes from it.
    `hvdtrain --help` lists the exit statuses.

    Keys of the file: np, hosts, max-restarts, grace, launcher, launcher-options, environment, script, arguments.
    The command line wins; further arguments of the script follow --.

    Example: hvdtrain run -np 4 train.py --epochs 90

    Example: hvdtrain run --config train.yaml -np 2 -- --epochs 1
    """
    from hvdtrain.launch import job_folder, supervisor
    from hvdtrain.launch.config_file import DEFAULTS, Settings
    from hvdtrain.launch.prepare import prepare

    parts, read = ctx.obj
    typed = Settings(ranks, max_restarts, grace, launcher, parts.passed, program=parts.program)
    settings = (typed if config is None else typed.over(read(config))).over(DEFAULTS)
    os.environ.update(settings.environment)  # as if it had been set before the command
    with job_folder.removed_at_the_end():
        launch, run_dir = prepare(settings)
        try:
            # The folder that `hvdtrain.callbacks.RunFolder` takes.
            path = settings.save(launch.environment.get("HVDTRAIN_RUNS", "runs"), launch.environment[RUN_NAME])
            where = f" (saved in {path})" if path else ""
        except OSError as problem:
            where = f" (not saved: {problem})"
        supervisor.say(f"{settings}{where}")
        raise typer.Exit(supervisor.run(launch, run_dir))


def main() -> NoReturn:
    """Entry point. Each error becomes one line and an exit status; HVDTRAIN_DEBUG=1 adds a traceback."""
    try:
        status = app(prog_name="hvdtrain", standalone_mode=False)
    except UsageError as error:
        _end(error, _USAGE)
    except TyperUsageError:  # of the program itself; a command's own are UsageErrors
        _end(UsageError("say which command. Type: hvdtrain --help"), _USAGE)
    except (HvdTrainError, OSError) as error:
        # Of an OSError the system's own words, e.g. "[Errno 28] No space left on device: '/tmp/x'".
        _end(error, _FAILED)
    except (typer.Abort, KeyboardInterrupt):
        sys.exit(_INTERRUPTED)
    except Exception as error:  # noqa: BLE001  a traceback only on request
        _end(error, _FAILED, bug=True)
    sys.exit(status if isinstance(status, int) else 0)


def _end(error: Exception, status: int, *, bug: bool = False) -> NoReturn:
    """Say what is wrong in one line, and end."""
    if os.environ.get(DEBUG) == "1" and error.__traceback__ is not None:
        traceback.print_exception(error)
    # What was typed may hold more than one line.
    text = " ".join(str(error).splitlines()) if status == _USAGE else str(error)
    if bug:
        text = (
            f"{type(error).__name__}: {text}. This is a bug of hvdtrain. {DEBUG}=1 before the command shows where; "
            "please report that with what `hvdtrain doctor --report` prints"
        )
    named = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
    is_known = named in [each.callback.__name__ for each in app.registered_commands if each.callback]
    typer.echo(f"hvdtrain{f' {named}' * is_known}: {redact.text(text)}", err=True)
    sys.exit(status)
