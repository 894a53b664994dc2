"""The page of a comparison, and errors on other pages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from narrowcast.core.ops import is_named
from narrowcast.formats import FORMATS
from narrowcast.output.words import and_more, counted, number_text, or_infinity
from narrowcast.reports.documents.ledgers import ORDER, shares
from narrowcast.reports.documents.model import (
    Document,
    Figure,
    Graph,
    Node,
    Series,
    Shown,
    Table,
    Todo,
    facts_of,
    label_of,
    node_of,
    once,
)
from narrowcast.reports.documents.rules import is_low, keeping, rule_of_call, rule_todo
from narrowcast.reports.documents.tables import finding_table, module_table, op_table, table
from narrowcast.reports.documents.watches import finding_todos
from narrowcast.reports.documents.words import number, place
from narrowcast.reports.results.differences import (
    ANOTHER_MODEL,
    NO_GRADIENT,
    OUTPUT_FACTOR,
    SKIPPED_STEP,
    CallError,
    Differences,
    GradientError,
    Growth,
    Remedy,
)
from narrowcast.reports.results.verdicts import (
    AT_FAULT,
    EXACT,
    FAULT,
    NONDETERMINISTIC,
    NOT_COMPARED,
    NOT_FINITE,
    NOT_JUDGED,
    PASSED_ON,
    ROUND_OFF,
)

HALF_OF_ITS_SQUARE = math.sqrt(0.5)
"""Errors that have nothing to do with each other add up as squares do."""
_ERRORS = {
    "local": "local", "propagated": "propagated", "total": "total", "round_off_bound": "bound", "kernel": "kernel",
    "alone": "effect alone",
}  # fmt: skip
"""What the errors of a call are called where they are shown."""
SOUND = (EXACT, ROUND_OFF)
LINES_SHOWN = 3
"""How many lines a sentence names."""


def comparison_document(result: Differences) -> Document:
    """Return the page of the result of `nc.compare`."""
    nodes = [_node(row) for row in result.rows]
    tone = "bad" if result.verdict in AT_FAULT else "good"
    page = Document("comparison", result.subject, comparison_verdict(result), tone, graph=Graph(nodes, [], note=ORDER))
    under = f"{result.policy} in {result.low}" if result.policy else "the model's own casts"
    known = {"model": result.subject, "device": result.environment.get("device", result.device_type)}
    page.facts = facts_of(**known, policy=under, reference=result.reference, runs=result.runs)
    page.notes = _notes(result)
    differ, faults = sum(bool(row.total) for row in result.rows), len(result.faults)
    page.figures = [
        *output_figures(result),
        Figure("faults", faults, f"{'call' if faults == 1 else 'calls'} beyond round-off", "bad" if faults else "good"),
        Figure("calls", len(nodes), f"{differ} differ, {len(result.unmatched)} without a partner"),
    ]
    if result.compiled:
        detail = "off what these calls give one by one"
        page.figures.append(Figure("the compiler", result.compiled, detail, "bad", "relative"))
    page.figures += _gradient_figures(result.gradients)
    page.bars = shares(nodes, "calls", "Calls by format")
    page.todos = _todos(result)
    rules = [_rule(row) for row in result.rows]
    modules, calls = module_table(nodes), [*finding_table(nodes, rules), *error_table(result, nodes), *op_table(nodes)]
    page.tables = [
        *([*modules, *calls] if result.by == "module" else [*calls, *modules]),
        *output_table(result),
        *table("gradients", "Gradients", "parameter, format:format, relative error:error, cosine:number, "
               "underflow:share, verdict",
               [[g.parameter, g.format, number(g.relative_error), number(g.cosine), number(g.underflow), g.verdict]
                for g in result.gradients]),
        *table("unmatched", "Calls that only one side made", "call", [[u] for u in result.unmatched]),
    ]  # fmt: skip
    page.series = error_series(nodes)
    return page


_MUCH, _MOSTLY = 0.1, 0.5
"""An output error that is said to be large, whether or not it is round-off."""


def comparison_verdict(result: Differences) -> str:
    """Return the verdict, a colon, and why in figures; where something is not finite, which call was the first."""
    errors = [or_infinity(output.relative_error) for output in result.outputs]
    largest = max((o.largest_error for o in result.outputs), default=0.0)
    error = f"output error {number_text(max(errors))}" if errors else "no floating output"
    error += f" (largest {number_text(largest)})" if largest else ""
    band = f"; round-off bound {number_text(result.round_off_bound)}" if result.round_off_bound else ""
    if 0 < result.round_off_bound < max(errors, default=0.0) and result.verdict == ROUND_OFF:
        band += f", and up to {OUTPUT_FACTOR:.0f} times that is no fault"
    first = f"; first {result.not_finite.text}" if result.not_finite is not None else ""
    broken = [row.parameter for row in result.gradients if row.verdict == NOT_FINITE]
    if own := result.own_fault:
        if result.verdict == NOT_COMPARED:
            return f"{result.verdict.capitalize()}: not finite in the reference either: {own.text}"
        first = f"; not finite, in the reference either: {own.text}"
    elif result.verdict == NOT_FINITE and broken and not first:
        first = f"; {counted(len(broken), 'gradient', 'are')} not finite, the first of {broken[0]}"
    much = share_of_output(result)
    return f"{result.verdict.capitalize()}: {error}{band}{first or (much and f'; that is {much}')}"


def share_of_output(result: Differences) -> str:
    """Return how large an error within round-off is, where that is a good part of the output; else nothing."""
    error = max((or_infinity(output.relative_error) for output in result.outputs), default=0.0)
    return f"{error:.0%} of the output" if result.verdict == ROUND_OFF and _MUCH < error < math.inf else ""


def _notes(result: Differences) -> list[str]:
    """Return the notes; what the reference itself returns; and how little it helps to keep the worst call high, where
    no call makes most of the output's error.
    """
    own = None if result.own_fault else result.reference_not_finite
    notes = [f"{result.reference} itself: {own.text}"] if own else []
    low = [row for row in result.worst if row.is_low]
    total = max((o.relative_error for o in result.outputs), default=0.0)
    is_one = result.remedy is not None or not low or low[0].verdict in AT_FAULT
    if not is_one and low[0].alone < HALF_OF_ITS_SQUARE * total < math.inf:
        ops = {(row.id.module_path, row.id.op) for row in result.rows if row.is_low and row.local and not row.forward}
        worst = f"the worst makes {number_text(low[0].alone)} of {number_text(total)}"
        if len(ops) * low[0].alone ** 2 >= (HALF_OF_ITS_SQUARE * total) ** 2:  # else something else makes it
            notes.append(f"the error is spread over {len(ops)} ops: {worst}")
    return [*result.notes, *notes]


def _gradient_figures(rows: Sequence[GradientError]) -> list[Figure]:
    """Return the gradient that is furthest off, of those that are not zero up to round-off."""
    zero = [row for row in rows if row.is_round_off_alone and row.verdict != NOT_FINITE]
    others = [row for row in rows if row not in zero]
    details = []
    if others:
        worst = max(others, key=lambda row: or_infinity(row.relative_error))
        off = f"{number_text(worst.relative_error)}; cosine {worst.cosine:.4f}"
        off = "not finite in either run" if math.isnan(worst.cosine) and not worst.relative_error else off
        details.append(f"largest error: {worst.parameter} ({worst.format}), {off}")
        details += [f"{worst.underflow:.0%} underflow"] if worst.underflow >= 0.005 else []
    if zero:
        names = f"{zero[0].parameter}{', ...' if len(zero) > 1 else ''}"
        details.append(f"zero up to round-off: {len(zero)} ({names})")
    return [Figure("gradients", len(rows), "; ".join(details))] if rows else []


def _todos(result: Differences) -> list[Todo]:
    """Return what was tried and helps, or else the worst calls, unless all is round-off; a compiler's fault alone."""
    if result.compiled:
        return [Todo("Compile with backend='aot_eager'", "if that is right, the backend's code is not: report it")]
    if missing := [g.parameter for g in result.gradients if g.format == NO_GRADIENT and g.verdict == FAULT]:
        have = f"{counted(len(missing), 'parameter', 'have')} none here, and one in the reference"
        return [Todo(f"Find out why {missing[0]} has no gradient", f"{have}: what was made may lose a custom backward")]
    if alone := unmatched_todos(result):  # no rule helps
        return alone
    wrong = _first_fault(result)
    if wrong and result.reference == ANOTHER_MODEL and result.remedy is None:  # no format mends another argument
        return wrong
    if own := result.own_fault:
        return finding_todos(own)
    is_intended = SKIPPED_STEP in result.notes or all(number(g.share) is not None for g in result.gradients)
    if result.verdict == NOT_COMPARED and is_intended:
        return []  # or the program's own formats are in both
    if result.verdict == NOT_COMPARED:
        reference = "the reference" if result.reference == ANOTHER_MODEL else result.reference
        return [Todo(f"Fix what is not finite in {reference} either", "nc.watch() saw no call that made it")]
    is_made = not result.policy
    faults_only = result.verdict in (*SOUND, NOT_JUDGED, NONDETERMINISTIC) or (is_made and result.verdict == NOT_FINITE)
    return once(advice_todos(result) or error_todos(_worst(result.rows), faults_only, is_made))


