"""What a command does with its result: print the first screen, all of it or its JSON; save it; write its page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer

import narrowcast as nc
from narrowcast.cli.options import ResultOptions
from narrowcast.errors import TargetError
from narrowcast.output.console import in_bytes, print_text
from narrowcast.output.files import replace_text
from narrowcast.output.screen import LINES, columns, wrapped


def show(result: nc.Result, options: ResultOptions, notices: Sequence[str] = (), room: int = LINES) -> None:
    """Do what the options say. notices: sentences that follow, on standard error where JSON is printed."""
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


def write_trace(result: nc.Result, trace: Path | None) -> None:
    """Write the trace of a result, if one is asked for. TargetError for a result without times."""
    if trace is None:
        return
    if not isinstance(result, nc.Run | nc.Explanation):
        found = f"a {type(result).__name__} has no calls with times"
        raise TargetError(f"--trace {trace}", found, advice="Give a captured run or an explanation.")
    replace_text(trace, result.to_trace() + "\n")
