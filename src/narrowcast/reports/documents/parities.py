"""The pages of parity and of invariance: how far apart numbers are, why, and where that begins."""

from __future__ import annotations

import math

from narrowcast.output.words import counted, number_text
from narrowcast.reports.documents.model import Document, Figure, Series, Table, Todo
from narrowcast.reports.documents.tables import table
from narrowcast.reports.documents.words import number
from narrowcast.reports.results.invariance import Invariance, Variant
from narrowcast.reports.results.parity import NATS, Cause, Distance, Parity
from narrowcast.reports.results.verdicts import CACHE, LEAK, NOT_JUDGED

ENGINES = (("fp32 in both", 0.0022), ("bf16, with the head in fp32", 0.03))
"""The rms, in nats, of the log-probabilities of a trainer and an engine that agree as well as these formats let them:
Qwen2.5-0.5B, Fast-LLM, pull request 525.
"""


def parity_document(result: Parity) -> Document:
    """Return the page of parity; it has no graph."""
    tone = "bad" if result.is_over else "good"
    page = Document("parity", f"{result.a} against {result.b}", parity_verdict(result), tone)
    page.facts = [("a", result.a), ("b", result.b)]
    page.facts += [(name, f"{a} / {b}") for name, a, b in result.environment[:6]]
    page.figures = _figures(result, tone)
    page.todos = [
        Todo(_sentence(cause.todo), _why(result, cause), path=cause.module) for cause in result.causes if cause.todo
    ]
    page.notes = list(result.notes)
    page.tables = _tables(result)
    page.series = _by_depth(result)
    return page


def _tables(result: Parity) -> list[Table]:
    causes = [
        [
            c.kind,
            c.what,
            "confirmed" if c.is_confirmed else "likely",
            number(c.before),
            number(c.after),
            c.module,
            c.place,
        ]
        for c in result.causes
    ]
    shares = [[s.since, s.module, s.a, *map(number, (s.amount, s.before, s.after)), s.place] for s in result.shares]
    routed = [[r.module, r.op, r.rows, r.of, r.place] for r in result.routed]
    of_causes = "cause, what, confirmed, before:error, with a's:error, module:module, line:line"
    of_shares = "after, up to:module, in a:module, share:error, before:error, with it equal:error, line:line"
    brings = "What each stretch of modules brings: with results before it equal, then its own, too"
    return [
        *table("causes", "Causes, and the distance before and after b was given a's", of_causes, causes),
        *table("shares", brings, of_shares, shares, first=_largest(result)),
        *table(
            "routing", "Calls that choose otherwise", "module:module, op:op, rows:number, of:number, line:line", routed
        ),
        *table("environment", "What differs between the environments", "name, in a, in b", result.environment),
    ]


def parity_verdict(result: Parity) -> str:
    """Return the verdict in a sentence."""
    distance = result.distance
    is_known = not math.isnan(distance.rms)
    far = f"{number_text(distance.rms)} {_unit(distance)} apart" if is_known else "it is not known how far apart"
    limit = "" if result.limit is None else f", {'over' if result.is_over else 'within'} the limit of {result.limit:g}"
    cause = f": {result.causes[0].what}" if result.causes and result.causes[0].what else ""
    return f"{result.verdict.capitalize()}: {far}{limit}{cause}"


def _unit(distance: Distance) -> str:
    return f"{NATS} rms" if distance.unit == NATS else "of the output"


