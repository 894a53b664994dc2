"""`narrowcast repair TARGET`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

import narrowcast as nc
from narrowcast.cli.options import BackwardOption, ModelOptions, PolicyOption, ResultOptions, show
from narrowcast.cli.target import grad, load_case
from narrowcast.errors import Origin, TargetError
from narrowcast.output.words import counted
from narrowcast.reports.results.repair import Repair


def repair_command(
    model: ModelOptions,
    result: ResultOptions,
    backward: BackwardOption = False,
    budget: Annotated[str | None, typer.Option(help="Largest output error: 0.01; or least SQNR: '40 dB'.")] = None,
    tolerance: Annotated[float | None, typer.Option(help="How much worse than in fp32 evaluate() may be.")] = None,
    lower: Annotated[bool, typer.Option("--lower-is-better", help="A lower value of evaluate() is better.")] = False,
    policy_out: PolicyOption = None,
    force: Annotated[
        bool, typer.Option("--force", help="Let --policy-out replace the policy that is repaired.")
    ] = False,
) -> None:
    """Find the fewest rules under which TARGET's model runs, is finite, and precise enough.

    Exits with 1 if there are none.
    """
    if policy_out is not None and not force:
        from narrowcast.frontends.eager.asked import asked_region

        policy = asked_region("repair", model.under).policy
        files = {rule.origin.file for rule in (*policy.rules, *policy.allowances) if rule.origin is not None}
        if policy_out.exists() and any(Path(file).exists() and policy_out.samefile(file) for file in files):
            found, where = "it holds the policy that is to be repaired", (Origin(str(policy_out)),)
            raise TargetError(f"--policy-out {policy_out}", found, where, "Name another file, or add --force.")
    case = load_case(model.target)
    with grad(backward, case):
        repair = nc.repair(
            case, under=model.under, backward=backward, budget=budget,
            better="lower" if lower else "higher", tolerance=tolerance,
        )  # fmt: skip
    show(repair, result, notices=[_write_policy(repair, policy_out)] if policy_out is not None else [])
    if not repair.is_clean:
        raise typer.Exit(1)


def _write_policy(repair: Repair, output: Path) -> str:
    if not repair.is_clean:
        return f"{output} is not written: nothing was repaired"
    if not repair.rules:
        return f"{output} is not written: no rule is needed"
    from narrowcast.runtime.torch_bridge import FORMATS, default_dtype

    is_default = str(FORMATS[default_dtype(repair.policy, repair.device_type)]) == repair.low
    low = repair.policy.low if is_default else repair.low  # of regions that name none, as those of --under FILE
    replace(repair.policy, name=output.stem, low=low).save(output)
    rules = counted(len(repair.rules), "rule") + ("" if is_default else f", in {low}")
    return f"wrote {output}: {repair.base} and {rules}; nc.autocast(..., policy={str(output)!r})"