def unmatched_todos(result: Differences) -> list[Todo]:
    """Return where a program computes otherwise in one of two runs, if that explains what is beyond round-off."""
    is_explained = result.verdict == FAULT and result.unmatched and not result.faults
    what = "Inspect the calls that one of the two alone makes"
    return [Todo(what, result.unmatched[0])] if is_explained else []


def advice_todos(result: Differences) -> list[Todo]:
    """Return what runs have shown to help, or else where the error is; nothing where nothing was tried."""
    remedy, growth = result.remedy, result.growth
    if remedy is not None:
        changes = [*_lines_to_change(remedy), *_rules_to_add(remedy)]
        region = Todo("Make it in a region (under=), of weights in fp32", _reached(remedy))
        return [*_unknown_ops(result), *_first_fault(result), *(changes or [region])]  # a cause before what helps
    if result.not_finite is not None:
        return finding_todos(result.not_finite)
    lost = max(result.gradients, key=lambda row: row.underflow, default=None)
    if lost is not None and lost.underflow > _MOSTLY and not lost.is_round_off_alone:
        why = f"{lost.underflow:.0%} of the gradient of {lost.parameter} underflow"
        return [Todo("Scale the loss (nc.Scaler), or use bf16", why)] if result.low != "bf16" else []
    if not result.tried or (result.verdict in SOUND and growth is None):
        return []
    if known := _first_fault(result):
        return known  # no rule changes another argument, or another shape
    what = "Find the rules that help: nc.repair(model, inputs, budget=...)"
    why = f"{counted(result.tried, 'run')} with other rules did not lower the error"
    if growth is not None:
        grows = f"the error grows from {number_text(growth.before)} to {number_text(growth.after)}"
        return [Todo(what, f"{why}; {grows} at {growth.id.op} ({place(growth.file, growth.line)})")]
    return [Todo(what, f"{why}; {row.id.op} ({place(row.file, row.line)}) is the worst") for row in result.worst[:1]]


