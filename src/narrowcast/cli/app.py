"""The `narrowcast` command: its sub-commands, and what it does with errors."""

from __future__ import annotations

import re
import sys
from typing import Annotated, Any, TypeGuard

import typer

from narrowcast import __version__
from narrowcast.cli import runs
from narrowcast.cli.check import check_command
from narrowcast.cli.explain import explain_command
from narrowcast.cli.options import with_groups
from narrowcast.cli.policy import policy_app
from narrowcast.cli.profile import profile_app
from narrowcast.cli.repair import repair_command
from narrowcast.errors import NarrowcastError

app = typer.Typer(
    name="narrowcast",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0; 1 findings, where a command's help says so; 2 wrong use, or nothing compared; 3 a crash; "
    "130 interrupted.",
)
_MODELS, _RUNS, _DEVICES = "Formats of a model", "Numbers of a run", "Policies and devices"
for panel, command, example in (
    (_MODELS, explain_command, "explain examples/minilm.py --under bf16 --run"),
    (_MODELS, repair_command, "repair model.py --under fp16 --budget 0.01 --policy-out fixed.toml"),
    (_MODELS, check_command, "check examples/minilm.py --snapshot examples/formats/minilm.txt"),
    (_RUNS, runs.capture_command, "capture model.py --under bf16 -o run.json.gz"),
    (_RUNS, runs.compare_command, "compare model.py --under bf16 --backward"),
    (_RUNS, runs.diff_command, "diff a.json.gz b.json.gz"),
    (_RUNS, runs.parity_command, "parity trainer.py engine.json.gz --max-nats 0.03"),
    (_RUNS, runs.headroom_command, "headroom model.py --policy-out fits.toml"),
    (_RUNS, runs.show_command, "show run.json.gz --html run.html"),
    (_RUNS, runs.watch_command, "watch --stop train.py --lr 0.1"),
):
    name, epilog = command.__name__.removesuffix("_command"), f"Example: narrowcast {example}"
    settings = {"allow_interspersed_args": False} if name == "watch" else None  # what follows is the script's
    app.command(name, rich_help_panel=panel, epilog=epilog, context_settings=settings)(with_groups(command))
app.add_typer(policy_app, name="policy", rich_help_panel=_DEVICES)
app.add_typer(profile_app, name="profile", rich_help_panel=_DEVICES)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"narrowcast {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show Python's traceback of an error.")] = False,
) -> None:
    """Mixed precision for PyTorch that you can see, steer and trust."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit: 0 nothing was found, 1 findings, 2 wrong use (stated in four parts, without a
    traceback) or nothing to compare, 3 the model or Narrowcast raised, 130 interrupted.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        code = app(arguments, standalone_mode=False)
    except typer.Exit as stop:
        code = stop.exit_code
    except NarrowcastError as error:
        if "--traceback" in arguments:
            raise
        typer.echo(f"{type(error).__name__}: {_with_flags(str(error))}", err=True)
        code = 2
    except Exception as error:
        if _is_usage_error(error):
            error.show()
            sys.exit(2)
        if "--traceback" in arguments:
            raise
        typer.echo("\n  ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())]), err=True)
        typer.echo("  narrowcast --traceback ... shows where this was raised.", err=True)
        code = 3
    sys.exit(code or 0)


def _is_usage_error(error: Exception) -> TypeGuard[Any]:
    """Return whether the command line itself was wrong: by class name, as typer may bring its own copy of click."""
    return any(base.__name__ == "ClickException" for base in type(error).__mro__)


def _with_flags(message: str) -> str:
    """Return the message of an error of the Python interface, with `name=value` and `name=` written as the option."""
    commands: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    options = [p.name for command in commands.values() for p in command.params if p.param_type_name == "option"]
    return re.sub(rf"\b({'|'.join(sorted(set(options)))})=('[^']*'|\"[^\"]*\"|-?[\w.]+)?", _as_flag, message)


def _as_flag(match: re.Match[str]) -> str:
    flag, value = f"--{match[1].replace('_', '-')}", (match[2] or "True").strip("'\"")
    return flag if value == "True" else f"no {flag}" if value == "False" else f"{flag} {value}"
