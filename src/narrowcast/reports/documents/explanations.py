"""The page of an explanation."""

from __future__ import annotations

from collections import Counter

from narrowcast.core.ledger import CallKind
from narrowcast.output.console import in_bytes, short_place
from narrowcast.output.words import counted
from narrowcast.reports.documents import comparisons, ledgers, placements, watches
from narrowcast.reports.documents.model import OUTSIDE, Document, Edge, Figure, Graph, Node, Table, Todo, facts_of
from narrowcast.reports.documents.tables import edge_cast_table, table
from narrowcast.reports.documents.words import in_time, place
from narrowcast.reports.results.differences import SKIPPED_STEP
from narrowcast.reports.results.explanation import Comparison, Explanation
from narrowcast.reports.results.graphs import GraphFlow, GraphRow
from narrowcast.reports.results.ledger import Ledger
from narrowcast.reports.results.verdicts import AT_FAULT, NONDETERMINISTIC, NOT_COMPARED, NOT_JUDGED

SLOWER = 1.05
_APART = 0.1
"""The time of ops one by one may be longer than the run's by this part of it: the two are measured apart."""
VERDICTS = {
    "exact": "Equal to fp32",
    "round-off": "Within round-off of fp32",
    "fault": "Further from fp32 than round-off explains",
    "not finite": "Not finite, where fp32 is",
    "kernel": "Within reach of fp32, but a kernel is off by more than round-off",
    "not judged": "How far rounding may take it from fp32 is not known",
    "not compared": "The model computes in low formats in fp32, too",
    "nondeterministic": "As far from fp32 as two of its own runs",
}


def explanation_document(result: Explanation) -> Document:
    """Return the page of an explanation."""
    ledger, comparison = result.ledger, result.comparison
    flows = result.flows()
    graph = flow_graph(flows, ledger) if flows else ledgers.ledger_graph(ledger)
    listed = graph
    is_eager = flows == [result.flow]
    if is_eager:  # its tables list conversions of the user's own, too, which are drawn as edges
        listed = ledgers.ledger_graph(ledger)
        count_as_recorded(graph, ledger)
    placed = placements.placed_graphs(result.graphs)
    for nodes in [graph.nodes] if listed is graph else [graph.nodes, listed.nodes]:
        if comparison is not None:
            comparisons.add_errors(nodes, comparison.differences.rows or comparison.worst)
        for _, placement in placed:
            placements.add_costs(nodes, placement)
    verdict, tone = _verdict(result)
    page = Document("explanation", result.subject, verdict, tone, graph=graph)
    rules = f", {counted(len(result.rules), 'rule')} of its own" if result.rules else ""
    policy, region = f"{result.policy} ({result.digest[:8]}{rules})", f"{result.device_type} in {result.low}"
    if not result.policy:  # what was exported with its casts runs in none
        policy = region = "none"
    ran = result.ran_on if result.front_end == "eager" else f"graphs: {len(result.graphs)}; {result.ran_on}"
    page.facts = facts_of(
        model=result.subject, device=result.device_type, policy=policy, region=region, mode=result.front_end, ran=ran
    )
    page.notes = _notes(result)
    page.figures = [*placements.figures(placed), *_cost_figures(comparison, result.gradients)]
    page.figures += [*ledgers.cast_figures(ledger.totals()), *_pass_figures(result.graph_rows())]
    page.figures += comparisons.output_figures(comparison.differences) if comparison is not None else []
    page.bars = [*placements.bars(placed), *ledgers.format_bars(listed.nodes)]
    page.todos = _todos(result)
    page.tables = [*_comparison_tables(comparison, listed), *ledgers.ledger_tables(ledger, listed, result.rules)]
    page.tables += _graph_tables(result)
    stored = [[kind, before, now] for kind, (before, now) in result.stored.items()]
    page.tables += table("stored", "What training keeps, in bytes", "kind, before:bytes, now:bytes", stored)
    # Those of the backward are in no ledger: it is written before there is a backward.
    casts = [edge for edge in graph.edges if graph.nodes[edge.end].direction != "forward"]
    page.tables += edge_cast_table("backward casts", "Each cast of the backward, after the passes", graph, casts)
    page.series = [*comparisons.error_series(graph.nodes), *ledgers.cast_series(graph)]
    return page


