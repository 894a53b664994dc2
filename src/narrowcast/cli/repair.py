"""`narrowcast repair TARGET`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

import narrowcast as nc
from narrowcast.cli.runs import BackwardOption, HtmlOption, JsonOption, show
from narrowcast.cli.target import AllOption, Target, UnderOption, check_folder, grad, load_case
from narrowcast.core.policy import Policy
from narrowcast.errors import Origin, TargetError


def repair_command(
    target: Target,
    under: UnderOption = None,
    backward: BackwardOption = False,
    budget: Annotated[str | None, typer.Option(help="Allowed output error: 0.01, or least SQNR: '40 dB'.")] = None,
    tolerance: Annotated[float | None, typer.Option(help="How much worse what evaluate gives may be.")] = None,
    lower: Annotated[bool, typer.Option("--lower-is-better", help="Of what evaluate gives.")] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the policy there (.toml).")] = None,
    force: Annotated[bool, typer.Option("--force", help="Also over a file that holds the policy.")] = False,
    every_row: AllOption = False,
    json_file: JsonOption = None,
    html: HtmlOption = None,
) -> None:
    """Find the fewest rules under which TARGET's model runs, is finite and precise; 1 if there are none."""
    check_folder("--json", json_file)
    check_folder("--html", html)
    check_folder("--output", output)
    if output is not None and not force:
        from narrowcast.frontends.eager.asked import asked_region

        _check_output(output, asked_region("repair", under).policy)
    with grad(backward):
        found = nc.repair(
            load_case(target), under=under, backward=backward, budget=budget,
            better="lower" if lower else "higher", tolerance=tolerance,
        )  # fmt: skip
    notices = [_write(found, output)] if output is not None else []
    show(found, every_row, json_file, html, notices=notices)
    if not found.is_clean:
        raise typer.Exit(1)


def _check_output(output: Path, policy: Policy) -> None:
    """TargetError for a file that rules of the policy come from: they are the user's own."""
    files = {rule.origin.file for rule in (*policy.rules, *policy.allowances) if rule.origin is not None}
    if output.exists() and any(Path(file).exists() and output.samefile(file) for file in files):
        raise TargetError(
            f"--output {output}", "it holds the policy that is to be repaired", (Origin(str(output)),),
            "Name another file, or write --force, too.",
        )  # fmt: skip


def _write(found: Any, output: Path) -> str:
    """Write the policy, if it repairs; what was done."""
    if not found.is_clean:
        return f"{output} is not written: nothing was repaired"
    if not found.rules:
        return f"{output} is not written: the policy is right as it is"
    replace(found.policy, name=output.stem).save(output)
    return f"wrote {output}: {found.base} and {len(found.rules)} more; nc.autocast(..., policy={str(output)!r})"
