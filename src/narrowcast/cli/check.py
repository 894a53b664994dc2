"""`narrowcast check TARGET --snapshot FILE`: formats held against a file, for a CI without pytest."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from narrowcast.cli.runs import JsonOption
from narrowcast.cli.target import AllOption, DeviceOption, Target, UnderOption, check_folder, grad, load_case
from narrowcast.output.console import print_text
from narrowcast.output.files import is_there, replace_text
from narrowcast.output.screen import columns, shortened


def check_command(
    target: Target,
    snapshot: Annotated[Path, typer.Option(help="The file: a line for each call, reviewed and committed.")],
    under: UnderOption = None,
    device: DeviceOption = None,
    gradients: Annotated[bool | None, typer.Option(help="If not as the file says; off where it is new.")] = None,
    torch_versions: Annotated[str, typer.Option(help="For which --update writes: '>=2.11,<2.16'.")] = "",
    new_casts: Annotated[bool, typer.Option("--new-casts", help="Only casts that were not there are changes.")] = False,
    update: Annotated[bool, typer.Option("--update", help="Write the file again.")] = False,
    every: AllOption = False,
    json_file: JsonOption = None,
) -> None:
    """Hold the formats of TARGET's calls against a file; 1 if a call is not as it was, 2 if that cannot be said."""
    from narrowcast.testing.formats import check_formats
    from narrowcast.testing.snapshot_changes import check_screen, check_text
    from narrowcast.testing.snapshot_text import load_snapshots

    check_folder("--json", json_file)
    if gradients is None:
        gradients = is_there(snapshot) and any(s.gradients for s in load_snapshots(snapshot).sections)
    with grad(gradients):
        found = check_formats(
            load_case(target), snapshot=snapshot, under=under, device=device, torch_versions=torch_versions,
            update=update,
        )  # fmt: skip
    if new_casts:
        found = found.new_casts()
    if json_file is not None and str(json_file) == "-":
        typer.echo(found.to_json(indent=1))
    else:
        if json_file is not None:
            replace_text(json_file, found.to_json(indent=1) + "\n")
        if update:
            print_text(shortened(f"wrote {snapshot}: {len(found.now.calls)} calls", columns()))
        else:
            print_text(check_text(found, None) if every else check_screen(found, columns()))
    if not found.is_same:
        raise typer.Exit(1)
