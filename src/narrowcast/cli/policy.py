"""`narrowcast policy ...`: show and check policies; the changes from one to another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import Annotated

import typer

from narrowcast.cli.options import AllOption
from narrowcast.core.policy import DEVICE_TYPES, Policy, as_policy
from narrowcast.errors import PolicyError
from narrowcast.output.console import print_text
from narrowcast.output.screen import Part, columns, first_screen, wrapped
from narrowcast.output.words import counted

policy_app = typer.Typer(help="Show and check policies.", no_args_is_help=True)
PolicyName = Annotated[
    str, typer.Argument(metavar="POLICY", help="native, safe, ipex, native:DEVICE, or a policy file.")
]
Device = Annotated[str | None, typer.Option(help="Resolve the built-in layers for this device type.")]


@policy_app.command(epilog="Example: narrowcast policy show native --device cuda")
def show(policy: PolicyName, device: Device = None, whole: AllOption = False) -> None:
    """Show the rules of a policy, in order of precedence."""
    resolved = _resolved(policy, device)
    settings = ", ".join(f"{key} {value}" for key, value in _settings(resolved).items())
    head = f"{resolved.name} ({resolved.digest[:8]}), {counted(len(resolved.rules), 'rule')}, {settings}"
    rules: list[list[str]] = []
    for layer in reversed(resolved.layers):
        for (reason, source), alike in groupby(layer, lambda rule: (rule.reason, rule.source)):
            lines = [f"{rule}" + (f"    {rule.origin}" if rule.origin else "") for rule in alike]
            rules.append(["", f"# {reason or 'no reason given'} ({source or 'no source given'})", *lines])
    actions = Counter(str(rule.action) for rule in resolved.rules)
    counts = "actions: " + ", ".join(f"{action} {number}" for action, number in actions.most_common())
    _print_rows([head, *([counts] if actions else [])], rules, whole)


@policy_app.command(epilog="Example: narrowcast policy check mine.toml")
def check(policy: PolicyName, whole: AllOption = False) -> None:
    """Load a policy and lint it.

    Exits with 1 if lint finds something, and with 2 if the policy does not load.
    """
    from narrowcast.runtime.torch_bridge import check_ops

    loaded = as_policy(policy)
    check_ops(loaded)
    findings = loaded.lint()
    counts = f"{counted(len(loaded.rules), 'rule')}, {counted(len(findings), 'finding')}"
    verdict = f"{loaded.name}: {counts}, digest {loaded.digest}"
    _print_rows([], [str(finding).split("\n") for finding in findings], whole, [verdict])
    if findings:
        raise typer.Exit(1)


def diff_policies(before: str, after: str, device: str | None, whole: bool) -> None:
    """Print what changes from one policy to another, rule by rule; exit with 1 if a rule or a setting does."""
    old, new = _resolved(before, device), _resolved(after, device)
    changes = old.diff(new)
    pairs = zip(_settings(old).items(), _settings(new).values(), strict=True)
    settings = "".join(f"; {key} {a} -> {b}" for (key, a), b in pairs if a != b)
    verdict = f"{old.name} -> {new.name}: {counted(len(changes), 'rule', 'differ')}{settings}"
    _print_rows([], [[str(change)] for change in changes], whole, [verdict])
    if changes or settings:
        raise typer.Exit(1)


def _print_rows(head: list[str], rows: list[list[str]], whole: bool, tail: Sequence[str] = ()) -> None:
    """Print head, rows and tail; or as many of the rows as the first screen has room for."""

    def everything() -> str:
        return "\n".join([*head, *(line for row in rows for line in row), *tail])

    width = columns()
    if whole:
        print_text(everything())
        return
    lines = [[line for text in part for line in wrapped(text, width=width)] for part in (head, list(tail))]
    middle = Part([line for row in rows for text in row for line in wrapped(text, "#   ", width) or [""]], rank=1)
    print_text(first_screen([Part(lines[0]), middle, Part(lines[1])], everything))


def _settings(policy: Policy) -> dict[str, str]:
    low, training = policy.effective_low or "the device's", ", ".join(policy.training) or "any"
    return {"weight cache": policy.effective_cache, "low format": low, "training in": training}


def _resolved(name: str, device: str | None) -> Policy:
    policy = as_policy(name)
    if device is None:
        return policy.resolve("cpu")
    if device not in DEVICE_TYPES:
        advice = f"Give one of: {', '.join(DEVICE_TYPES)}."
        raise PolicyError(f"device type {device!r}", "no autocast lists are known for it", advice=advice)
    return policy.resolve(device)
