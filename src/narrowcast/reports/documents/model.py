"""A result's document, under the schema `narrowcast.page/1`: what all renderers draw and say, and nothing else.

Every word that comes from a user (module paths, files, reasons) is text here and stays text on the page.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any

from narrowcast.core.ledger.identity import CallId
from narrowcast.formats import FORMATS
from narrowcast.reports.documents.words import in_unit

SCHEMA = "narrowcast.page/1"
FIRST_TODOS = 3
"""How many things to do a first screen, a notebook and an open page show; the others are folded."""
OUTSIDE = -1
"""The end of an edge that is no call: a weight, an input, or what nobody has seen being made."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A number worth reading first. tone: `good`, `bad`, or nothing to say.

    unit: of the amount: `bytes`, `ns`, `relative` (an error), `times fp32`; nothing for a count, or a number of the
    user's own. value: both in words.
    """

    name: str
    amount: float | str
    detail: str = ""
    tone: str = ""
    unit: str = ""
    value: str = field(init=False)

    def __post_init__(self) -> None:
        if isinstance(self.amount, float) and not math.isfinite(self.amount):
            object.__setattr__(self, "amount", str(self.amount))
        object.__setattr__(self, "value", in_unit(self.amount, self.unit))


@dataclass(frozen=True, slots=True)
class Bar:
    """Shares of a whole by format; of `pairs` by verdict, too. unit: `calls`, `bytes`, `multiplications`, `ns` or
    `pairs`.
    """

    title: str
    unit: str
    parts: tuple[tuple[str, float], ...]


Shown = Mapping[str, str]
"""A rule by the keys of a policy file; empty where there is none."""


@dataclass(frozen=True, slots=True)
class Todo:
    """Something worth doing: what, why, and the rule that does it (keys as in a policy file), if one does.

    together: how many, from the first on, help only together.
    """

    what: str
    why: str
    rule: Shown = field(default_factory=dict)
    path: str = ""
    together: int = 1


def once(todos: Sequence[Todo]) -> list[Todo]:
    """Return each recommendation, with its rule, once: the first of those that say the same."""
    first = {(todo.what, str(todo.rule)): todo for todo in reversed(todos)}
    return list(first.values())[::-1]


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table. kind: `text`, `number`, `bytes`, `ns`, `decibels`, `bits`, `share`, `error`, `format`, `op`,
    `module` or `line`; `call` or `call_b`: identities of calls of the first run, or of the second, with ` + ` between
    several.
    """

    name: str
    kind: str = "text"


@dataclass(frozen=True, slots=True)
class Table:
    """A table that can be sorted and filtered. rules: for each row the rule that would change it, empty where none
    does; or none at all. shared: ops, and globs on modules that represent all rules of alike modules.
    first: numbers of the rows to be shown first; none where that is their own order.
    """

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: list[list[Any]]
    rules: list[Shown] = field(default_factory=list)
    shared: list[tuple[str, str]] = field(default_factory=list)
    first: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Node:
    """Calls of one op at one place that are alike: what is drawn as a box.

    input_formats, computes, result: formats of inputs, compute and outputs, several with commas. label: which call of
    its op it is (`#2`). bytes: read and written. multiplications: as ops/multiplications.py counts them. ns: measured
    or predicted time. local, propagated, total: relative errors. None: not known. finding: why it deserves a look.
    facts: names and values besides, in words.
    """

    path: str
    op: str
    label: str = ""
    times: int = 1
    direction: str = "forward"
    input_formats: str = ""
    computes: str = ""
    result: str = ""
    action: str = ""
    rule: str = ""
    reason: str = ""
    file: str = ""
    line: int = 0
    bytes: int | None = None
    multiplications: int | None = None
    ns: float | None = None
    local: float | None = None
    propagated: float | None = None
    total: float | None = None
    verdict: str = ""
    finding: str = ""
    facts: tuple[tuple[str, str], ...] = ()


def label_of(call: CallId) -> str:
    """Return which call of its op it is: `#2`, `#1 module call 3`."""
    return f"#{call.number} module call {call.module_call}" if call.module_call > 1 else f"#{call.number}"


