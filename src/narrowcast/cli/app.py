"""The `narrowcast` command: its sub-commands, and what it does with errors."""

from __future__ import annotations

import sys
from typing import Annotated, Any, TypeGuard

import typer

from narrowcast import __version__
from narrowcast.cli.check import check_command
from narrowcast.cli.explain import explain_command
from narrowcast.cli.policy import policy_app
from narrowcast.cli.profile import profile_app
from narrowcast.cli.repair import repair_command
from narrowcast.cli.runs import (
    capture_command,
    compare_command,
    diff_command,
    headroom_command,
    show_command,
    watch_command,
)
from narrowcast.errors import NarrowcastError

app = typer.Typer(
    name="narrowcast",
    help="Mixed precision for PyTorch that you can see, steer and trust.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (
    explain_command, capture_command, compare_command, diff_command, repair_command, headroom_command, show_command,
    check_command,
):  # fmt: skip
    app.command(command.__name__.removesuffix("_command"))(command)
app.command("watch", context_settings={"ignore_unknown_options": True})(watch_command)
app.add_typer(policy_app, name="policy")
app.add_typer(profile_app, name="profile")


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
    traceback) or nothing to compare, 3 the model or Narrowcast raised.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        code = app(arguments, standalone_mode=False)
    except typer.Exit as stop:
        code = stop.exit_code
    except typer.Abort:
        code = 130
    except NarrowcastError as error:
        if "--traceback" in arguments:
            raise
        typer.echo(f"{type(error).__name__}: {error}", err=True)
        code = 2
    except Exception as error:
        if _is_usage_error(error):
            error.show()
            sys.exit(2)
        if "--traceback" in arguments:
            raise
        typer.echo(f"{type(error).__name__}: {error}", err=True)
        typer.echo("  narrowcast --traceback ... shows where this was raised.", err=True)
        code = 3
    sys.exit(code or 0)


def _is_usage_error(error: Exception) -> TypeGuard[Any]:
    """Whether the command line itself was wrong. typer brings its own copy of click in some versions, so by name."""
    return any(base.__name__ == "ClickException" for base in type(error).__mro__)
