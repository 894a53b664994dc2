"""The page of two runs side by side: what `nc.compare_runs` found."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from narrowcast.reports.documents.ledgers import shares
from narrowcast.reports.documents.model import Bar, Figure, Page, Pair, PairRow, Series, Table, Todo
from narrowcast.reports.documents.run_sides import SideGraph
from narrowcast.reports.documents.tables import table
from narrowcast.reports.documents.words import counted, error_text, number, split_identity

Data = Mapping[str, Any]
DIFFERS, INHERITED = "differs", "inherited"
ENVIRONMENT = 6
"""So many differences of the environments are told on the first screen; the table has all."""
LETTERS = 40
VERDICTS = ("equal", "round-off", INHERITED, DIFFERS, "not compared")


def run_differences_page(data: Data) -> Page:
    """The page of what `nc.compare_runs` found. With both runs, if they are there; a saved one has none."""
    names = (data["a"], data["b"])
    sides = SideGraph(data, "a"), SideGraph(data, "b")
    rows = [_pair_row(row, sides) for row in data["rows"]]
    _mark(data["rows"], rows, sides)
    _mark_alone(data["unaligned"], sides)
    bad = data["verdict"] == "values differ"
    tone = "bad" if bad else "" if data["verdict"] == "not compared" else "good"
    title, verdict = f"{names[0]} against {names[1]}", data.get("summary") or data["verdict"].upper()
    page = Page("comparison of runs", title, verdict, tone, graph=sides[0].graph)
    page.pair = Pair(names, sides[1].graph, [row for row in rows if row.a or row.b], data.get("by_hand", ""))
    page.facts = _facts(data)
    page.figures = _figures(data)
    page.bars = _bars(data, sides)
    page.todos = _todos(data)
    page.tables = _tables(data)
    page.series = _series(rows)
    page.notes = list(data["notes"])
    return page


def _pair_row(row: Data, sides: tuple[SideGraph, SideGraph]) -> PairRow:
    return PairRow(
        sides[0].numbers(row["a"]), sides[1].numbers(row["b"]), row["verdict"], _difference(row), number(row["inputs"]),
        number(row["band"]) if row["measured_by"] else None, row["measured_by"], row["aligned_by"],
        row["format_a"], row["format_b"], _given(row), row["why"],
    )  # fmt: skip


def _difference(row: Data) -> float | None:
    return number(row["difference"]) if row["measured_by"] else None


def _given(row: Data) -> str:
    return "; ".join(f"{name} {a} / {b}" for name, a, b in row["given"])


def _mark(data: Iterable[Data], rows: Iterable[PairRow], sides: tuple[SideGraph, SideGraph]) -> None:
    """A call that makes a difference is a finding on both sides."""
    for row, pair in zip(data, rows, strict=True):
        if row["verdict"] == DIFFERS:
            said = f"{row['why']}: it differs by {error_text(row['difference'])}, where round-off may make "
            for numbers, side in ((pair.a, sides[0]), (pair.b, sides[1])):
                for n in numbers:
                    side.graph.nodes[n].finding = said + error_text(row["band"])


def _mark_alone(data: Iterable[Data], sides: tuple[SideGraph, SideGraph]) -> None:
    """So is a call without a partner that does."""
    for one in data:
        side = sides["ab".index(one["run"])]
        said = f"only this run makes it: what comes of it is {error_text(one.get('apart', 0.0))} apart"
        for n in side.numbers([one["id"]]) if one.get("apart") else ():
            side.graph.nodes[n].finding = said


def _facts(data: Data) -> list[tuple[str, str]]:
    facts = [("a", data["a"]), ("b", data["b"])]
    differ = data["environment"]
    facts += [(name, f"{_short(a)} / {_short(b)}") for name, a, b in differ[:ENVIRONMENT]]
    if len(differ) > ENVIRONMENT:
        facts.append(("environment", f"{len(differ) - ENVIRONMENT} differences more, in the tables"))
    return facts if differ else [*facts, ("environment", "the same")]


def _short(text: str) -> str:
    """A digest by its first digits; the table has all of them."""
    return text if len(text) <= LETTERS else f"{text[: LETTERS - 1]}…"


def _figures(data: Data) -> list[Figure]:
    rows = data["rows"]
    made = [row for row in rows if row["verdict"] == DIFFERS]
    made += [one for one in data["unaligned"] if one.get("apart")]
    inherit = sum(row["verdict"] == INHERITED for row in rows)
    known = [d for d in map(_difference, rows) if d is not None]
    formats = sum(row["format_a"] != row["format_b"] for row in rows)
    alone = [sum(one["run"] == run for one in data["unaligned"]) for run in "ab"]
    compared = sum(bool(row["measured_by"]) for row in rows)
    found = [
        Figure("pairs of calls", len(rows), f"{compared} compared"),
        Figure("make a difference", len(made), f"{inherit} inherit one", "bad" if made else "good"),
        Figure("in other formats", formats, "pairs"),
        Figure("without a partner", sum(alone), f"{alone[0]} of a, {alone[1]} of b"),
    ]
    if known:
        found.append(Figure("largest difference", max(known), "relative, of what a call gives", unit="relative"))
    if data["gradients"]:
        far = [g for g in data["gradients"] if _is_beyond(g)]
        tone = "bad" if far else "good"
        found.append(Figure("gradients", len(data["gradients"]), f"{len(far)} beyond round-off", tone))
    tokens = data["tokens"]
    if tokens and tokens["count"]:
        detail = f"rms, in nats, of {counted(tokens['count'], 'token')}; largest {error_text(tokens['largest'])}"
        found.append(Figure("log-probabilities", tokens["rms"], detail, unit="relative"))
    return found


def _is_beyond(gradient: Data) -> bool:
    difference, band = number(gradient["difference"]), number(gradient["band"])
    return difference is None or (band is not None and difference > band)


def _bars(data: Data, sides: tuple[SideGraph, SideGraph]) -> list[Bar]:
    """Calls and bytes by format in either run, then what changed from one to the other, and what came of it."""
    bars = [
        shares(side.graph.nodes, unit, f"{title} by format, {name}")
        for unit, title in (("calls", "Calls"), ("bytes", "Bytes"))
        for side, name in zip(sides, "ab", strict=True)
    ]
    changes = _counts(f"{row['format_a']} → {row['format_b']}" for row in data["rows"]
                      if row["format_a"] != row["format_b"])  # fmt: skip
    verdicts = _counts(row["verdict"] for row in data["rows"])
    bars.append(Bar("What changed: pairs in other formats, a → b", "pairs", changes))
    bars.append(Bar("Pairs by verdict", "pairs", tuple(sorted(verdicts, key=lambda part: VERDICTS.index(part[0])))))
    return [bar for bar in bars if bar.parts]


def _counts(names: Iterable[str]) -> tuple[tuple[str, float], ...]:
    found: dict[str, float] = {}
    for name in names:
        found[name] = found.get(name, 0) + 1
    return tuple(sorted(found.items(), key=lambda part: -part[1]))


def _todos(data: Data) -> list[Todo]:
    """What the first screen advises; the first call in another value; the first in another format."""
    rows = data["rows"]
    value = next((row for row in rows if row["verdict"] == DIFFERS), None)
    format = next((row for row in rows if row["format_a"] != row["format_b"]), None)
    todos = []
    if value is not None:
        why = f"{value['why']}; {_given(value)}" if value["given"] else value["why"]
        todos.append(Todo(f"First in value: {' + '.join(value['a'])}", why, path=_path(value)))
    if format is not None:
        said = f"{format['format_a'] or 'no format'} in a, {format['format_b'] or 'no format'} in b"
        todos.append(Todo(f"First in format: {' + '.join(format['a'])}", said, path=_path(format)))
    if data.get("advice"):
        todos.append(Todo(data["advice"][:1].upper() + data["advice"][1:], ""))
    return todos


def _path(row: Data) -> str:
    return split_identity(row["a"][0])[0]


def _tables(data: Data) -> list[Table]:
    rows = data["rows"]
    columns = (
        "call of a:call, call of b:call_b, in a:format, in b:format, verdict, difference:error, "
        "round-off may make:error, inputs differ by:error, measured by, paired by, given, why, "
        "line of a:line, line of b:line"
    )

    def cells(row: Data) -> list[Any]:
        band = number(row["band"]) if row["measured_by"] else None
        return [
            " + ".join(row["a"]), " + ".join(row["b"]), row["format_a"], row["format_b"], row["verdict"],
            _difference(row), band, number(row["inputs"]), row["measured_by"], row["aligned_by"], _given(row),
            row["why"], row["place_a"], row["place_b"],
        ]  # fmt: skip

    marked = [row for row in rows if row["verdict"] == DIFFERS or row["format_a"] != row["format_b"]]
    return [
        *table("differences", "Pairs that make a difference, or compute in other formats", columns, map(cells, marked)),
        *table("pairs", "Every pair of calls, in the order of a", columns, map(cells, rows)),
        *_alone(data, "a", "call"),
        *_alone(data, "b", "call_b"),
        *table("environment", "What differs between the environments", "name, in a, in b", data["environment"]),
        *table("gradients", "Gradients of parameters", "parameter of a, parameter of b, difference:error, "
               "round-off may make:error, measured by",
               [[" + ".join(g["a"]), " + ".join(g["b"]), number(g["difference"]), number(g["band"]), g["measured_by"]]
                for g in data["gradients"]]),
    ]  # fmt: skip


def _alone(data: Data, run: str, kind: str) -> list[Table]:
    rows = [[one["id"], one["after"], one["why"], one["place"]] for one in data["unaligned"] if one["run"] == run]
    columns = f"call:{kind}, after:{kind}, why, line:line"
    return table(f"only in {run}", f"Calls of {run} without a partner", columns, rows)


def _series(rows: list[PairRow]) -> list[Series]:
    """The difference by depth, with what round-off explains of it."""
    forward = [row for row in rows if row.difference is not None and row.a]
    if len(forward) < 2:
        return []
    lines = [
        ("difference", [row.difference or None for row in forward]),
        ("round-off", [r.band or None for r in forward]),
    ]
    xs = [float(n) for n in range(1, len(forward) + 1)]
    return [Series("Difference by depth", "pair, in order of a", "relative difference", xs, lines, "whole", "relative",
                   log=True, nodes=[row.a[0] for row in forward])]  # fmt: skip