def _notes(result: Explanation) -> list[str]:
    """Return notes: what raised, what is a fault of ours, what is not finite, what takes time, what a goal chose."""
    failure, comparison = result.failure, result.comparison
    first = comparison.reference_not_finite if comparison is not None else None
    notes = ["" if first is None else f"fp32 itself is not finite: {first.text}", result.note, *result.ledger.notes]
    if failure is not None:
        notes.append(f"{failure.text} What ran before is shown.")
    notes += [
        f"BUG: {d.op} in {d.module_path or '(root)'} computes in {d.computes} {d.eager} times in eager code, {d.graph} "
        "times in the graph; please report this"
        for d in result.differences
    ]
    if comparison is not None:
        if comparison.not_finite is not None:
            notes.append(f"Not finite in the region, and finite in fp32: {comparison.not_finite.text}")
        on = spent(comparison)
        notes += [f"The time in {result.low}: {on}", *comparison.differences.notes] if on else []
    notes += [f"{g.broken_by} ends graph {g.number}, {g.broken_at}" for g in result.graph_rows() if g.broken_by]
    notes += [f"{g.site} runs as eager code would: {g.fallback}" for g in result.graph_rows() if g.fallback]
    return [note for note in (*notes, *placements.notes(placements.placed_graphs(result.graphs))) if note]


def _comparison_tables(comparison: Comparison | None, graph: Graph) -> list[Table]:
    if comparison is None:
        return []
    now = comparison.metric_found
    metrics = [[name, before, now.get(name)] for name, before in comparison.metric_reference.items()]
    errors = comparisons.error_table(comparison.differences, graph.nodes)
    own = table("metrics", "The model's own metric", "metric, fp32:number, region:number", metrics)
    return [*errors, *comparisons.output_table(comparison.differences), *own]


def _verdict(result: Explanation) -> tuple[str, str]:
    failure, comparison, totals = result.failure, result.comparison, result.ledger.totals()
    if failure is not None:
        at = place(failure.file, failure.line)
        return f"It raises under {failure.policy}, and not in fp32: {failure.error} ({failure.op}, {at})", "bad"
    if comparison is not None and comparison.not_finite is not None:
        first = comparison.not_finite
        module = first.id.module_path or "the root"
        return f"Not finite, where fp32 is: {first.what} made by {first.id.op} in {module}", "bad"
    if comparison is not None:
        ratio, verdict = comparison.time_ratio, comparison.differences.verdict
        is_slower = ratio > SLOWER and comparison.is_clear
        much = comparisons.share_of_output(comparison.differences)
        own = comparison.differences.own_fault
        if own is not None and verdict == NOT_COMPARED:
            module = own.id.module_path or "the root"
            return f"Not finite in fp32 either: {own.what} made by {own.id.op} in {module}", "bad"
        said = f"Off by {much}, as rounding may be" if much else VERDICTS.get(verdict, verdict)
        if verdict == NOT_COMPARED and SKIPPED_STEP in comparison.differences.notes:
            said = "A scaler skips this step, so that it is not compared with fp32"
        joined = ", but" if is_slower and verdict not in AT_FAULT and not much else ", and"
        how = "" if result.front_end == "eager" else " as eager code"  # what was compiled is not run
        either = (
            ", which is not finite itself" if verdict in comparisons.SOUND and comparison.reference_not_finite else ""
        )
        low, high = comparison.time_quartiles
        time = f"{ratio:.2f}" if comparison.is_clear else f"about {ratio:.2f} ({low:.2f} to {high:.2f})"
        text = f"{said}{either}{joined}{how} it takes {time} times the time of fp32 here"
        return text, "bad" if verdict in AT_FAULT else "" if is_slower or much else "good"
    chosen = placements.verdict(placements.placed_graphs(result.graphs))
    if chosen:
        return chosen, ""
    share = f"{totals.share_of_casts:.0%} of all bytes"
    return f"{counted(totals.casts, 'cast')} move {in_bytes(totals.cast_bytes)}, {share}", ""


def _cost_figures(comparison: Comparison | None, gradients: bool) -> list[Figure]:
    if comparison is None:
        return []
    ratio, (low, high) = comparison.time_ratio, comparison.time_quartiles
    tone = "good" if ratio < 1 else ""
    memory = comparison.memory_ratio
    weights = f" + weights {in_bytes(comparison.weight_bytes)}" if comparison.weight_bytes else ""
    peaks = f"{in_bytes(comparison.region_peak_bytes)}{weights}, fp32 {in_bytes(comparison.reference_peak_bytes)}"
    peaks += "; with gradients" if gradients else "; no_grad"
    region, reference = in_time(1e6 * comparison.region_ms), in_time(1e6 * comparison.reference_ms)
    times = f"{region}, fp32 {reference}; quartiles {low:.2f} to {high:.2f}"
    times += f" of {comparison.repeats} alternating pairs"
    known, now = comparison.metric_reference, comparison.metric_found
    return [
        Figure("time", ratio, times, tone, "times fp32"),
        Figure("peak memory", memory, peaks, "good" if memory < 1 else "", "times fp32"),
        *(Figure(name, now.get(name, "None"), f"fp32 {before:.6g}") for name, before in known.items()),
    ]


