"""Node data for Model Explorer: what is known of the nodes of an exported program, one file for each question.

Its PyTorch adapter makes one graph, `graph`, whose nodes have the names of the exported program's. A file holds
`{graph: {results: {node: {value, bgColor}}, gradient}}`; colours of numbers lie between the smallest and the largest.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from narrowcast.core.ledger.identity import CallId
from narrowcast.errors import RunError
from narrowcast.reports.render.notebook import colours_of
from narrowcast.reports.results.explanation import Explanation
from narrowcast.reports.results.graphs import CompiledGraph, floating_formats

GRAPH = "graph"
CAST = "#f2d024"
_GRADIENT = [{"stop": 0, "bgColor": "#ffffff"}, {"stop": 1, "bgColor": "#d62728"}]


def model_explorer_files(explanation: Explanation) -> dict[str, str]:
    """Return JSON texts by name: `formats`, and where known `errors` (local, relative) and `costs` (microseconds).

    RunError for what is no exported program, or was placed by a goal: names of its nodes are not known.
    """
    graph = next((graph for graph in explanation.graphs if graph.names), None)
    if graph is None or graph.after is None:
        placed = f", goal {explanation.graphs[0].goal}" if explanation.graphs else ""
        found = f"front end {explanation.front_end}{placed}: no node of an exported program is known by name"
        advice = 'Explain with front_end="export" (--front-end export), and without a goal.'
        raise RunError(f"Model Explorer's node data of {explanation.subject}", found, advice=advice)
    files = {"formats": _file(_formats(graph))}
    errors = {name: {"value": error} for name, error in _errors(explanation, graph).items() if math.isfinite(error)}
    costs = {graph.names[step]: {"value": ns / 1000} for step, (ns, _) in graph.costs.items() if step in graph.names}
    if errors:
        files["errors"] = _file(errors, _GRADIENT)
    if costs:
        files["costs"] = _file(costs, _GRADIENT)
    return files


def _file(results: Mapping[str, Mapping[str, Any]], gradient: list[dict[str, Any]] | None = None) -> str:
    data: dict[str, Any] = {"results": results}
    return json.dumps({GRAPH: data | ({"gradient": gradient} if gradient else {})}, indent=1)


def _formats(graph: CompiledGraph) -> dict[str, dict[str, Any]]:
    """Return the formats that nodes compute in; of a cast, from which to which. Nodes without floats are left out."""
    results: dict[str, dict[str, Any]] = {}
    if graph.after is None:
        return results
    for step in graph.after.steps.values():
        operands = [graph.after.values[operand.value] for operand in step.operands]
        computes = floating_formats(operands) or floating_formats([step.value])
        if step.id not in graph.names or not computes:
            continue
        value = f"{computes} -> {step.value.type}" if step.is_cast else computes
        colour, label = (CAST, "#000000") if step.is_cast else colours_of(computes)
        results[graph.names[step.id]] = {"value": value, "bgColor": colour, "textColor": label}
    return results


def _errors(explanation: Explanation, graph: CompiledGraph) -> dict[str, float]:
    """Return the local error of each node that is a call which was compared with fp32."""
    if explanation.comparison is None or graph.after is None:
        return {}
    known = {row.id: row.local for row in explanation.comparison.differences.rows}
    ids = {step.id: CallId(step.site.module_path, step.op, step.number) for step in graph.after.steps.values()}
    return {graph.names[step]: known[id] for step, id in ids.items() if step in graph.names and id in known}
