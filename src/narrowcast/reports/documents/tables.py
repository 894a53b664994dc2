"""Tables that several pages have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from narrowcast.core.ledger.records import Advice, Refusal, Tally
from narrowcast.reports.documents.model import Column, Edge, Graph, Node, Shown, Table
from narrowcast.reports.documents.rules import (
    agreeing,
    call_rule,
    cast_changes,
    changing_action,
    high_rule,
    shared_modules,
)
from narrowcast.reports.documents.words import place
from narrowcast.reports.results.explanation import RuleRow
from narrowcast.reports.results.ledger import Ledger


def table(
    name: str, title: str, columns: str, rows: Iterable[Sequence[Any]], rules: Iterable[Shown] = (),
    nodes: Sequence[Node] = (), first: Iterable[int] = (),
) -> list[Table]:  # fmt: skip
    """Return a table, if it has rows. columns: `name:kind` with commas between. nodes: all calls, if there are rules.
    first: numbers of the rows to be shown first.
    """
    cells = [list(row) for row in rows]
    if not cells:
        return []
    parsed = tuple(Column(*column.strip().split(":")) for column in columns.split(","))
    kept = agreeing(rules)
    shown = kept if any(kept) else []
    return [Table(name, title, parsed, cells, list(shown), shared_modules(shown, nodes), list(first))]


def _why(action: str, reason: str) -> str:
    """Return what decided a call, in words; of a call without one the reason alone."""
    return f"{action}: {reason}" if action else reason


def op_table(nodes: Iterable[Node]) -> list[Table]:
    """Return every op with its formats and why, most bytes first."""
    groups: dict[tuple[str, ...], list[Node]] = {}
    for node in nodes:
        key = (node.op, node.direction, node.input_formats, node.computes, node.result, node.action, node.reason)
        groups.setdefault(key, []).append(node)
    rows: list[list[Any]] = [
        [op, direction, sum(n.times for n in alike), inputs, computes, result, sum(n.bytes or 0 for n in alike),
         len({n.path for n in alike}), _why(action, reason)]
        for (op, direction, inputs, computes, result, action, reason), alike in groups.items()
    ]  # fmt: skip
    rows.sort(key=lambda row: -row[6])
    columns = (
        "op:op, direction, calls:number, input dtype:format, compute dtype:format, output dtype:format, bytes:bytes, "
        "modules:number, why"
    )
    rules = [call_rule(row[0], "", changing_action(row[4], row[1])) for row in rows]
    return table("ops", "Each op: in which format it computes, and why", columns, rows, rules)


def module_table(nodes: Iterable[Node]) -> list[Table]:
    """Return every module with its own calls, formats, bytes and largest error, in order."""
    groups: dict[str, list[Node]] = {}
    for node in nodes:
        groups.setdefault(node.path, []).append(node)
    rows = []
    for path, inside in groups.items():
        formats = ",".join(dict.fromkeys(f for n in inside for f in n.computes.split(",") if f))
        own = max((n.local for n in inside if n.local is not None), default=None)
        total = next((n.total for n in reversed(inside) if n.total is not None), None)
        moved, findings = sum(n.bytes or 0 for n in inside), sum(bool(n.finding) for n in inside)
        rows.append([path, sum(n.times for n in inside), formats, moved, own, total, findings])
    columns = "module:module, calls:number, computes:format, bytes:bytes, local error:error, total error:error, "
    columns += "findings:number"
    return table("modules", "Each module: its own calls", columns, rows)


def cast_table(ledger: Ledger, nodes: Sequence[Node]) -> list[Table]:
    """Return the casts; alike ones of one place together."""
    groups: dict[tuple[Any, ...], Tally] = {}
    for cast, times in ledger.kinds():
        is_again = cast.repeated and cast.how == "copied" and cast not in ledger.counted
        key = (
            cast.module_path, cast.op, cast.argument, cast.kind, cast.src, cast.dst, "again" if is_again else cast.how,
            cast.direction, cast.rule, cast.reason, place(cast.file, cast.line),
        )  # fmt: skip
        groups.setdefault(key, Tally()).add(times)
    ordered = sorted(groups.items(), key=lambda group: -group[1].moved_bytes)
    rows = [[*key[:8], tally.calls, tally.moved_bytes, *key[8:]] for key, tally in ordered]
    columns = (
        "module:module, op:op, argument, kind, from:format, to:format, how, direction, times:number, bytes:bytes, "
        "rule, reason, line:line"
    )
    actions = (cast_changes(key[4], key[5]) if key[7] == "forward" else "" for key, _ in ordered)
    rules = [call_rule(key[1], key[0], action) for (key, _), action in zip(ordered, actions, strict=True)]
    return table("casts", "Each cast: who asked for it, and what it moves", columns, rows, rules, nodes)


def edge_cast_table(name: str, title: str, graph: Graph, edges: Iterable[Edge]) -> list[Table]:
    """Return the casts on these edges: the format of a value and the one it is read in differ."""
    casts = [(e, graph.nodes[e.end]) for e in edges if e.src != e.dst]
    rows = [[n.path, n.op, e.argument, e.kind, e.src, e.dst, e.bytes, n.rule, place(n.file, n.line)] for e, n in casts]
    columns = "module:module, op:op, argument, kind, from:format, to:format, bytes:bytes, rule, line:line"
    return table(name, title, columns, rows)


def matched_table(matches: Mapping[str, Mapping[str, int]], own: Iterable[RuleRow] = ()) -> list[Table]:
    """Return rules and what they matched; a policy's own rules that matched nothing, too."""
    rows: list[list[Any]] = [
        [r.rule, r.origin, r.calls, len(r.modules), ", ".join(r.modules[:4]), r.reason] for r in own
    ]
    known = {str(row[0]) for row in rows}
    for rule, modules in matches.items():
        text, _, origin = rule.rstrip(")").rpartition(" (")
        if text not in known and rule not in known:
            where = ", ".join(m or "(root)" for m in list(modules)[:4])
            rows.append([text or rule, origin, sum(modules.values()), len(modules), where, ""])
    columns = "rule, written at:line, calls:number, modules:number, first modules, reason"
    return table("rules", "Rules, and what they matched", columns, rows)


def refusal_table(refusals: Iterable[Refusal]) -> list[Table]:
    """Return the calls that were not run."""
    rows = [[r.module_path, r.op, r.reason, r.policy, place(r.file, r.line)] for r in refusals]
    return table("refusals", "Refused calls", "module:module, op:op, reason, policy, line:line", rows)


def advice_table(advice: Mapping[Advice, int]) -> list[Table]:
    """Return what is legal, and probably a mistake."""
    rows = [[a.kind, a.what, a.todo, times, a.module_path, place(a.file, a.line)] for a, times in advice.items()]
    return table("advice", "Advice", "kind, what, what to do, times:number, module:module, line:line", rows)


def finding_table(nodes: Sequence[Node], rules: Iterable[Shown] | None = None) -> list[Table]:
    """Return the calls that deserve a look, each with the rule that fixes it. rules: one for each node."""
    ruled = zip(nodes, map(high_rule, nodes) if rules is None else rules, strict=True)
    shown = [(n, rule) for n, rule in ruled if n.finding]
    rows = [
        [n.path, n.op, n.label, n.direction, n.computes, n.verdict, n.finding, place(n.file, n.line)] for n, _ in shown
    ]
    columns = "module:module, op:op, call, direction, computes:format, verdict, finding, line:line"
    return table("findings", "Findings", columns, rows, [rule for _, rule in shown], nodes)
