"""Results as JSON has them, and back, by the fields of their classes. Nothing in a file is executed.

A field that equality leaves out is live: it is neither written nor read. What was added to a class since a file was
written has its default.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, get_args

from cattrs import Converter
from cattrs.gen import make_dict_structure_fn, make_dict_unstructure_fn, override

from narrowcast.core.ledger import Advice, CallKind, Cast, Tally
from narrowcast.core.ledger.identity import CallId
from narrowcast.core.policy import Policy, Rule, Site
from narrowcast.formats import FORMATS
from narrowcast.programs.placement.place import PlacedCall
from narrowcast.reports.results.graphs import GraphFlow
from narrowcast.reports.results.mapping import RunMapping
from narrowcast.reports.results.repair import RepairRule
from narrowcast.reports.results.run_records import Histogram, TensorFacts
from narrowcast.reports.results.scaler_history import KEPT, ScaledStep

T = TypeVar("T")
Row = Mapping[str, Any]
BROKEN = (KeyError, TypeError, ValueError, IndexError, AttributeError)
"""What a file raises that has the right schema and not what belongs to it."""


def to_data(record: Any) -> Any:
    """Return the record in JSON's types: NaN, infinities, identities, policies and mappings as text."""
    return _converter().unstructure(record)


def of_data(kind: type[T], data: Any, is_whole: bool = False) -> T:
    """Return the record of that kind. Raise one of BROKEN for data that are none.

    is_whole: nothing may lack, not even what has a default.
    """
    if not isinstance(data, Mapping):
        raise TypeError(f"{type(data).__name__} where a {kind.__name__} is wanted")
    if is_whole:
        wanted = [field for field in fields(kind) if field.compare]  # type: ignore[arg-type]
        if lacking := [name for field in wanted if (name := field.metadata.get("name", field.name)) not in data]:
            raise KeyError(", ".join(lacking))
    return _converter().structure(data, kind)


@functools.cache
def _converter() -> Converter:
    new = Converter(detailed_validation=False)
    new.register_unstructure_hook_factory(
        is_dataclass, lambda kind: make_dict_unstructure_fn(kind, new, **_names(kind))
    )
    new.register_structure_hook_factory(
        is_dataclass, lambda kind: make_dict_structure_fn(kind, new, _cattrs_detailed_validation=False, **_names(kind))
    )
    new.register_unstructure_hook(float, lambda number: number if math.isfinite(number) else str(number))
    _register(new, CallId, str, CallId.parse)
    _register(new, CallId | None, lambda call: str(call or ""), lambda text: CallId.parse(text) if text else None)
    _register(new, Policy, Policy.to_toml, Policy.parse)
    _register(new, RunMapping, str, RunMapping.parse)
    _register(new, Histogram, lambda histogram: [histogram.first, *histogram.counts], _histogram)
    _register(new, GraphFlow, GraphFlow.data, GraphFlow.of_data)
    _register(new, PlacedCall, _placed_row, _placed_call)
    _register(new, Rule, lambda rule: rule.keys, _rule_of)
    _register(new, RepairRule, _repair_row, _repair_rule)
    _register(new, _Named, lambda named: {name: _facts_row(facts) for name, facts in named}, _facts_by_name)
    _register(new, deque[ScaledStep], lambda rows: list(map(to_data, rows)), _scaled_steps)
    for kind in (dict[Cast, Tally], dict[CallKind, Tally], dict[Advice, int]):
        _register(new, kind, _counts_rows, functools.partial(_counts, get_args(kind)))
    return new


def _register(converter: Converter, kind: Any, write: Callable[[Any], Any], read: Callable[[Any], Any]) -> None:
    converter.register_unstructure_hook_func(lambda known: known == kind, write)
    converter.register_structure_hook_func(lambda known: known == kind, lambda data, _: read(data))


def _names(kind: Any) -> dict[str, Any]:
    """Return how the fields of a class are written: not those that are live, some under another name."""
    return {
        field.name: override(omit=not field.compare, rename=field.metadata.get("name"))
        for field in fields(kind)
        if not field.compare or "name" in field.metadata
    }


def _histogram(row: Sequence[int]) -> Histogram:
    first, *counts = map(int, row)
    return Histogram(first, tuple(counts))


def _scaled_steps(rows: Iterable[Row]) -> deque[ScaledStep]:
    return deque((of_data(ScaledStep, row) for row in rows), KEPT)


_Named = tuple[tuple[str, TensorFacts], ...]


def _facts_row(facts: TensorFacts) -> Row:
    """Return the facts without the histograms, which only a run has."""
    return {key: value for key, value in to_data(facts).items() if key not in ("exponents", "below")}


def _facts_by_name(rows: Row) -> _Named:
    return tuple((name, of_data(TensorFacts, row)) for name, row in rows.items())


def _counts_rows(counts: Mapping[Any, Tally | int]) -> list[Row]:
    """Return each record with its count. There may be 100,000: nothing in them needs a hook."""
    return [{**_plain(record), **(_plain(n) if isinstance(n, Tally) else {"times": n})} for record, n in counts.items()]


def _plain(record: Any) -> Row:
    row = {name: getattr(record, name) for name in record.__dataclass_fields__}
    return row | {"numbers": sorted(row["numbers"])} if "numbers" in row else row


def _counts(kinds: tuple[Any, Any], rows: Iterable[Row]) -> dict[Any, Any]:
    kind, count = kinds
    return {
        of_data(kind, {**row, "moved_bytes": 0}): row["times"] if count is int else of_data(Tally, row) for row in rows
    }


def _placed_row(call: PlacedCall) -> Row:
    costs = dict(zip((format.name for format in call.formats), call.costs, strict=True))
    return {
        "op": call.op, "module": call.site.module_path, "file": call.site.file, "line": call.site.line,
        "shape": call.shape, "costs_ns": costs, "policy": call.formats[0].name, "chosen": call.chosen.name,
        "saved_ns": call.saved, "step": call.step,
    }  # fmt: skip


def _placed_call(row: Row) -> PlacedCall:
    shape, costs = row["shape"], row["costs_ns"]
    return PlacedCall(
        row["step"], row["op"], Site(row["module"], file=row["file"], line=row["line"]),
        None if shape is None else tuple(shape), tuple(FORMATS[name] for name in costs),
        tuple(map(float, costs.values())), FORMATS[row["chosen"]],
    )  # fmt: skip


_OF_RULES = {"class": "module_class"} | {name: name for name in Rule.__match_args__[2:] if name != "origin"}


def _rule_of(row: Row) -> Rule:
    others = {_OF_RULES[key]: value for key, value in row.items() if key in _OF_RULES and value is not None}
    return Rule(row["op"], row["action"], **others)


def _repair_row(row: RepairRule) -> Row:
    others = ("cause", "share", "calls", "cost_ns", "needed")
    return row.rule.keys | {name: to_data(getattr(row, name)) for name in others}


def _repair_rule(row: Row) -> RepairRule:
    return RepairRule(
        _rule_of(row), row["cause"], float(row["share"]), row["calls"], float(row["cost_ns"]), row["needed"]
    )
