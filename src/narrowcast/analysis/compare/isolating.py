"""Which ops are tried low alone: those that may move the output most, found by trying groups of modules first.

An op's own error says little of what it does to the output, and a model has more ops than one likes to try. So where
they are too many, the modules that hold them are tried as groups, and then the ops of the groups that moved it most.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from narrowcast.core.policy import Kind, Policy, Rule
from narrowcast.core.policy.rules import Action, naming
from narrowcast.frontends.eager import autocast
from narrowcast.reports.results.differences import CallError
from narrowcast.runtime.torch_bridge import find_op, op_facts

Place = tuple[str, str]
"""A module's path and an op's id: what a rule can name."""


def low_alone(
    rows: list[CallError], budget: int, region: autocast, run: Callable[[autocast], float | None]
) -> list[Place]:
    """Note at the rows what their ops alone in the region's low format do to the output; what could not run so.

    budget: how often the model may run. run: the model in a region; the output's error, None where it cannot run.
    """
    places = _low_places(rows)
    ranked = sorted(places, key=lambda place: -max(rows[n].own for n in places[place]))
    left = budget
    if len(ranked) > budget:
        groups = _groups(ranked, budget // 2)
        if len(groups) > 1:
            left -= len(groups)
            moved = {path: run(_low_in(inside, region)) for path, inside in groups.items()}
            order = sorted(groups, key=lambda path: -(moved[path] or 0.0))
            ranked = [place for path in order for place in groups[path]]
    failed = []
    for place in ranked[:left]:
        error = run(_low_in([place], region))
        if error is None:
            failed.append(place)
            continue
        for n in places[place]:
            rows[n] = replace(rows[n], alone=error)
    return failed


def _low_in(places: list[Place], region: autocast) -> autocast:
    """A region in which these ops of these modules are low, and give what they gave in the reference's format."""
    rules = []
    for path, op in places:
        rules.append(Rule(op, Action(Kind.LOWER), module=naming(path)))
        rules.append(Rule(op, Action(Kind.FOLLOW), module=naming(path), argument="result"))
    return autocast(region.device, region.fast_dtype, policy=Policy("alone", (tuple(rules),), extends=()))


def _low_places(rows: list[CallError]) -> dict[Place, list[int]]:
    """The ops of modules that are low in the forward and have an error of their own, with the numbers of their rows."""
    found: dict[Place, list[int]] = {}
    for n, row in enumerate(rows):
        is_lowered = row.computes in ("bf16", "fp16") and row.is_low and not writes(row.id.op)
        if is_lowered and row.own and row.id.direction == "forward" and row.id.turn == 1:
            found.setdefault((row.id.module_path, row.id.op), []).append(n)
    return found


def writes(op: str) -> bool:
    """Whether an op gives what it writes to: no rule is about its result."""
    overload = find_op(op)
    return overload is None or any(slot.written for slot in op_facts(overload).slots)


def _groups(places: list[Place], most: int) -> dict[str, list[Place]]:
    """The places by the modules that hold them, as deep as gives at most this many groups."""
    depth = max(path.count(".") + 1 for path, _ in places)
    for parts in range(depth, 0, -1):
        grouped: dict[str, list[Place]] = {}
        for place in places:
            grouped.setdefault(".".join(place[0].split(".")[:parts]), []).append(place)
        if len(grouped) <= most:
            return grouped
    return {}
