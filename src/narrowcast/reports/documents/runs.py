"""The page of a captured run."""

from __future__ import annotations

from narrowcast.output.console import in_bytes
from narrowcast.output.words import counted
from narrowcast.reports.documents.ledgers import cast_series, format_bars
from narrowcast.reports.documents.model import Document, Exponents, Figure, Node, Table, Todo, facts_of
from narrowcast.reports.documents.rules import high_rule, keeping
from narrowcast.reports.documents.run_flow import RunFlow, flow_of
from narrowcast.reports.documents.tables import edge_cast_table, finding_table, module_table, op_table, table
from narrowcast.reports.documents.words import number, place
from narrowcast.reports.results.run import Run
from narrowcast.reports.results.verdicts import NOT_FINITE

CASTS = "Each cast, from input and compute dtypes"
_WATCH = Todo("Run it inside nc.watch()", "which tries in what formats the first of these calls is finite")


def run_document(run: Run) -> Document:
    """Return the page of a captured run."""
    flow = flow_of(run)
    nodes = flow.nodes
    bad = [n for n in nodes if n.finding]
    facts = run.environment
    policy = facts.get("policy") or {}
    verdict, tone = run_verdict(run)
    if tone == "good":  # infinities are masks
        for node in bad:
            node.verdict = node.finding = ""
        bad = []
    page = Document("run", "A captured run", verdict, tone, graph=flow.graph())
    under = f"{policy['name']} ({policy['digest'][:8]})" if policy else "none"
    region = f"{facts.get('device_type', '?')} in {policy['low']}" if policy else "none"
    page.facts = facts_of(device=facts.get("device", "?"), policy=under, region=region, seed=facts.get("seed", "?"))
    page.notes = list(run.notes)
    casts = [e for e in page.graph.edges if e.src != e.dst]
    page.figures = [
        Figure("calls", len(nodes), f"{sum(n.direction == 'backward' for n in nodes)} backward"),
        Figure("casts", len(casts), f"move {in_bytes(sum(e.bytes for e in casts))}"),
        Figure("not finite", len(bad), "calls", "bad" if bad else "good"),
    ]
    page.bars = format_bars(nodes)
    makers = (n for n in flow.overflowing if n.finding and high_rule(n))  # others only pass it on
    todos = (Todo(keeping(n.op, n.path), n.finding, high_rule(n), n.path) for n in makers)
    page.todos = list({todo.what: todo for todo in todos}.values()) or [_WATCH] * (tone == "bad")
    page.tables = [
        *finding_table(nodes), *op_table(nodes), *edge_cast_table("casts", CASTS, page.graph, page.graph.edges),
        *module_table(nodes), *_tensors(nodes, flow),
    ]  # fmt: skip
    page.series = cast_series(page.graph)
    page.exponents = [
        Exponents(node, name, t.format, t.exponents.first, list(t.exponents.counts))
        for node, name, t in flow.results
        if t.exponents.counts
    ]
    return page


def run_verdict(run: Run) -> tuple[str, str]:
    """Return the verdict in a sentence, and its tone."""
    bad = run.not_finite()
    if not bad:
        return "Every value is finite", "good"
    first, calls = run.first_not_finite(), counted(len(bad), "call")
    if first is not None:
        at = place(first.file, first.line)
        text = f"{calls} returned NaN or infinity; the first from finite inputs: {first.id}{at and f' ({at})'}"
        return text, "bad"
    if run.verdict == NOT_FINITE:
        return f"{calls} returned NaN or infinity; their inputs were not finite, either", "bad"
    text = f"Every value is finite but NaN and infinities of {calls}, which were given, fill masks, or go no further"
    return text, "good"


def _tensors(nodes: list[Node], flow: RunFlow) -> list[Table]:
    rows = [
        [nodes[i].path, nodes[i].op, nodes[i].label, name, t.format, str(list(t.shape)), number(t.low),
         number(t.high), number(t.rms), t.zeros, t.subnormal, t.saturated, t.nan, t.infinite]
        for i, name, t in flow.results
    ]  # fmt: skip
    columns = "module:module, op:op, call, result, format:format, shape, lowest:number, highest:number, rms:number, "
    columns += "zeros:share, subnormal:share, saturated:share, nan:share, infinite:share"
    largest = sorted(range(len(rows)), key=lambda n: -flow.results[n][2].largest)
    return table("tensors", "Output of each call", columns, rows, first=largest)
