"""`narrowcast policy ...`: show, check and compare policies."""

from __future__ import annotations

from typing import Annotated

import typer

from narrowcast.errors import PolicyError
from narrowcast.policy import DEVICE_TYPES, Policy, as_policy, lint_policy
from narrowcast.torch_bridge import check_ops

policy_app = typer.Typer(help="Show, check and compare policies.", no_args_is_help=True)
PolicyName = Annotated[str, typer.Argument(help="native, safe, ipex, native:DEVICE, or a policy file.")]
Device = Annotated[str | None, typer.Option(help="Resolve the built-in layers for this device type.")]


@policy_app.command()
def show(policy: PolicyName, device_type: Device = None) -> None:
    """The rules of a policy, in the order in which they win."""
    found = _resolved(policy, device_type)
    settings = ", ".join(f"{key} {value}" for key, value in _settings(found).items())
    typer.echo(f"{found.name} ({found.digest[:8]}), {len(found.rules)} rules, {settings}")
    for layer in reversed(found.layers):
        reason = None
        for rule in layer:
            if (rule.reason, rule.source) != reason:
                reason = (rule.reason, rule.source)
                typer.echo(f"\n# {rule.reason or 'no reason given'} ({rule.source or 'no source given'})")
            typer.echo(f"{rule}" + (f"    {rule.origin}" if rule.origin else ""))


@policy_app.command()
def check(policy: PolicyName) -> None:
    """Load a policy and lint it; exit code 2 if it does not load, 1 if lint finds something."""
    found = as_policy(policy)
    check_ops(found)
    findings = lint_policy(found)
    for finding in findings:
        typer.echo(str(finding))
    typer.echo(f"{found.name}: {len(found.rules)} rules, {len(findings)} findings, digest {found.digest}")
    if findings:
        raise typer.Exit(1)


@policy_app.command()
def diff(before: PolicyName, after: PolicyName, device_type: Device = None) -> None:
    """What changes from one policy to another, rule by rule."""
    old, new = _resolved(before, device_type), _resolved(after, device_type)
    changes = old.diff(new)
    for change in changes:
        typer.echo(str(change))
    pairs = zip(_settings(old).items(), _settings(new).values(), strict=True)
    settings = "".join(f"; {key} {a} -> {b}" for (key, a), b in pairs if a != b)
    typer.echo(f"{old.name} -> {new.name}: {len(changes)} rules differ{settings}")


def _settings(policy: Policy) -> dict[str, str]:
    """What a resolved policy says besides its rules."""
    low, training = policy.effective_low or "the device's", ", ".join(policy.training) or "any"
    return {"weight cache": policy.effective_cache, "low format": low, "training in": training}


def _resolved(name: str, device_type: str | None) -> Policy:
    found = as_policy(name)
    if device_type is None:
        return found.resolve("cpu")
    if device_type not in DEVICE_TYPES:
        raise PolicyError(f"device type {device_type!r}", "no autocast lists are known for it",
                          advice=f"Give one of: {', '.join(DEVICE_TYPES)}.")  # fmt: skip
    return found.resolve(device_type)
