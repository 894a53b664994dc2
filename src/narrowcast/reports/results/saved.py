"""Saved results, read back: which kind of file it is, and the object that it holds. Nothing in a file is executed."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from narrowcast.core.ledger.identity import CallId
from narrowcast.errors import Origin, RunError
from narrowcast.reports.results import differences, explanation, findings, fit, repair, run, run_differences, training
from narrowcast.reports.results.explanation import Explanation
from narrowcast.reports.results.ledger import SCHEMA as LEDGER
from narrowcast.reports.results.ledger import Ledger
from narrowcast.reports.results.mapping import RunMapping
from narrowcast.reports.results.records import call_errors, call_id_of, first_not_finite, output_errors, record_of
from narrowcast.reports.results.run_records import Histogram, TensorFacts
from narrowcast.reports.results.saved_explanation import explanation_of

Comparison = differences.Differences | run_differences.RunDifferences
Saved = (
    run.Run | Comparison | findings.Watching | fit.Fit | repair.Repair | Explanation | training.TrainingCheck | Ledger
)


def load_saved(path: str | Path) -> Saved:
    """What a command or `save` wrote: a run, a comparison of any kind, a watch, a fit, a repair, an explanation, a
    check of a training loop, a ledger. RunError for other files, and for schemas of other versions.
    """
    where = (Origin(str(path)),)
    try:
        raw = Path(path).read_bytes()
        text = (gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw).decode()
        data = json.loads(text)
    except (OSError, EOFError, ValueError, RecursionError, zlib.error) as error:
        raise RunError(
            f"a saved result, {path}", f"{type(error).__name__}: {error}", where,
            "Give a file that narrowcast explain --json, capture, compare, watch, fit or repair wrote.",
        ) from None  # fmt: skip
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema == run.SCHEMA:
        return run.Run.from_json(text, str(path))
    if isinstance(schema, str) and schema.startswith("narrowcast.ledger/"):
        return Ledger.from_json(text, str(path))
    read = _READERS.get(str(schema))
    if read is None:
        known = ", ".join((run.SCHEMA, LEDGER, *_READERS))
        raise RunError(
            f"a saved result, {path}", f"schema {schema!r}, where these are known: {known}", where,
            "Write it anew with this version of Narrowcast.",
        )  # fmt: skip
    try:
        found: Saved = read(data)
        return found
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RunError(
            f"a saved result, {path}", f"a record is broken: {type(error).__name__}: {error}", where,
            "Write it anew.",
        ) from None  # fmt: skip


def _differences(data: dict[str, Any]) -> differences.Differences:
    gradients = [record_of(differences.GradientError, row) for row in data["gradients"]]
    found: differences.Differences = record_of(
        differences.Differences, data, rows=call_errors(data["rows"]), gradients=gradients,
        outputs=output_errors(data), not_finite=first_not_finite(data),
    )  # fmt: skip
    return found


def _watching(data: dict[str, Any]) -> findings.Watching:
    def facts(row: dict[str, Any]) -> TensorFacts:
        made: TensorFacts = record_of(
            TensorFacts, row, shape=tuple(row["shape"]), exponents=Histogram(), below=Histogram()
        )
        return made

    def finding(row: dict[str, Any]) -> findings.Finding:
        named = {key: tuple((n, facts(r)) for n, r in row[key].items()) for key in ("inputs", "outputs")}
        made: findings.Finding = record_of(
            findings.Finding, row, id=CallId.parse(row["id"]), forward=call_id_of(row["forward"]), **named
        )
        return made

    return findings.Watching(
        [finding(row) for row in data["findings"]], dict(data["meant"]), list(data["notes"]), list(data["history"]),
        data["calls"], data["spread"], data["steps"], data.get("repeated", 0), data.get("not_inspected", 0),
    )  # fmt: skip


def _fit(data: dict[str, Any]) -> fit.Fit:
    rows = [record_of(fit.TensorFit, row, id=CallId.parse(row["id"])) for row in data["rows"]]
    places = {CallId.parse(key): str(place) for key, place in data["places"].items()}
    return fit.Fit(rows, places, float(data["tolerance"]), list(data["notes"]))


def _run_differences(data: dict[str, Any]) -> run_differences.RunDifferences:
    def ids(names: list[str]) -> tuple[CallId, ...]:
        return tuple(CallId.parse(name) for name in names)

    rows = [
        record_of(run_differences.RunRow, row, a=ids(row["a"]), b=ids(row["b"]),
            given=tuple((str(n), str(x), str(y)) for n, x, y in row["given"]))
        for row in data["rows"]
    ]  # fmt: skip
    tokens = data["tokens"] and record_of(run_differences.TokenDifference, data["tokens"])
    gradients = [
        record_of(run_differences.GradientRow, row, a=tuple(row["a"]), b=tuple(row["b"])) for row in data["gradients"]
    ]
    unaligned = [record_of(run_differences.Unaligned, row, id=CallId.parse(row["id"])) for row in data["unaligned"]]
    environment = [(str(n), str(x), str(y)) for n, x, y in data["environment"]]
    return run_differences.RunDifferences(
        data["a"], data["b"], environment, rows, unaligned, gradients, tokens, list(data["notes"]),
        RunMapping.parse(data["mapping"]), RunMapping.parse(data.get("by_hand", "")),
    )  # fmt: skip


_READERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    differences.SCHEMA: _differences, explanation.SCHEMA: explanation_of, findings.SCHEMA: _watching, fit.SCHEMA: _fit,
    repair.SCHEMA: repair.repair_of,
    run_differences.SCHEMA: _run_differences, training.SCHEMA: training.TrainingCheck.from_data,
}  # fmt: skip
