"""An explanation read back from its JSON: the same text, page and JSON; the programs of its graphs are not in it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from narrowcast.core.policy import Site
from narrowcast.formats import FORMATS
from narrowcast.programs.placement.peak import Peak
from narrowcast.programs.placement.place import PlacedCall, Placement
from narrowcast.reports.results.differences import Differences
from narrowcast.reports.results.explanation import Attempt, Comparison, Explanation, Failure, RuleRow
from narrowcast.reports.results.flow import GraphFlow
from narrowcast.reports.results.graphs import CandidateTime, CompiledGraph, DecisionDifference, GraphRow
from narrowcast.reports.results.ledger import Ledger
from narrowcast.reports.results.records import call_errors, first_not_finite, output_errors, record_of

Data = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SavedExplanation(Explanation):
    """written: what the file says. matched: the policy's own rules with what they matched; the rules themselves are in
    the policy.
    """

    written: Data = field(default_factory=dict)
    matched: tuple[RuleRow, ...] = ()

    def rule_rows(self) -> list[RuleRow]:
        """What each of the policy's own rules matched."""
        return list(self.matched)

    def flows(self) -> list[GraphFlow]:
        """What flows between the calls of each captured graph."""
        return [GraphFlow.of_data(flow) for flow in self.written.get("flows", ())]

    def data(self) -> dict[str, Any]:
        """What was written as JSON."""
        return dict(self.written)


def explanation_of(data: Data) -> Explanation:
    """The explanation that such JSON data say. KeyError, TypeError or ValueError for others."""
    placed = {row["graph"]: row for row in data["placements"]}
    comparison, failure = data["comparison"], data["failure"]
    return SavedExplanation(
        data["subject"], data["device_type"], data["low"], data["policy"], data["digest"], data["ran_on"],
        data["note"],
        ledger=Ledger.from_json(json.dumps(data["ledger"])),
        comparison=None if comparison is None else _comparison(data, comparison),
        front_end=data["front_end"],
        gradients=data.get("gradients", True),
        graphs=tuple(_graph(row, placed.get(row["number"])) for row in data["graphs"]),
        differences=tuple(record_of(DecisionDifference, row) for row in data["differences"]),
        failure=None if failure is None else _failure(failure),
        written=data,
        matched=tuple(record_of(RuleRow, row, modules=tuple(row["modules"])) for row in data["rules"]),
    )  # fmt: skip


def _failure(row: Data) -> Failure:
    found: Failure = record_of(Failure, row, attempts=tuple(record_of(Attempt, each) for each in row["attempts"]))
    return found


def _comparison(data: Data, row: Data) -> Comparison:
    """Files from before all calls were in them have the worst alone."""
    differences = Differences(
        data["subject"], data["device_type"], data["policy"], data["low"], "fp32",
        call_errors(row.get("calls", row["worst"])), output_errors(row), band=float(row["band"]),
        verdict=row["verdict"], notes=list(row["notes"]), runs=row["runs"], not_finite=first_not_finite(row),
        reference_not_finite=row["reference_not_finite"],
    )  # fmt: skip
    metrics = {
        name: {key: float(value) for key, value in row[name].items()} for name in ("metric_reference", "metric_found")
    }
    low, high = row["time_quartiles"]
    found: Comparison = record_of(
        Comparison, row, differences=differences, time_quartiles=(float(low), float(high)), **metrics
    )
    return found


def _graph(row: Data, placed: Data | None) -> CompiledGraph:
    """A graph with its line, and what was placed in it."""
    line: GraphRow = record_of(GraphRow, row)
    graph = CompiledGraph(line.number, fallback=line.fallback, broken_by=line.broken_by, saved=line)
    if placed is None:
        return graph
    graph.goal, graph.chosen = placed["goal"], placed["chosen"]
    graph.candidates = tuple(_candidate(each) for each in placed["candidates"])
    graph.candidates_seconds = placed.get("candidates_seconds", 0.0)
    count, written_bytes = placed.get("returned_casts", (0, 0))
    graph.saved_returned = (int(count), int(written_bytes))
    graph.from_disk = placed.get("from_disk", False)
    calls = tuple(_placed_call(number, each) for number, each in enumerate(placed["calls"]))
    graph.placement = record_of(Placement, placed, calls=calls)
    return graph


def _candidate(row: Data) -> CandidateTime:
    peak = row.get("peak")
    if peak is not None:
        peak = record_of(Peak, peak, site=record_of(Site, peak["site"]))
    found: CandidateTime = record_of(CandidateTime, row, peak=peak)
    return found


def _placed_call(number: int, row: Data) -> PlacedCall:
    shape = None if row["shape"] is None else tuple(row["shape"])
    costs = row["costs_ns"]
    return PlacedCall(
        row.get("step", number), row["op"], Site(row["module"], file=row["file"], line=row["line"]), shape,
        tuple(FORMATS[name] for name in costs), tuple(map(float, costs.values())), FORMATS[row["chosen"]],
    )  # fmt: skip
