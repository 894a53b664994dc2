"""Traces: calls with their times in Chrome's trace event format, which Perfetto and chrome://tracing open.

One track: modules are slices around the calls that they make, and a cast of an argument is a slice before its call. The
calls lie side by side in the order in which they ran: what lies between them (Python, this observation) is left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from narrowcast.core.ledger.identity import FORWARD, CallId
from narrowcast.errors import RunError
from narrowcast.output.words import counted
from narrowcast.reports.results.explanation import Explanation
from narrowcast.reports.results.graphs import CompiledGraph, floating_formats
from narrowcast.reports.results.run import Run
from narrowcast.reports.results.run_records import CallRecord

_COLOURS = {"fp64": "rail_idle", "fp32": "thread_state_running", "bf16": "thread_state_iowait", "fp16": "bad"}
"""Names of colours that chrome://tracing knows; Perfetto takes one by the name of the slice, which has the format."""
CAST, OTHER = "yellow", "generic_work"
_NUMBERED = re.compile(r"[^.]+(?:\.\d+(?![^.]))*")
"""A part of a module's path with the numbers of layers behind it."""


Timed = tuple[CallRecord, int, str, Sequence[tuple[str, str, int]]]
"""A call, nanoseconds with the casts of its arguments, `measured` or `predicted` and how, and these casts: from which
format to which, nanoseconds. A call that is a conversion itself computes in the format that it gives.
"""


def trace_text(name: str, calls: Sequence[Timed]) -> str:
    """Return the trace as JSON text. name: of what ran, the outermost slice."""
    track = _Track(name)
    for call in calls:
        track.add(*call)
    track.close(0)
    how = sorted({time.partition(" ")[0] for _, _, time, _ in calls})
    other_data = {"producer": "narrowcast", "times": ", ".join(how), "layout": "calls are side by side, without gaps"}
    named = {"ph": "M", "pid": 1, "tid": 1}
    head = [
        {**named, "name": "process_name", "args": {"name": f"narrowcast: {name}"}},
        {**named, "name": "thread_name", "args": {"name": f"calls, times {', '.join(how)}"}},
    ]
    slices = sorted(track.slices, key=lambda slice: (slice[0], -slice[1], slice[2]))
    events = [
        {"ph": "X", "ts": ts / 1000, "dur": ns / 1000, "pid": 1, "tid": 1, **event} for ts, ns, _, event in slices
    ]
    return json.dumps({"traceEvents": [*head, *events], "displayTimeUnit": "ms", "otherData": other_data})


def run_trace(run: Run) -> str:
    """Return the text of `Run.to_trace`."""
    if not run.elapsed_ns:
        advice = "Capture it with times: nc.capture(..., times=True), or narrowcast capture --trace FILE."
        raise RunError(f"a trace of a run of {counted(len(run.calls), 'call')}", "they were not timed", advice=advice)
    casts: dict[int, list[tuple[str, str, int]]] = {}
    for number, src, dst, ns in run.cast_elapsed_ns:
        casts.setdefault(number, []).append((src, dst, ns))
    rows: list[Timed] = []
    for number, (call, ns) in enumerate(zip(run.calls, run.elapsed_ns, strict=True)):
        if call.is_cast and call.outputs:
            call = replace(call, computes=run.tensors[call.outputs[0][1]].format)
        rows.append((call, ns, "measured", casts.get(number, ())))
    return trace_text("a captured run", rows)


def explanation_trace(result: Explanation) -> str:
    """Return the text of `Explanation.to_trace`."""
    if result.timed is not None:
        return run_trace(result.timed)
    rows = [call for graph in result.graphs for call in _timed_calls(graph)]
    if not rows:
        advice = "Explain with times: nc.explain(..., times=True), or narrowcast explain --trace FILE."
        raise RunError(
            f"a trace of {result.subject}", "no times were asked for, or nothing was captured", advice=advice
        )
    return trace_text(result.subject, rows)


def _timed_calls(graph: CompiledGraph) -> list[Timed]:
    if graph.after is None:
        return []
    rows: list[Timed] = []
    for number, (ns, source) in graph.costs.items():
        step = graph.after.steps[number]
        operands = [graph.after.values[operand.value] for operand in step.operands]
        known = graph.before.steps.get(number, step) if graph.before is not None else step
        values = graph.before.values if graph.before is not None else graph.after.values
        inputs = floating_formats([values[o.value] for o in known.operands if o.value in values])
        id = CallId(step.site.module_path, step.op, max(step.number, 1), direction=step.direction)
        computes, at = floating_formats([step.value] if step.is_cast else operands), step.site
        call = CallRecord(id, at.file, at.line, inputs, computes, is_cast=step.is_cast)
        rows.append((call, round(ns), f"predicted ({source})", ()))
    return rows


class _Track:
    """Lays calls side by side.

    slices: beginning and length in nanoseconds, depth, the event. open: the modules around, each with its beginning.
    """

    def __init__(self, name: str) -> None:
        self.now = 0
        self.slices: list[tuple[int, int, int, dict[str, Any]]] = []
        self.open: list[tuple[str, tuple[str, int, str], int]] = [(name, ("", 1, FORWARD), 0)]

    def add(self, call: CallRecord, elapsed_ns: int, time: str, casts: Sequence[tuple[str, str, int]]) -> None:
        """Add the modules that end and begin before it, the casts of its arguments, the call."""
        self._enter(call.id)
        place = f"{call.file}:{call.line}" if call.file else ""
        args = {
            "call": str(call.id), "format": call.computes, "input_formats": call.input_formats, "time": time,
            "line": place,
            "rule": call.rule, "reason": call.reason,
        }  # fmt: skip
        args = {key: value for key, value in args.items() if value}
        left = elapsed_ns
        for src, dst, ns in casts:
            ns = min(ns, left)
            left -= ns
            self._slice(f"cast {src} -> {dst}", "cast", ns, CAST, {**args, "format": dst, "from": src})
        op = call.id.op.removeprefix("aten.").removesuffix(".default")
        colour = CAST if call.is_cast else _COLOURS.get(call.computes, OTHER)
        name = f"cast {call.input_formats} -> {call.computes}" if call.is_cast else f"{op} {call.computes}".strip()
        self._slice(name, "cast" if call.is_cast else call.id.direction, left, colour, args)

    def close(self, depth: int) -> None:
        while len(self.open) > depth:
            name, (path, module_call, direction), began = self.open.pop()
            args = {"module": path or "(root)", "module_call": module_call, "direction": direction}
            event = {"name": name, "cat": "module", "args": args}
            self.slices.append((began, self.now - began, len(self.open), event))

    def _enter(self, call: CallId) -> None:
        parts = _NUMBERED.findall(call.module_path)
        paths = [(".".join(parts[: n + 1]), call.module_call, call.direction) for n in range(len(parts))]
        alike = 0
        while alike < min(len(paths), len(self.open) - 1) and self.open[alike + 1][1] == paths[alike]:
            alike += 1
        self.close(alike + 1)
        for part, path in zip(parts[alike:], paths[alike:], strict=True):
            name = part if call.direction == FORWARD else f"{part} ({call.direction})"
            self.open.append((name, path, self.now))

    def _slice(self, name: str, kind: str, ns: int, colour: str, args: dict[str, Any]) -> None:
        self.slices.append((self.now, ns, len(self.open), {"name": name, "cat": kind, "cname": colour, "args": args}))
        self.now += ns
