"""The common part of all commands: kinds of values, options, and errors of one line."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from hvdtrain.errors import UsageError
from hvdtrain.system.settings import DEBUG, did_you_mean
from hvdtrain.system.user_paths import expanded

# Typer exports BadParameter alone, and newer versions carry a copy of click of their own: its base is theirs.
TyperUsageError: type[Exception] = typer.BadParameter.__mro__[1]


def option(text: str, *names: str, **form: Any) -> Any:
    """Return typer's option with its help; `form` is one of those below, or typer's own."""
    return typer.Option(*names, help=text, **form)


def completed(*names: str) -> dict[str, Any]:
    """Return the form of a value whose `names` the shell completes."""
    # Typer calls this with as many of (context, arguments so far, beginning) as it has parameters.
    return {
        "metavar": "|".join(names),
        "autocompletion": lambda incomplete: [name for name in names if name.startswith(incomplete)],
    }


def quantity(parse: Callable[[str], Any], metavar: str) -> dict[str, Any]:
    """Return the form of a value that `parse` reads; its ValueError is what the value must be."""

    def checked(value: Any) -> Any:
        try:
            return parse(str(value))  # a default comes through here too
        except ValueError as problem:
            raise typer.BadParameter(str(problem)) from None

    return {"parser": checked, "metavar": metavar}


def whole_number(least: int | None = None) -> dict[str, Any]:
    """Return the form of a whole number, of at least `least`."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:  # also for more digits than Python takes
            number = None
        if number is None or (least is not None and number < least):
            bound = "" if least is None else f", at least {least}"
            raise ValueError(f"must be a whole number{bound}. Received: {text}")
        return number

    return quantity(parse, "N")


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"must be a number. Received: {text}") from None


COUNT, NUMBER, SECONDS = whole_number(), quantity(_number, "X"), quantity(_number, "SECONDS")


def one_of(*names: str) -> dict[str, Any]:
    """Return the form of a value that is one of `names`."""

    def parse(text: str) -> str:
        if text not in names:
            choices = f"{', '.join(names[:-1])} or {names[-1]}"
            raise ValueError(f"must be {choices}. Received: {text}{did_you_mean(text, names)}")
        return text

    return {**quantity(parse, ""), **completed(*names)}


def _file(text: str) -> Path:
    path = expanded(text)
    if not path.is_file():
        raise ValueError(f"must be a file. There is none at {text}")
    if not os.access(path, os.R_OK):
        raise ValueError(f"must be a file that can be read. {text} cannot")
    return path


FILE = quantity(_file, "FILE")
NEW_FILE = quantity(expanded, "FILE")


def check_page(path: Path) -> None:
    """Raise a UsageError where no file can be written at `path`, before the work for it is done."""
    parent = path.absolute().parent
    if not parent.is_dir():
        raise UsageError(f"--out: there is no folder {path.parent}. Type: mkdir -p {path.parent}")
    if path.is_dir():
        raise UsageError(f"--out must be a file. {path} is a folder. Type: --out {path / 'report'}{path.suffix}")
    if not os.access(path if path.exists() else parent, os.W_OK):
        raise UsageError(f"{path} cannot be written: permission denied. Name a file elsewhere: --out FILE")


def _debug(asked: bool) -> None:
    if asked:
        os.environ[DEBUG] = "1"


# Commands take it as a parameter that they do not read: its callback sets a variable for this process and for ranks.
Debug = Annotated[bool, option("Show the traceback of whatever goes wrong.", "--debug", callback=_debug, is_eager=True)]


class Command(TyperCommand):
    """A command whose errors are one line."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the command line; a UsageError names what is wrong with it."""
        return _parse(super().parse_args, ctx, args)


class Group(TyperGroup):
    """The program itself, whose errors are one line too."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read what comes before the command; without anything the help is the answer."""
        if not args and not ctx.resilient_parsing:
            typer.echo(ctx.get_help(), err=True)
            raise typer.Exit(2)
        return _parse(super().parse_args, ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command, or name the nearest."""
        names = list(self.commands)
        if args and args[0] not in names and not ctx.resilient_parsing:
            raise UsageError(
                f"there is no command {args[0]}" + did_you_mean(args[0], names, f"There are {', '.join(names)}")
            )
        return super().resolve_command(ctx, args)


def _parse(parse: Callable[[Any, list[str]], list[str]], ctx: Any, args: list[str]) -> list[str]:
    typed = list(args)
    try:
        return parse(ctx, args)
    except TyperUsageError as error:
        raise in_our_words(error, ctx, typed) from error


def in_our_words(error: Exception, ctx: Any, typed: Sequence[str]) -> UsageError:
    """Return typer's error as one line, with what to type instead."""
    options = [name for each in ctx.command.get_params(ctx) for name in (*each.opts, *each.secondary_opts)]
    options = [name for name in options if name.startswith("-")]
    see_help = f"Type: {ctx.command_path} --help"
    parameter, option = getattr(error, "param", None), getattr(error, "option_name", None)
    message = str(getattr(error, "message", error))
    if parameter is not None:
        names = [name for name in parameter.opts if name.startswith("-")] or [parameter.name]
        name = next((each for each in names if any(w == each or w.startswith(f"{each}=") for w in typed)), names[-1])
        return UsageError(f"{name}{' ' if message.startswith('must ') else ': '}{message}")
    if option is not None and hasattr(error, "possibilities"):
        return UsageError(f"there is no option {option}" + did_you_mean(option, options, see_help))
    if option is not None and "requires" in message:
        return UsageError(f"{option} needs a value. {see_help}")
    if "unexpected extra argument" in message:
        extra = message.partition("(")[2].rpartition("(")[2].rstrip(").")
        first = f"--{(extra.split() or [extra])[0]}"
        return UsageError(f"it takes no argument. Received: {extra}" + did_you_mean(first, options, see_help))
    return UsageError(f"{message[:1].lower()}{message[1:].rstrip('.')}. {see_help}")