def node_of(call: CallId, computes: str = "", file: str = "", line: int = 0) -> Node:
    """Return the box of one call."""
    return Node(call.module_path, call.op, label_of(call), 1, call.direction, computes=computes, file=file, line=line)


def node_at(call: CallId, place: str, computes: str = "") -> Node:
    """Return the box of a call at `file:line`."""
    file, _, line = place.rpartition(":")
    return node_of(call, computes, file, int(line or 0))


@dataclass(frozen=True, slots=True)
class Edge:
    """A value that one call gives another; a cast if src and dst differ. Each end is a number among the nodes.

    bytes: of the value, or what the cast reads and writes. kind: `activation`, `weight` or `input`. how: `copied`,
    `cached`, `shared`, `inside`, of a cast. shape: as PyTorch prints it, where it is known. times: of alike casts.
    """

    start: int
    end: int
    argument: str
    src: str
    dst: str
    bytes: int = 0
    kind: str = "activation"
    how: str = ""
    shape: str = ""
    times: int = 1


@dataclass(frozen=True, slots=True)
class Graph:
    """The calls in order, and what flows between them. flow: False where only the order of the calls is known."""

    nodes: list[Node]
    edges: list[Edge]
    flow: bool = False
    note: str = ""


@dataclass(frozen=True, slots=True)
class Series:
    """Figures over a common axis; nodes: the call that each represents, if it is one.

    x, y: what the axes say. x_unit, y_unit: `bytes`, `ns`, `relative` (an error), `multiplications`, `whole` (numbers
    of calls, steps, runs), `percent`; nothing for any number. kind: `lines`, or `stems`: a thin line up to each point,
    for what happens now and then. marks: points to be marked, each with its words. note: what a reader has to know.
    """

    title: str
    x: str
    y: str
    xs: list[float]
    lines: list[tuple[str, list[float | None]]]
    x_unit: str = ""
    y_unit: str = ""
    log: bool = False
    nodes: list[int] = field(default_factory=list)
    log_x: bool = False
    kind: str = "lines"
    marks: list[tuple[float, float, str]] = field(default_factory=list)
    note: str = ""


@dataclass(frozen=True, slots=True)
class Exponents:
    """How often each binary exponent occurs in a call's output. node: the call. first: the smallest exponent."""

    node: int
    name: str
    format: str
    first: int
    counts: list[int]


@dataclass(frozen=True, slots=True)
class PairRow:
    """Calls of two runs that are the same ones: their numbers among the nodes of either graph, and what was found.

    format_a, format_b: in which they compute. difference, inputs, round_off_bound: relative, None if not known.
    """

    a: tuple[int, ...]
    b: tuple[int, ...]
    verdict: str
    difference: float | None
    inputs: float | None
    round_off_bound: float | None
    measured_by: str
    aligned_by: str
    format_a: str
    format_b: str
    given: str
    why: str


def facts_of(**named: object) -> list[tuple[str, str]]:
    """Return what the page is about, by name, in words."""
    return [(name, str(value)) for name, value in named.items()]


@dataclass(frozen=True, slots=True)
class Pair:
    """The second of two runs, which calls of the first its calls are, and the mapping that was given, as its file has
    it. names: of both runs.
    """

    names: tuple[str, str]
    graph: Graph
    rows: list[PairRow]
    mapping: str


