"""The page of a ledger, and the parts of it that an explanation shares."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import accumulate
from operator import attrgetter

from narrowcast.core.ledger.records import Cast, Tally, Totals
from narrowcast.core.ops import op_kind
from narrowcast.core.ops.facts import MOVEMENT, NORM
from narrowcast.formats import FORMATS
from narrowcast.output.console import in_bytes
from narrowcast.output.words import counted
from narrowcast.reports.documents import tables
from narrowcast.reports.documents.model import OUTSIDE, Bar, Document, Edge, Figure, Graph, Node, Series, Table, Todo
from narrowcast.reports.documents.rules import call_rule, cast_changes
from narrowcast.reports.results.explanation import RuleRow
from narrowcast.reports.results.ledger import Ledger

ORDER = "The calls are in the order in which each first ran; what flows between them was not recorded."
TIMED = (
    "The time is that of the calls before, one after the other, as it was measured or predicted for each; calls that "
    "could not choose their format, and casts, are not in it."
)
_MUCH = 0.1
"""The share of the bytes in casts from which on it is advised to look at an op."""
MOST_ARROWS = 5
"""How many kinds of casts have lines of their own, those that move most."""


def ledger_document(ledger: Ledger) -> Document:
    """Return the page of a ledger."""
    graph, totals = ledger_graph(ledger), ledger.totals()
    moved = f"{in_bytes(totals.cast_bytes)}, {totals.share_of_casts:.0%} of all bytes"
    verdict = f"{counted(totals.casts, 'cast')} moved {moved}" if totals.casts else "No tensor was cast."
    policies = dict.fromkeys(kind.policy for kind in ledger.calls if kind.policy)
    page = Document("ledger", "A recording", verdict, notes=list(ledger.notes), graph=graph)
    page.facts = [("recorded", "with nc.record"), ("policies", ", ".join(policies) or "none")]
    page.figures = cast_figures(totals)
    page.bars = format_bars(graph.nodes)
    page.todos = [*advice_todos(ledger), *cast_todos(ledger)]
    page.tables = ledger_tables(ledger, graph)
    return page


def ledger_graph(ledger: Ledger) -> Graph:
    """Return its calls as nodes in order, and its casts as edges from outside: what made the source is not known."""
    nodes: list[Node] = []
    at: dict[tuple[str, str], list[tuple[int, set[int]]]] = {}
    for kind, tally in ledger.calls.items():
        at.setdefault((kind.module_path, kind.op), []).append((len(nodes), tally.numbers))
        label = f"#{next(iter(tally.numbers))}" if len(tally.numbers) == 1 else ""
        nodes.append(
            Node(kind.module_path, kind.op, label, tally.calls, kind.direction, kind.input_formats, kind.computes,
                 kind.result,
                 kind.action, "", kind.reason, kind.file, kind.line, tally.moved_bytes, tally.multiplications)
        )  # fmt: skip
    edges: dict[Edge, Tally] = {}
    for cast, times in ledger.kinds():
        asking = at.get((cast.module_path, cast.op))
        if asking is None:
            asking = at[cast.module_path, cast.op] = [(len(nodes), set())]
            nodes.append(Node(cast.module_path, cast.op, file=cast.file, line=cast.line))
        # The node whose call asked for it: by its number, where both know one.
        end = next((node for node, numbers in asking if cast.number in numbers), asking[0][0])
        edge = Edge(OUTSIDE, end, cast.argument, cast.src, cast.dst, 0, cast.kind, cast.how)
        edges.setdefault(edge, Tally()).add(times)
    counted_edges = [replace(edge, bytes=tally.moved_bytes, times=tally.calls) for edge, tally in edges.items()]
    return Graph(nodes, counted_edges, flow=False, note=ORDER)


def cast_figures(totals: Totals) -> list[Figure]:
    """Return the figures of casts, bytes in casts, and calls."""
    ways = ("copied", "cached", "shared", "inside")
    how = ", ".join(f"{getattr(totals, way)} {way}" for way in ways if getattr(totals, way))
    again = f"; {totals.repeated} redundant" if totals.repeated else ""
    share = f"{totals.share_of_casts:.0%} of all bytes moved"
    figures = [
        Figure("casts", totals.casts, how + again),
        Figure("bytes in casts", totals.cast_bytes, share, unit="bytes"),
        Figure("calls", totals.calls, f"{in_bytes(totals.op_bytes)} read and written"),
    ]
    refused = [Figure("refusals", totals.refusals, "calls that were not run", "bad")]
    return [*figures, *(refused if totals.refusals else [])]


def shares(nodes: Iterable[Node], unit: str, title: str) -> list[Bar]:
    """Return calls, bytes, multiplications or time by the format in which nodes compute, most first."""
    amounts: dict[str, float] = {}
    amount_of = attrgetter("times" if unit == "calls" else unit)
    for node in nodes:
        amount = amount_of(node)
        if node.computes and amount:
            name = ",".join(sorted(node.computes.split(","))) if "," in node.computes else node.computes
            amounts[name] = amounts.get(name, 0.0) + amount
    return bar_of(amounts, unit, title)


def bar_of(amounts: Mapping[str, float], unit: str, title: str) -> list[Bar]:
    """Return a bar of amounts by format, most first; none where there are none."""
    return [Bar(title, unit, tuple(sorted(amounts.items(), key=lambda part: -part[1])))] if amounts else []


def format_bars(nodes: list[Node]) -> list[Bar]:
    """Return calls, bytes, multiplications and time, as far as they are known, by the format in which they compute."""
    multiplied = "Multiplications by format"
    unknown = sum(node.times for node in nodes if node.multiplications is None)
    multiplied += f"; {counted(unknown, 'call', 'are')} not counted" if unknown else ""
    titles = {"calls": "Calls by format", "bytes": "Bytes by format", "multiplications": multiplied}
    return [bar for unit, title in (*titles.items(), ("ns", "Time by format")) for bar in shares(nodes, unit, title)]


def advice_todos(ledger: Ledger, without: str = "") -> list[Todo]:
    """Return the ledger's own advice; without that of a kind that is given elsewhere."""
    advice = (row for row in ledger.advice if row.kind != without)
    return [Todo(row.todo, f"{row.kind}: {row.what}", {}, row.module_path) for row in advice]