def _look_at(row: CallError | Growth, why: str) -> Todo:
    return Todo(f"Look at {row.id.op} ({place(row.file, row.line)})", why)


def _first_fault(result: Differences) -> list[Todo]:
    """Return the first call at fault of which is known why."""
    found = [row for row in result.faults if row.verdict == FAULT and row.why]
    return [replace(_look_at(row, row.why), path=row.id.module_path) for row in found[:1]]


def _unknown_ops(result: Differences) -> list[Todo]:
    """Return the first op without a bound that adds far more than round-off to what its inputs brought."""
    found = [row for row in result.rows if row.verdict == NOT_JUDGED and row.local > OUTPUT_FACTOR * row.propagated]
    found = [row for row in found if not is_named(row.id.op, "growth.jumps")]  # these choose by what was rounded before
    if not found or found[0].local < max(row.local for row in result.rows):
        return []
    made = f"it makes an error of {number_text(found[0].local)}, beyond round-off, and no bound of its own is known"
    return [_look_at(found[0], made)]


def _lines_to_change(remedy: Remedy) -> list[Todo]:
    """Return the lines whose code asks for a low format itself."""
    if not remedy.asked:
        return []
    first, most = remedy.asked[0], 2 ** (FORMATS[remedy.asked[0].format].mantissa_bits + 1)
    why = f"it rounds whole numbers beyond {most}; " if first.rounds_whole else ""
    what = f"Ask for fp32 at {_lines(a.at for a in remedy.asked)}, where the code asks for {first.format} itself"
    return [Todo(what, f"{why}{_reached(remedy)}")]


