"""Which ops are tried low alone: those that may change the output most, found by trying groups of modules first.

An op's local error says little about its effect on the output, and a model may have more ops than runs allow. Then the
modules that hold them are tried as groups first, and after them the ops of the groups that changed the output most.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from narrowcast.core.policy import Kind, Policy, Rule
from narrowcast.core.policy.rules import Action, modules_around, naming
from narrowcast.formats import fp32
from narrowcast.frontends.eager import autocast
from narrowcast.reports.results.differences import CallError
from narrowcast.runtime.regions.ruling import never_tell_hidden
from narrowcast.runtime.torch_bridge import find_op, op_facts

Place = tuple[str, str]
"""A module's path and an op's id: what a rule can name."""


def runs_alone(asked: int | None, calls: int = 0) -> int:
    """Return how often the model runs with single ops low: as asked, else 16 times, and fewer where calls are many."""
    return asked if asked is not None else max(_LEAST, min(_MOST, _MOST * _MANY // max(calls, 1)))


_LEAST, _MOST, _MANY = 4, 16, 1000
"""Of runs; and the number of calls from which on they are fewer."""


def low_alone(
    rows: list[CallError], budget: int, region: autocast, run: Callable[[autocast], float | None]
) -> list[Place]:
    """Note at the rows what their ops alone in the region's low format do to the output; return those that raise.

    budget: how often the model may run. run: runs the model in a region; returns the output's error, None if it raises.
    """
    places = _low_places(rows) if budget else {}
    ranked = sorted(places, key=lambda place: -max(rows[n].local for n in places[place]))
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
    """Return a region in which these ops of these modules are low, and their results have the reference's format."""
    rules = []
    for path, op in places:
        rules.append(Rule(op, Action(Kind.LOWER), module=naming(path)))
        rules.append(Rule(op, Action(Kind.FOLLOW), module=naming(path), argument="result"))
    alone = autocast(region.device, region.fast_dtype, policy=Policy("alone", (tuple(rules),), extends=()))
    never_tell_hidden(alone)
    return alone


def _low_places(rows: list[CallError]) -> dict[Place, list[int]]:
    """Return the ops of modules that are low in the forward and have a local error, with the numbers of their rows. One
    is left out of which a call in the module, or inside of it, is not low: a rule would lower that, too.
    """
    places: dict[Place, list[int]] = {}
    not_low = {row.id for row in rows if row.computes == fp32.name}
    high = {(path, one.op) for one in not_low for path in (one.module_path, *modules_around(one.module_path))}
    for n, row in enumerate(rows):
        is_lowered = row.computes in ("bf16", "fp16") and row.is_low and not writes(row.id.op)
        if is_lowered and row.local and row.id.direction == "forward" and row.id.module_call == 1:
            places.setdefault((row.id.module_path, row.id.op), []).append(n)
    return {place: numbers for place, numbers in places.items() if place not in high}


def writes(op: str) -> bool:
    """Return whether an op returns an argument that it writes to: no rule applies to its result."""
    overload = find_op(op)
    return overload is None or op_facts(overload).overwrites


def _groups(places: list[Place], most: int) -> dict[str, list[Place]]:
    """Group places by the modules that hold them, at the deepest level with at most this many groups."""
    depth = max(path.count(".") + 1 for path, _ in places)
    for parts in range(depth, 0, -1):
        grouped: dict[str, list[Place]] = {}
        for place in places:
            grouped.setdefault(".".join(place[0].split(".")[:parts]), []).append(place)
        if len(grouped) <= most:
            return grouped
    return {}
