"""The options that commands share: a dataclass for each group, whose fields are options of every command that takes it.

A file to write is checked when the command line is read, before anything runs for it. And what a command does with its
result: print the first screen, all of it or its JSON; save it; write its page.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

import narrowcast as nc
from narrowcast.errors import TargetError
from narrowcast.output.console import in_bytes, print_text
from narrowcast.output.files import replace_text
from narrowcast.output.screen import LINES, columns, wrapped


def check_file(option: typer.CallbackParam, path: Path | None) -> Path | None:
    """Return the path of a file to write. Raise TargetError if its folder does not exist, or if it is a folder."""
    if path is not None and path.is_dir():
        raise TargetError(f"{_flag(option)} {path}", "it is a folder", advice="Name a file in a folder that exists.")
    return check_folder(option, path)


def check_folder(option: typer.CallbackParam, path: Path | None) -> Path | None:
    """Return the path of a folder to write. Raise TargetError if the folder that it is to be in does not exist."""
    if path is not None and not path.absolute().parent.is_dir():
        advice = "Make the folder, or name another."
        raise TargetError(f"{_flag(option)} {path}", "its folder does not exist", advice=advice)
    return path


def _flag(option: typer.CallbackParam) -> str:
    return max(option.opts, key=len)


TargetArgument = Annotated[
    str, typer.Argument(metavar="TARGET", help="Python file or dotted path with case(), or PATH:function.")
]
UnderOption = Annotated[
    str | None,
    typer.Option(help="A low format (bf16), a built-in policy (native, safe, ipex), or a policy file (.toml)."),
]
BackwardOption = Annotated[bool, typer.Option("--backward", help="Also differentiate the output.")]
DeviceOption = Annotated[str | None, typer.Option(help="Device type whose op lists apply; it need not be present.")]
AllOption = Annotated[bool, typer.Option("--all", help="Show everything, not only the first screen.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
OutputOption = Annotated[
    Path | None, typer.Option("--output", "-o", help="Save the result there (.json, .json.gz).", callback=check_file)
]
HtmlOption = Annotated[Path | None, typer.Option("--html", help="Write its HTML page there.", callback=check_file)]
TraceOption = Annotated[
    Path | None, typer.Option("--trace", help="Write a trace for Perfetto there.", callback=check_file)
]
PolicyOption = Annotated[
    Path | None, typer.Option("--policy-out", help="Write the policy there (.toml).", callback=check_file)
]


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """The model to run, and in which region."""

    target: TargetArgument
    under: UnderOption = None


@dataclass(frozen=True, slots=True)
class ResultOptions:
    """What becomes of the result."""

    output: OutputOption = None
    html: HtmlOption = None
    json: JsonOption = False
    whole: AllOption = False


@contextmanager
def interruptible(keep: Callable[[], str] = lambda: "no result is saved") -> Iterator[None]:
    """End a command on Ctrl-C with the shell's exit code, and with what `keep` saves and returns."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(f"interrupted: {keep()}", err=True)
        raise typer.Exit(130) from None


def with_groups(command: Callable[..., Any]) -> Callable[..., Any]:
    """Return the command with a parameter for each field of the dataclasses that it takes, as typer reads commands."""
    hints = get_type_hints(command, include_extras=True)
    parameters: list[inspect.Parameter] = []
    groups: dict[str, type[Any]] = {}
    for name, parameter in inspect.signature(command).parameters.items():
        group = hints[name]
        if not is_dataclass(group) or not isinstance(group, type):
            parameters.append(parameter.replace(kind=parameter.KEYWORD_ONLY, annotation=group))
            continue
        groups[name] = group
        types = get_type_hints(group, include_extras=True)
        for field in fields(group):
            default = inspect.Parameter.empty if field.default is MISSING else field.default
            of_field = inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default)
            parameters.append(of_field.replace(annotation=types[field.name]))

    @functools.wraps(command)
    def run(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        with interruptible():
            command(**given)

    del run.__wrapped__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def show(
    result: nc.Result, options: ResultOptions, notices: Sequence[str] = (), room: int = LINES, trace: Path | None = None
) -> None:
    """Do what the options say. notices: sentences that follow, on standard error where JSON is printed. trace: a file
    to write one into, if it is asked for; TargetError for a result without times.
    """
    if trace is not None:
        if not isinstance(result, nc.Run | nc.Explanation):
            found = f"a {type(result).__name__} has no calls with times"
            raise TargetError(f"--trace {trace}", found, advice="Give a captured run or an explanation.")
        replace_text(trace, result.to_trace() + "\n")
    if options.output is not None:
        saved = result.save(options.output)
        size = in_bytes(saved.stat().st_size)
        notices = [*notices, f"saved in {saved} ({size}): narrowcast show prints it again"]
    write_page(result, options.html)
    width = columns()
    below = [line for notice in notices for line in wrapped(notice, width=width)]
    if options.json:
        typer.echo(result.to_json(indent=1))
        typer.echo("".join(f"{line}\n" for line in below), err=True, nl=False)
        return
    text = result.to_text(True, width) if options.whole else result.to_text(width=width, lines=room - len(below))
    print_text("\n".join([text.rstrip("\n"), *below]))


def write_page(result: nc.Result, html: Path | None) -> None:
    """Write the page of a result, if one is asked for."""
    if html is not None:
        replace_text(html, result.to_html())