def cast_todos(ledger: Ledger, in_graph: bool = False, gradients: bool = True) -> list[Todo]:
    """Return advice on casts that are made again, those of weights, and the op with most of its inputs widened."""
    todos: list[Todo] = []
    copied = [cast for cast in ledger.casts if cast.how == "copied"]
    again = [cast for cast in copied if cast.repeated]
    if again and not in_graph:
        wasted = in_bytes(sum(cast.moved_bytes for cast in again))
        casts = counted(len(again), "cast")
        why = f"tensors that were cast to the same format before are cast again: {casts}, {wasted}"
        what = "Compile the model with nc.compile: within one call it makes such a cast once."
        todos.append(Todo(what, why, path=again[0].module_path))
    return [*_weights(copied, in_graph, gradients), *todos, *_dearest(copied)]


def _weights(copied: list[Cast], in_graph: bool, gradients: bool) -> list[Todo]:
    """Return advice that spares the casts of weights, if these move most of all bytes in casts; none in training."""
    whole = sum(cast.moved_bytes for cast in copied)
    weights = sum(cast.moved_bytes for cast in copied if cast.kind == "weight")
    if gradients or in_graph or not weights or weights < whole / 2:
        return []
    low = next(cast.dst for cast in copied if cast.kind == "weight")
    what = f"Keep the weights in {low}: one region around the loop of calls, or nc.compile"
    why = (
        f"{weights / whole:.0%} of the bytes in casts are of weights, cast once in each region; nc.compile casts them "
        "once and keeps them"
    )
    return [Todo(what, why)]


def _dearest(copied: list[Cast]) -> list[Todo]:
    """Return the norm, or op that only moves values, whose casts to a wider format move most, if that is much, and how
    it does without; of lists, which have a source: what the user's own rules ask for is wanted. Losses, exponentials
    and sums are in fp32 for their error.
    """
    moved = Counter[tuple[str, str, str]]()
    for cast in copied:
        widens = cast.src in FORMATS and cast_changes(cast.src, cast.dst) == "follow"
        if cast.source and cast.direction == "forward" and widens and op_kind(cast.op).family in (NORM, MOVEMENT):
            moved[cast.op, cast.src, cast.dst] += cast.moved_bytes
    (op, src, dst), most = max(moved.items(), key=lambda item: item[1], default=(("", "", ""), 0))
    share = most / (sum(cast.moved_bytes for cast in copied) or 1)
    if share < _MUCH:
        return []
    why = f"its casts from {src} to {dst} move {in_bytes(most)}, {share:.0%} of the bytes in casts"
    rule = call_rule(op, "", "follow", f"no casts to {dst}")
    return [Todo(f"See what {op} costs and gives in {src}, where it is not cast", why, rule)] if rule else []


def ledger_tables(ledger: Ledger, graph: Graph, own_rules: Iterable[RuleRow] = ()) -> list[Table]:
    """Return the tables of ops, casts, modules, rules, refusals, advice and findings that have rows."""
    return [
        *tables.finding_table(graph.nodes),
        *tables.op_table(graph.nodes),
        *tables.cast_table(ledger, graph.nodes),
        *tables.module_table(graph.nodes),
        *tables.matched_table(ledger.matches, own_rules),
        *tables.refusal_table(ledger.refusals),
        *tables.advice_table(ledger.advice),
    ]


def cast_series(graph: Graph) -> list[Series]:
    """Return the bytes that casts move, over the time at which their calls run, or over the order of the calls.

    The time is known where each forward call with a format has one: calls run one after the other, and a cast is made
    when its call begins. Nothing where there are fewer than two casts.
    """
    moved: dict[int, Counter[str]] = {}
    whole = Counter[str]()
    for edge in graph.edges:
        if edge.src != edge.dst and edge.bytes:
            name = f"{edge.src} to {edge.dst}"
            moved.setdefault(edge.end, Counter())[name] += edge.bytes
            whole[name] += edge.bytes
    if len(moved) < 2:
        return []
    nodes = sorted(moved)
    shown = sorted(whole, key=lambda name: -whole[name])[:MOST_ARROWS]
    lines: list[tuple[str, list[float | None]]] = [(name, [moved[n].get(name) for n in nodes]) for name in shown]
    if any(node.ns for node in graph.nodes):
        begins = list(accumulate((node.ns or 0.0 for node in graph.nodes), initial=0.0))
        xs, x, unit, note = [begins[n] for n in nodes], "time", "ns", TIMED
    else:
        xs, x, unit, note = [float(n + 1) for n in nodes], "call, in order", "whole", ""
    return [Series("Casts along the run", x, "bytes", xs, lines, unit, "bytes", True, nodes, kind="stems", note=note)]