def _rules_to_add(remedy: Remedy) -> list[Todo]:
    """Return the rules that were tried together, each with its text."""
    number = len(remedy.rules)
    at = f" ({_lines(remedy.lines)})" if remedy.lines else ""
    first = "" if number == 1 else f"with the {'rule' if number == 2 else 'rules'} below, "
    whys = [f"{first}{_reached(remedy)}{at}", *["the first helps only with it"] * (number - 1)]
    return [rule_todo(rule, why, together=number) for rule, why in zip(remedy.rules, whys, strict=False)]


def _lines(places: Iterable[tuple[str, int]]) -> str:
    """Return places as one text: `model.py:12, 14 and 3 more lines`."""
    every = list(dict.fromkeys(places))
    first, shown = every[0][0], [place(*every[0])]
    shown += [str(line) if file == first else place(file, line) for file, line in every[1:LINES_SHOWN]]
    left = len(every) - len(shown)
    return ", ".join(shown) + and_more(left, "line")


def _reached(remedy: Remedy) -> str:
    """Say in figures what a remedy leads to."""
    what = f"error of the gradient of {remedy.parameter}" if remedy.parameter else "output error"
    now = number_text(remedy.error)
    if not math.isfinite(remedy.before):
        return f"run so, it is finite, and the {what} is {now}"
    return f"run so, the {what} is {now}, not {number_text(remedy.before)}"


def _node(row: CallError) -> Node:
    node = node_of(row.id, row.computes, row.file, row.line)
    node.input_formats = row.reference
    _fill(node, row)
    alone = number(row.alone)
    figures = [("round-off may make", number_text(row.round_off_bound)), ("kernel alone", number_text(row.kernel))]
    figures += [("moves the output alone by", number_text(alone))] if alone is not None else []
    node.facts = tuple(figures)
    return node


def _fill(node: Node, row: CallError) -> None:
    node.local, node.propagated, node.total = number(row.local), number(row.propagated), number(row.total)
    node.verdict = row.verdict
    if row.verdict in AT_FAULT:
        node.finding = row.why or row.verdict


def add_errors(nodes: Iterable[Node], rows: Iterable[CallError]) -> None:
    """Add the errors of a comparison to the nodes of the same calls."""
    known = {(row.id.module_path, row.id.op, label_of(row.id), row.id.direction): row for row in rows}
    for node in nodes:
        error = known.get((node.path, node.op, node.label or "#1", node.direction))
        if error is not None:
            _fill(node, error)


def output_figures(result: Differences) -> list[Figure]:
    """Return the error of the output that is furthest off."""
    if not result.outputs:
        return []
    worst = max(result.outputs, key=lambda output: number(output.relative_error) or 0.0)
    detail = worst.name if (sqnr := number(worst.sqnr_db)) is None else f"{worst.name}, {sqnr:.1f} dB"
    band = f"; round-off bound {number_text(result.round_off_bound)}" if result.round_off_bound else ""
    tone = "bad" if result.verdict in AT_FAULT else ""
    return [Figure("output error", worst.relative_error, detail + band, tone, "relative")]