def spent(comparison: Comparison) -> str:
    """Return what takes the region's time: what is not casts and not kernels is calls, and overhead. Nothing, where ops
    took longer one by one than the runs that were timed: on a busy machine, or where they are tiny.
    """
    rest = comparison.region_ms - comparison.casts_ms - comparison.kernels_ms
    of_reference = comparison.reference_ms - comparison.reference_kernels_ms
    if not (rest >= -_APART * comparison.region_ms and of_reference >= -_APART * comparison.reference_ms):
        return ""
    known = (comparison.casts_ms, comparison.kernels_ms, comparison.reference_kernels_ms, rest)
    casts, kernels, reference, left = (in_time(1e6 * ms) for ms in known)
    left = left if rest > 0 else "too little to measure"
    return f"casts {casts}, kernels {kernels} (fp32: {reference}), the rest (calls, overhead) {left}"


def _todos(result: Explanation) -> list[Todo]:
    """Return recommendations: for what raises, what is wrong, rules that do nothing, what costs time, then casts."""
    todos: list[Todo] = []
    failure, comparison = result.failure, result.comparison
    if failure is not None:
        runs = [f'Use policy="{a.policy}", which runs it.' for a in failure.attempts if not a.error]
        runs = runs or ["Ask nc.repair for rules under which it runs."]
        todos.append(Todo(runs[0], failure.error, {}, failure.module_path))
    unhelped: list[Todo] = []
    if comparison is not None:
        differences = comparison.differences
        own = differences.own_fault
        todos += [] if own is None else watches.finding_todos(own)
        advised = comparisons.unmatched_todos(differences) or comparisons.advice_todos(differences)
        advised = advised or comparisons.error_todos(comparison.worst, faults_only=True)
        is_sound = differences.verdict in comparisons.SOUND
        if is_sound and differences.remedy is None and not comparisons.share_of_output(differences):  # time is first
            unhelped = advised
        else:
            todos += advised
    todos += _break_todos(result.graph_rows())
    for row in result.rules:
        if not row.calls:
            at = short_place(row.origin)
            known = (each.what.partition(f"the rule {row.rule} matches nothing: ")[2] for each in result.ledger.advice)
            why = ": ".join(["it matched nothing", *filter(None, known)])
            todos.append(Todo(f"Fix or delete the rule {row.rule}", f"{why} ({at})" if at else why))
    todos += ledgers.advice_todos(result.ledger, "rule without effect" if result.rules else "")
    of_casts = ledgers.cast_todos(result.ledger, result.front_end != "eager", result.gradients)
    is_placed = bool(placements.placed_graphs(result.graphs))  # formats are chosen by time already
    if comparison is not None and comparison.time_ratio > SLOWER and comparison.is_clear and not is_placed:
        on = spent(comparison)
        why = f"a run takes {comparison.time_ratio:.2f} times what fp32 takes on this machine"
        under = f'"{result.low}"' if result.policy == "native" else "..."  # the region, or its policy
        what = f'Choose formats by measured time: nc.compile(model, under={under}, goal="fast")'
        fast = Todo(what, f"{why}{on and ': '}{on}")
        more_ms = comparison.region_ms - comparison.reference_ms
        is_by_casts = bool(on) and comparison.casts_ms > more_ms / 2
        of_casts = [*of_casts, fast] if is_by_casts and of_casts else [fast, *of_casts]
    todos += [*of_casts, *unhelped]
    is_open = comparison is not None and differences.verdict in (NOT_COMPARED, NOT_JUDGED, NONDETERMINISTIC)
    if comparison is not None and not (is_sound or differences.tried or is_open):
        todos += comparisons.error_todos(comparison.worst)[:1]
    if comparison is None and failure is None and not result.has_stand_in:
        what = "Run it for real: explain(..., run=True), or narrowcast explain --run"
        todos.append(Todo(what, "nothing is known of errors, time and memory: the model was not compared with fp32"))
    return todos