@dataclass(slots=True)
class Document:
    """Everything that is shown of one result.

    kind: of what (`explanation`, `run`, `comparison`, `comparison of runs`, `watch`, `headroom`, `ledger`, `repair`,
    `profile`, `training-check`, `scaler`, `parity`, `invariance`). facts: what it is about, by name. verdict: one
    sentence; tone as of a figure. todos: all, by their worth; a first look shows FIRST_TODOS. pair: the second run,
    where two are shown side by side; graph is then the first's.
    """

    kind: str
    title: str
    verdict: str
    tone: str = ""
    facts: list[tuple[str, str]] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)
    todos: list[Todo] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    graph: Graph = field(default_factory=lambda: Graph([], []))
    series: list[Series] = field(default_factory=list)
    exponents: list[Exponents] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    pair: Pair | None = None

    def data(self) -> dict[str, Any]:
        """Return the page as JSON: nodes and edges as rows under their columns; texts of nodes in a table of texts, and
        those of tables and pairs in another, since many stand in more than one row.
        """
        left_out = ("graph", "pair", "tables")
        plain = {f.name: _plain(getattr(self, f.name)) for f in fields(self) if f.name not in left_out}
        texts: dict[str, int] = {"": 0}
        packed = {"schema": SCHEMA, **plain, "graph": _packed(self.graph), "formats": _ranges()}
        packed["tables"] = [_packed_table(table, texts) for table in self.tables]
        if self.pair is not None:
            packed["pair"] = {
                "names": list(self.pair.names), "graph": _packed(self.pair.graph), "mapping": self.pair.mapping,
                "columns": list(_PAIR), "text_columns": sorted(_PAIR_TEXTS),
                "rows": _rows(self.pair.rows, _PAIR, texts, _PAIR_TEXTS),
            }  # fmt: skip
        return packed | {"texts": list(texts)}


def _packed_table(table: Table, texts: dict[str, int]) -> dict[str, Any]:
    """Return a table in which numbers represent the texts of columns of texts, and only there."""
    are_texts = [all(isinstance(row[n], str | None) for row in table.rows) for n in range(len(table.columns))]
    rows = [
        [texts.setdefault(value, len(texts)) if is_text and value is not None else _plain(value)
         for value, is_text in zip(row, are_texts, strict=True)]
        for row in table.rows
    ]  # fmt: skip
    columns = [_plain(column) for column in table.columns]
    packed = {"columns": columns, "rows": rows, "texts": [n for n, is_text in enumerate(are_texts) if is_text]}
    return {"name": table.name, "title": table.title, **packed, "rules": table.rules, "shared": _plain(table.shared)}


def _packed(graph: Graph) -> dict[str, Any]:
    texts: dict[str, int] = {"": 0}
    nodes, edges = _rows(graph.nodes, _NODE, texts, _TEXTS), _rows(graph.edges, _EDGE, texts, _TEXTS)
    return {
        "flow": graph.flow, "note": graph.note,
        "node_columns": list(_NODE), "nodes": nodes,
        "edge_columns": list(_EDGE), "edges": edges,
        "text_columns": sorted(_TEXTS), "texts": list(texts),
    }  # fmt: skip


_TEXTS = frozenset(f.name for kind in (Node, Edge) for f in fields(kind) if f.type == "str")
"""Columns of which many rows have the same text."""
_PAIR_TEXTS = frozenset(f.name for f in fields(PairRow) if f.type == "str")

_NODE, _EDGE, _PAIR = (tuple(f.name for f in fields(kind)) for kind in (Node, Edge, PairRow))


def _rows(
    records: Iterable[Node | Edge | PairRow], columns: tuple[str, ...], texts: dict[str, int], of_texts: frozenset[str]
) -> list[list[Any]]:
    """Return records as rows. A large model has ten thousand of each: what is the same for all is asked once."""
    values_of = attrgetter(*columns)
    is_text = [name in of_texts for name in columns]
    return [
        [
            texts.setdefault(value, len(texts)) if text else _plain(value)
            for text, value in zip(is_text, values_of(record), strict=True)
        ]
        for record in records
    ]


def _plain(value: Any) -> Any:
    """Return a value in JSON's types: records are objects; a number that is not finite is null; six digits suffice."""
    kind = type(value)
    if kind is int or kind is str or value is None:
        return value
    if kind is float:
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if kind is list or kind is tuple:
        return [v if type(v) is int else _plain(v) for v in value]
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if hasattr(value, "__dataclass_fields__"):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    return value


def _ranges() -> dict[str, dict[str, int]]:
    """Return of each format bits, and the exponents of its largest, its smallest normal and its smallest value."""
    return {
        name: {
            "bits": f.bits, "largest": f.max_exponent, "normal": f.min_exponent,
            "smallest": f.min_exponent - f.mantissa_bits,
        }
        for name, f in FORMATS.items()
    }  # fmt: skip