def error_todos(worst: Iterable[CallError], faults_only: bool = False, is_made: bool = False) -> list[Todo]:
    """Keep the calls most to blame in fp32. is_made: of a model that has its casts in it, on which no rule was tried:
    who made what is not finite may be another call.
    """
    todos: dict[str, Todo] = {}  # a rule is about all calls of the op in a module
    for row in worst:
        at_fault, alone = row.verdict in AT_FAULT, number(row.alone)
        says_nothing = row.verdict == PASSED_ON or (alone == 0 and not at_fault)
        if not is_low(row.computes) or at_fault < faults_only or says_nothing:
            continue
        if is_made and row.verdict == NOT_FINITE:
            at = f"Look at {row.id.op} ({place(row.file, row.line)})"
            why = "compare the model that this one was made of: there rules are tried, and the one that helps is named"
            todos.setdefault(at, Todo(at, f"{row.why}; {why}", path=row.id.module_path))
            continue
        why = f"its local error is {number_text(row.local)}"
        why = f"alone it moves the output by {number_text(alone)}" if alone is not None else why
        why = f"it is at fault: {row.why}" if at_fault else why
        call, rule = row.forward or row.id, _rule(row, why.partition(":")[0])
        if rule:
            todo = Todo(keeping(call.op, call.module_path), why, rule, call.module_path)
            todos.setdefault(todo.what, todo)
    return [*todos.values()]


def _rule(row: CallError, reason: str = "") -> Shown:
    """Return the rule that keeps a call, or its backward's forward call, in fp32; none for a call that is not lower."""
    return rule_of_call(row.forward or row.id, row.computes, reason)


def _worst(rows: Iterable[CallError]) -> list[CallError]:
    """Return the calls most to blame first: at fault, then what moves the output most, then local error."""

    def key(row: CallError) -> tuple[float, ...]:
        alone = number(row.alone)
        return row.verdict not in AT_FAULT, -(alone if alone is not None else -1.0), -(number(row.local) or 0.0)

    return sorted((row for row in rows if row.local), key=key)


def output_table(result: Differences) -> list[Table]:
    """Return the error of each output."""
    rows = [
        [o.name, o.reference, o.found, number(o.relative_error), number(o.sqnr_db), number(o.largest_error)]
        for o in result.outputs
    ]
    columns = "output, reference, found, relative error:error, SQNR:decibels, largest error:error"
    return table("outputs", "Outputs", columns, rows)


def error_table(compared: Differences, nodes: Sequence[Node]) -> list[Table]:
    """Return the errors of each call, in order; those most to blame are the first rows to read."""
    errors = ", ".join(f"{name}:error" for name in _ERRORS.values())
    columns = f"module:module, op:op, call, direction, computes:format, verdict, {errors}, line:line"
    cells = [
        [row.id.module_path, row.id.op, label_of(row.id), row.id.direction, row.computes, row.verdict,
         *(number(getattr(row, name)) for name in _ERRORS), place(row.file, row.line)]
        for row in compared.rows
    ]  # fmt: skip
    at = {id(row): n for n, row in enumerate(compared.rows)}
    rules = map(_rule, compared.rows)
    first = [at[id(row)] for row in compared.worst]
    return table(
        "errors",
        "Errors of each call: local (its own), propagated, total",
        columns,
        cells,
        rules,
        nodes,
        first,
    )


def error_series(nodes: list[Node]) -> list[Series]:
    """Return the error by depth: local and propagated, of forward calls in order."""
    at = [i for i, n in enumerate(nodes) if n.local is not None and n.direction == "forward"]
    if len(at) < 2:
        return []
    names = ("local", "propagated", "total")
    lines = [(_ERRORS[name], [getattr(nodes[i], name) or None for i in at]) for name in names]
    xs = [float(n) for n in range(1, len(at) + 1)]
    return [Series("Error by depth", "call, in order", "relative error", xs, lines, "whole", "relative", True, at)]
