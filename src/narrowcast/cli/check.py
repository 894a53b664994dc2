"""`narrowcast check TARGET --snapshot FILE`: compare formats with a file, for a CI without pytest."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from narrowcast.cli.options import AllOption, DeviceOption, JsonOption, ModelOptions, OutputOption, check_file
from narrowcast.cli.target import grad, load_case
from narrowcast.output.console import print_text
from narrowcast.output.files import is_there, save_result
from narrowcast.output.screen import columns, wrapped
from narrowcast.output.words import counted


def check_command(
    model: ModelOptions,
    snapshot: Annotated[
        Path, typer.Option(help="The file: a line for each call, reviewed and committed.", callback=check_file)
    ],
    device: DeviceOption = None,
    gradients: Annotated[
        bool | None, typer.Option(help="Whether the formats of gradients belong to it. Default: as in the file.")
    ] = None,
    torch_versions: Annotated[str, typer.Option(help="Versions for which --update writes: '>=2.11,<2.16'.")] = "",
    new_casts: Annotated[bool, typer.Option("--new-casts", help="Report only casts that are new.")] = False,
    update: Annotated[bool, typer.Option("--update", help="Write the file again.")] = False,
    output: OutputOption = None,
    json: JsonOption = False,
    whole: AllOption = False,
) -> None:
    """Compare the formats of TARGET's calls with a reviewed file.

    Exits with 1 if a call has changed, and with 2 if that cannot be decided.
    """
    from narrowcast.testing.formats import check_formats
    from narrowcast.testing.snapshot_changes import check_screen, check_text
    from narrowcast.testing.snapshot_text import load_snapshots

    if gradients is None:
        gradients = is_there(snapshot) and any(s.gradients for s in load_snapshots(snapshot).sections)
    case = load_case(model.target)
    with grad(gradients, case):
        check = check_formats(
            case, snapshot=snapshot, under=model.under, device=device,
            torch_versions=torch_versions, update=update,
        )  # fmt: skip
    if new_casts:
        check = check.new_casts()
    if output is not None:
        save_result(output, "a check", check.to_json(indent=1) + "\n")
    if json:
        typer.echo(check.to_json(indent=1))
    elif update:
        print_text("\n".join(wrapped(f"wrote {snapshot}: {counted(len(check.now.calls), 'call')}", width=columns())))
    else:
        print_text(check_text(check, None) if whole else check_screen(check, columns()))
    if not check.is_same:
        raise typer.Exit(1)