def _why(result: Parity, cause: Cause) -> str:
    how = "confirmed" if cause.is_confirmed else "likely"
    unit = NATS if result.distance.unit == NATS else "of the output"
    if math.isfinite(cause.before) and math.isfinite(cause.after):
        how += f": {number_text(cause.before)} {unit} become {number_text(cause.after)} with a's"
    place = f" ({cause.place})" if cause.place else ""
    return f"{cause.kind}, {how}; {cause.what}{place}"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _figures(result: Parity, tone: str) -> list[Figure]:
    distance = result.distance
    if distance.unit != NATS:
        return [Figure("outputs", distance.rms, "relative error (L2), b against a", tone, unit="relative")]
    if not distance.count:
        return [Figure("log-probabilities", "not compared", "no token is the same")]
    engines = ", ".join(f"{nats:g} for {what}" for what, nats in ENGINES)
    detail = f"rms, in nats, of {counted(distance.count, 'token')}; p99 {number_text(distance.p99)}, largest "
    detail += f"{number_text(distance.largest)} at {distance.at}; engines that agree: {engines}"
    ratio = f"largest of the tokens' ratios; k1 {distance.k1:+.1e}, k3 {number_text(distance.k3)} nats of KL"
    figures = [
        Figure("log-probabilities", distance.rms, detail, tone, unit="relative"),
        Figure("probability ratio", distance.ratio, ratio),
    ]
    if result.limit is not None:
        figures.append(Figure("over the limit", distance.over, f"of {counted(distance.count, 'token')}"))
    return figures


def _largest(result: Parity) -> list[int]:
    order = sorted(range(len(result.shares)), key=lambda n: -abs(result.shares[n].amount))
    return sorted(order[:5])


def _by_depth(result: Parity) -> list[Series]:
    """Return the distance that is left by depth: with everything up to there made equal."""
    if len(result.shares) < 2:
        return []
    left: list[float | None] = [result.shares[0].before, *(share.after for share in result.shares)]
    xs = [float(n) for n in range(len(left))]
    title = "Distance with all results up to there made equal"
    return [Series(title, "stretch of modules", result.distance.unit, xs, [("distance", left)], "whole", "relative")]


def invariance_document(result: Invariance) -> Document:
    """Return the page of a check of invariance; it has no graph."""
    page = Document("invariance", result.model, invariance_verdict(result), "good" if result else "bad")
    varying = result.varying
    page.facts = [("model", result.model), ("runs", str(result.runs))]
    same = len(result.variants) - len(varying)
    largest = max((variant.error for variant in result.variants), default=0.0)
    page.figures = [
        Figure("the same bits", same, f"of {counted(len(result.variants), 'way')} to run one sample"),
        Figure("largest error", largest, "relative (L2), of the sample's output", unit="relative"),
    ]
    page.todos = [_todo(variant) for variant in varying if variant.verdict in (LEAK, CACHE)][:3]
    page.notes = list(result.notes)
    columns = "run as, verdict, error:error, round-off:error, first call that differs:call, alone, there, line:line"
    rows = [
        [v.name, v.verdict, number(v.error), number(v.bound), str(v.call or ""), *v.shapes, v.place]
        for v in result.variants
    ]
    page.tables = table("variants", "One sample, run in other ways", columns, rows)
    return page


def invariance_verdict(result: Invariance) -> str:
    """Return the verdict in a sentence."""
    varying = result.varying
    if not varying:
        return f"Invariant: the same bits in {counted(len(result.variants), 'way')} to run one sample"
    worst = max(varying, key=lambda variant: (variant.verdict == result.verdict, variant.error))
    if result.verdict == NOT_JUDGED:
        return f"Not judged: nothing of the output was found to be the sample's, as in a {worst.name}"
    far = "nothing there is the sample's" if worst.verdict == LEAK else f"{number_text(worst.error)} off"
    shared = f"{worst.shared[0]} elements depend on others, too" if worst.shared[0] else far
    first = next((v for v in varying if v.call is not None and v.verdict == result.verdict), None)
    begins = f", from {first.call} on" if first is not None else ""
    return f"{result.verdict.capitalize()}: {worst.name} gives other numbers, {shared}{begins}"


def _todo(variant: Variant) -> Todo:
    if variant.verdict == LEAK:
        what = f"Compute {variant.call} for each sample by itself" if variant.call else "Look for what samples share"
        why = f"{variant.name}: {variant.shared[0]} of {variant.shared[1]} elements depend on other samples"
        return Todo(what, f"{why} ({variant.place})" if variant.place else why)
    why = f"{variant.name} is {number_text(variant.error)} off, where rounding makes {number_text(variant.bound)}"
    return Todo("Compare masks and positions", why)