def _break_todos(graphs: list[GraphRow]) -> list[Todo]:
    """Return advice on code that is in no graph: it runs as eager code, and this page shows nothing of it."""
    effect = "that code runs as eager code, in the same region, and is not on this page"
    ends = [f"{g.broken_by} ({g.broken_at})" for g in graphs if g.broken_by]
    left = [f"{g.fallback} ({g.site})" for g in graphs if g.fallback]
    todos = [Todo(f"See where graphs end: {counted(len(ends), 'break')}", f"{ends[0]}; {effect}")] if ends else []
    if left:
        todos.append(Todo(f"See what is captured in no graph: {counted(len(left), 'part')}", f"{left[0]}; {effect}"))
    return todos


def _pass_figures(graphs: list[GraphRow]) -> list[Figure]:
    """Return the casts that the passes left, and those of the joint graphs: the ledger is that of the forward."""
    before, after, backward = (
        sum(getattr(graph, name) for graph in graphs) for name in ("joint_before", "joint_after", "backward")
    )
    captured = [graph for graph in graphs if graph.calls]
    summary = f"in {counted(len(captured), 'graph')}, where eager code makes {sum(g.assigned for g in captured)}"
    figures = [Figure("casts left", sum(g.casts for g in captured), summary)] if captured else []
    detail = f"forward and backward: {after}, {before} as autograd made them"
    return [*figures, *([Figure("casts of the backward", backward, detail)] if before else [])]


def _graph_tables(result: Explanation) -> list[Table]:
    rows = [
        [g.number, g.site, g.calls, g.assigned, g.shared, g.folded, g.dropped, g.casts, g.fallback or g.broken_by]
        for g in result.graph_rows()
    ]
    columns = (
        "graph:number, begins:line, steps:number, casts assigned:number, shared:number, folded:number, dropped:number, "
        "casts left:number, why it ends"
    )
    tables = table("graphs", "Graphs, and what the passes did", columns, rows)
    others = [[d.op, d.module_path, d.computes, d.eager, d.graph] for d in result.differences]
    columns = "op:op, module:module, computes:format, eager calls:number, graph calls:number"
    tables += table("differences", "Decided otherwise than in eager code", columns, others)
    return [*tables, *placements.tables(placements.placed_graphs(result.graphs))]


def count_as_recorded(graph: Graph, ledger: Ledger) -> None:
    """Give the nodes of eager code the bytes that were recorded, those of ops inside of a call among them."""
    recorded: Counter[tuple[str, str, str, int]] = Counter()
    for kind, tally in ledger.calls.items():
        recorded[kind.module_path, kind.op, kind.file, kind.line] += tally.moved_bytes
    places = [(node.path, node.op, node.file, node.line) for node in graph.nodes]
    often = Counter(places)
    for node, place_of_call in zip(graph.nodes, places, strict=True):
        node.bytes = recorded[place_of_call] // often[place_of_call] or node.bytes


FLOW = "Views and copies are left out; calls of a module that is called several times are one."
_MAKES = {"dgrad": (("makes", "the gradient of an input"),), "wgrad": (("makes", "the gradient of a weight"),)}


def flow_graph(flows: list[GraphFlow], ledger: Ledger) -> Graph:
    """Return the calls of captured graphs with the values between them; the ledger has why each computes as it does."""
    kinds: dict[tuple[str, str, str, int], list[CallKind]] = {}
    for kind in ledger.calls:
        kinds.setdefault((kind.module_path, kind.op, kind.file, kind.line), []).append(kind)
    nodes: list[Node] = []
    edges: list[Edge] = []
    for flow in flows:
        first = len(nodes)
        for step in flow.steps:
            alike = kinds.get((step.module_path, step.op, step.file, step.line), [])
            decided = next((k for k in alike if k.computes == step.computes), alike[0] if alike else None)
            action, reason = (decided.action, decided.reason) if decided is not None else ("", "")
            nodes.append(
                Node(step.module_path, step.op, f"#{step.number}" if step.number else "", 1,
                     "forward" if step.direction == "forward" else "backward", step.input_formats, step.computes,
                     step.result,
                     action, "", reason, step.file, step.line, step.moved_bytes, step.multiplications,
                     facts=_MAKES.get(step.direction, ()))
            )  # fmt: skip
        for edge in flow.edges:
            begin = OUTSIDE if edge.start == OUTSIDE else edge.start + first
            edges.append(Edge(begin, edge.end + first, *edge[2:]))
    return Graph(nodes, edges, flow=True, note=FLOW)
