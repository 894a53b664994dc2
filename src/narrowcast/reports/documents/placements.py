"""What a goal chose, on the page of an explanation: formats, candidates, and what they cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from narrowcast.reports.documents.model import Bar, Figure, Node, Table
from narrowcast.reports.documents.tables import table
from narrowcast.reports.documents.words import counted, in_unit, place

Data = Mapping[str, Any]


def placement_verdict(placed: Sequence[Data]) -> str:
    """`Goal fast: 50 of 53 calls run higher than the policy asks; predicted 2.7 s, against ...`; empty without one."""
    if not placed:
        return ""
    calls = [call for each in placed for call in each["calls"]]
    raised = sum(call["chosen"] != call["policy"] for call in calls)
    said = f"Goal {placed[0]['goal']}: {raised} of {counted(len(calls), 'call')} run higher than the policy asks"
    chosen, policy = (in_unit(cost, placed[0]["unit"]) for cost in _costs(placed))
    return f"{said}; predicted {chosen}, against {policy} as the policy says"


def _costs(placed: Sequence[Data]) -> tuple[float, float]:
    """Of the placement and of the policy's own, over all graphs, casts included."""
    chosen, policy = (sum(float(each[name]) for each in placed) for name in ("cost", "policy_cost"))
    return chosen, policy


def placement_figures(placed: Sequence[Data]) -> list[Figure]:
    """The predicted costs; and what was measured of the candidates that are kept."""
    if not placed:
        return []
    (chosen, policy), unit = _costs(placed), placed[0]["unit"]
    found = [Figure("predicted", chosen, f"as the policy says: {in_unit(policy, unit)}", unit=unit)]
    kept = [c for each in placed for c in each["candidates"] if c["name"] == each["chosen"] and c["measured_ns"]]
    if kept and len(kept) == len(placed):
        names = ", ".join(dict.fromkeys(c["name"] for c in kept))
        found.append(Figure("measured", sum(c["measured_ns"] for c in kept), f"kept: {names}", unit="ns"))
    return found


def placement_bars(placed: Sequence[Data]) -> list[Bar]:
    """The time of the calls that could choose, by the format that the policy gives them; casts left out."""
    if not placed or placed[0]["unit"] != "ns":
        return []
    sums: dict[str, float] = {}
    for call in [call for each in placed for call in each["calls"]]:
        name = call["policy"]
        sums[name] = sums.get(name, 0.0) + float(call["costs_ns"][name])
    return [Bar("Time, as the policy says", "ns", tuple(sorted(sums.items(), key=lambda part: -part[1])))]


def placement_tables(placed: Sequence[Data]) -> list[Table]:
    """Each call that could choose, and each way that was considered."""
    calls = [
        [c["module"], c["op"], c["policy"], c["chosen"], c["saved_ns"], place(c["file"], c["line"])]
        for each in placed
        for c in each["calls"]
    ]
    columns = "module:module, op:op, policy says:format, chosen:format, saved:ns, line:line"
    ways = [
        [each["graph"], c["name"], c["name"] == each["chosen"], c["casts"], c["predicted_ns"],
         c["measured_ns"] or None, c["spread"] if c["measured_ns"] else None, c["dropped"]]
        for each in placed
        for c in each["candidates"]
    ]  # fmt: skip
    said = "graph:number, candidate, kept, casts:number, predicted:ns, measured:ns, spread:share, dropped"
    return [
        *table("placement", "Formats chosen by cost", columns, calls),
        *table("candidates", "Each way that was considered", said, ways),
    ]


def add_costs(nodes: Sequence[Node], placed: Data) -> None:
    """What each placed call costs in the format that was chosen."""
    costs: dict[tuple[str, str, int], list[float]] = {}
    for call in placed["calls"]:
        cost = call["costs_ns"].get(call["chosen"])
        if cost is not None:
            costs.setdefault((call["module"], call["op"], call["line"]), []).append(cost)
    for node in nodes:
        known = costs.get((node.path, node.op, node.line))
        if known and node.ns is None and node.direction == "forward":
            node.ns = known.pop(0)
