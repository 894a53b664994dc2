"""The page of a profile: time against size by family and format, where the lines cross, and what the device runs."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from narrowcast.core.ops import ATTENTION, CONV, COPY, FAMILIES, GEMM
from narrowcast.core.policy.capabilities import RAISES, RUNS
from narrowcast.output.words import counted
from narrowcast.reports.documents.model import Document, Figure, Series, Table, Todo, facts_of
from narrowcast.reports.documents.tables import table
from narrowcast.reports.documents.words import in_count, without_format
from narrowcast.reports.results.profile import Profile, Sample

HIGH = "fp32"
LEAST_DIFFERENCE = 0.05
"""Times that differ by less than that are as good as equal; by more, where the quartiles of both are further apart."""
POINTS = (
    "A point is the median over the calls of about one size (within a factor of two) that were measured in all of "
    "these formats."
)


@dataclass(frozen=True, slots=True)
class MeasuredCall:
    """One call of a family and direction, with its sample in each format. size: see `_size`."""

    text: str
    size: float
    samples: Mapping[str, Sample]


Crossing = tuple[str, float, float, str, str]
"""Where the lines of a low format and of fp32 cross: that format, size and ns of the point; which is faster below, and
above.
"""


def profile_document(profile: Profile) -> Document:
    """Return the page of a profile."""
    device = profile.device
    groups = _groups(profile.samples)
    ratios = _ratios(groups)
    page = Document("profile", device.name, _verdict(ratios))
    name, units = f"{device.name} ({device.type})", ", ".join(device.units) or "unknown"
    page.facts = facts_of(device=name, units=units, threads=device.threads, torch=device.torch)
    page.figures = _figures(profile, ratios)
    page.todos = _todos(profile)
    page.notes = [busy_note(profile)] if profile.is_busy else []
    crossings: list[list[Any]] = []
    for (family, backward), calls in groups.items():
        series, crossed = _plot(family, backward, calls)
        page.series += series
        crossings += [
            [family, _direction(backward), low, size, _unit(family), *others] for low, size, *others in crossed
        ]
    abilities = [[one.op, one.format, one.direction, one.state, one.error] for one in profile.abilities.values()]
    page.tables = [
        *table("faster", "A low format's time over fp32's, by family", "family, direction, format:format, "
               "calls:number, median:number, least:number, most:number", ratios),
        *table("crossings", "Where lines cross: the faster format below and above that size", "family, direction, "
               "format:format, size:number, of, time:ns, faster below:format, faster above:format", crossings),
        *table("capabilities", "What the device runs, by the smallest call of each op", "op:op, format:format, "
               "direction, state, it says", sorted(abilities, key=lambda row: row[3] == RUNS)),  # what it refuses first
        *_calls(groups),
    ]  # fmt: skip
    return page


def busy_note(profile: Profile) -> str:
    """Return what a profile of a busy machine is worth."""
    return f"The machine was busy (load {profile.load:.1f}): times are too long, and spread"


Groups = dict[tuple[str, bool], list[MeasuredCall]]


ONE_ROW = f"{GEMM}, one row"
_ORDER = [name for family in FAMILIES for name in ((GEMM, ONE_ROW) if family == GEMM else (family,))]
_MULTIPLY = (GEMM, ONE_ROW, CONV, ATTENTION)


def _groups(samples: Mapping[str, Sample]) -> Groups:
    """Return calls by family and direction, families in their order; of copies the formats that they are between.
    Matrix-vector products, which read more bytes than they multiply, are as slow as memory is: a family of their own.
    """
    calls: dict[tuple[str, bool], dict[str, dict[str, Sample]]] = {}
    for text, sample in sorted(samples.items()):  # in whatever order they were measured
        family, name = sample.family, sample.format
        plain = without_format(text, name)
        if family == GEMM and sample.flops < 2 * sample.moved_bytes:
            family = ONE_ROW
        if family == COPY:
            src = text.partition("(")[2].partition("[")[0]
            name, plain = f"{src} to {name}", plain.replace(f"{src}[", "[")
        calls.setdefault((family, sample.backward), {}).setdefault(plain, {})[name] = sample
    known = sorted((key for key in calls if key[0] in _ORDER), key=lambda key: (_ORDER.index(key[0]), key[1]))
    return {
        key: [MeasuredCall(text, _size(key[0], next(iter(each.values()))), each) for text, each in calls[key].items()]
        for key in known
    }


def _size(family: str, sample: Sample) -> float:
    """Return the size that a time is drawn over: two operations are one multiplication."""
    return sample.flops / 2 if family in _MULTIPLY else float(sample.elements)


def _unit(family: str) -> str:
    return "multiplications" if family in _MULTIPLY else "elements of the largest tensor"


def _direction(backward: bool) -> str:
    return "with backward" if backward else "forward"


def _ratios(groups: Groups) -> list[list[Any]]:
    """Return a row for each family, direction and low format: the ratio of its times to those of fp32."""
    rows = []
    for (family, backward), calls in groups.items():
        for low in dict.fromkeys(name for call in calls for name in call.samples):
            ratios = [c.samples[low].ns / c.samples[HIGH].ns for c in calls if {low, HIGH} <= set(c.samples)]
            if low != HIGH and ratios:
                median = statistics.median(ratios)
                rows.append([family, _direction(backward), low, len(ratios), median, min(ratios), max(ratios)])
    return rows


def _verdict(ratios: list[list[Any]]) -> str:
    parts = []
    for low in dict.fromkeys(row[2] for row in ratios):
        forward = [(row[0], row[4]) for row in ratios if row[2] == low and row[1] == "forward"]
        faster = [family for family, ratio in forward if ratio < 1 / (1 + LEAST_DIFFERENCE)]
        slower = [family for family, ratio in forward if ratio > 1 + LEAST_DIFFERENCE]
        words = [f"{word} in {', '.join(them)}" for word, them in (("faster", faster), ("slower", slower)) if them]
        if forward:
            parts.append(f"{low} is {' and '.join(words) if words else 'as fast everywhere'}")
    return f"Against fp32, {'; '.join(parts)}" if parts else "No call was measured in two formats"


def _figures(profile: Profile, ratios: list[list[Any]]) -> list[Figure]:
    figures = [Figure("samples", len(profile.samples), "calls in one format and direction")]
    for family, direction, low, calls, median, *_ in ratios:
        if family == GEMM and direction == "forward":
            of, tone = f"median of {counted(calls, 'call')}", "good" if median < 1 else ""
            figures.append(Figure(f"{low} matmuls", median, of, tone, "times fp32"))
    for row in profile.emulated():
        figures.append(Figure(f"{row.format} {row.family}", "emulated", f"{row.ratio:.1f} x fp32's time"))
    raises = sum(one.state == RAISES for one in profile.abilities.values())
    if profile.abilities:
        tone = "bad" if raises else "good"
        figures.append(Figure("refused", raises, f"of {len(profile.abilities)} asked: op, format, direction", tone))
    return figures


def _todos(profile: Profile) -> list[Todo]:
    emulated = profile.emulated()
    if not emulated:
        return []
    which = ", ".join(f"{row.family} in {row.format}" for row in emulated)
    why = f"this device only emulates {which}: native autocasting lowers just these, and is slower than fp32"
    fast = f'nc.compile(model, under="{emulated[0].format}", goal="fast")'
    return [Todo(f"Choose formats by measured time: {fast}", why)]


def _plot(family: str, backward: bool, calls: list[MeasuredCall]) -> tuple[list[Series], list[Crossing]]:
    """Return time over size, a line for each format; and where lines cross."""
    common = Counter(frozenset(call.samples) for call in calls).most_common()
    formats = max(common, key=lambda each: (len(each[0]) > 1, each[1], len(each[0])))[0]
    order = [name for name in dict.fromkeys(n for c in calls for n in c.samples) if name in formats]
    order.sort(key=lambda name: name != HIGH)
    bins: dict[int, list[MeasuredCall]] = {}
    for call in calls:
        if formats <= set(call.samples) and call.size > 0:
            bins.setdefault(round(math.log2(call.size)), []).append(call)
    if len(bins) < 2:
        return [], []
    points = [bins[key] for key in sorted(bins)]
    xs = [statistics.geometric_mean(call.size for call in inside) for inside in points]
    times = {name: [statistics.median(c.samples[name].ns for c in inside) for inside in points] for name in order}
    unsure = {name: [statistics.median(c.samples[name].spread for c in inside) for inside in points] for name in order}
    lows = [name for name in order if name != HIGH] if HIGH in times and family != COPY else []
    crossings = [crossing for low in lows for crossing in _crossings(low, xs, times, unsure)]
    marks = [(size, ns, f"{above} faster above {in_count(size)}") for _, size, ns, _, above in crossings]
    title = f"{family}: time over size" + (", with backward" if backward else "")
    lines: list[tuple[str, list[float | None]]] = [(name, list(times[name])) for name in order]
    series = Series(
        title, _unit(family), "time", xs, lines, "multiplications", "ns", log=True, log_x=True, marks=marks, note=POINTS
    )
    return [series], crossings


def _crossings(
    low: str, xs: list[float], times: Mapping[str, list[float]], unsure: Mapping[str, list[float]]
) -> Iterable[Crossing]:
    """Yield crossings between sizes at which one format, then the other, is faster by more than the samples' spread."""
    gaps = [math.log(a / b) for a, b in zip(times[low], times[HIGH], strict=True)]
    least = [math.log1p(max(LEAST_DIFFERENCE, a + b)) for a, b in zip(unsure[low], unsure[HIGH], strict=True)]
    sure = [k for k, (gap, bound) in enumerate(zip(gaps, least, strict=True)) if abs(gap) > bound]
    for first, last in pairwise(sure):
        if gaps[first] * gaps[last] < 0:
            at = next(k for k in range(first, last) if gaps[k] * gaps[first] > 0 >= gaps[k + 1] * gaps[first])
            part = gaps[at] / (gaps[at] - gaps[at + 1])
            size = xs[at] * (xs[at + 1] / xs[at]) ** part
            ns = times[HIGH][at] * (times[HIGH][at + 1] / times[HIGH][at]) ** part
            below, above = (low, HIGH) if gaps[first] < 0 else (HIGH, low)
            yield low, size, ns, below, above


def _calls(groups: Groups) -> list[Table]:
    rows = []
    for (family, backward), calls in groups.items():
        for call in sorted(calls, key=lambda each: each.size):
            for name, sample in call.samples.items():
                high = call.samples.get(HIGH)
                ratio = sample.ns / high.ns if high is not None and name != HIGH else None
                rows.append([family, _direction(backward), call.text, name, call.size, sample.ns, ratio,
                             sample.spread])  # fmt: skip
    columns = "family, direction, call, format:format, size:number, time:ns, over fp32:number, spread:share"
    return table("samples", "Every call that was measured", columns, rows)
