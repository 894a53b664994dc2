"""A run as data: what each call of a model computed, with statistics of its tensors, and in which environment."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields
from operator import attrgetter
from pathlib import Path
from typing import Any

from narrowcast.errors import Origin, RunError
from narrowcast.formats import FORMATS, Format
from narrowcast.ledger.identity import CallId
from narrowcast.output.files import save_result
from narrowcast.page.shown import Shown
from narrowcast.report.sketch import sketch_rows

SCHEMA = "narrowcast.run/1"
ENDING = ".json.gz"


@dataclass(frozen=True, slots=True)
class Histogram:
    """How often each binary exponent occurs among finite values that are not zero.

    first: the smallest exponent e, of values from 2**e to below 2**(e+1). counts: from there on.
    """

    first: int = 0
    counts: tuple[int, ...] = ()

    @property
    def total(self) -> int:
        """How many values were counted."""
        return sum(self.counts)

    def share(self, holds: Callable[[int], bool]) -> float:
        """The share of the counted values whose exponent passes the test; 0 of none."""
        found = sum(n for e, n in enumerate(self.counts, self.first) if holds(e))
        return found / self.total if self.counts else 0.0

    @property
    def last(self) -> int:
        """The largest exponent that occurs."""
        return self.first + len(self.counts) - 1


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """What is known of one tensor of a run.

    format: its format, or a short name of another element type. low, high: the range of its finite values. mean, rms
    over the finite values; zeros, subnormal, saturated (at the format's largest value), nan, infinite: shares of
    elements. exponents: of the elements looked at; below: of each element's exponent under its row's largest, from 0.
    looked_at: how many elements all but the range and the non-finite shares stand for; less than `elements` where a
    sample was taken. checksum, file: on request. sketch: of some rows (report/sketch.py). lies_in: the tensor of
    the table that was entered before in whose memory it lies (a view, a slice, one written to since); -1: in none's.
    """

    format: str
    shape: tuple[int, ...]
    device: str
    elements: int
    low: float = 0.0
    high: float = 0.0
    mean: float = 0.0
    rms: float = 0.0
    zeros: float = 0.0
    subnormal: float = 0.0
    saturated: float = 0.0
    nan: float = 0.0
    infinite: float = 0.0
    exponents: Histogram = field(default_factory=Histogram)
    below: Histogram = field(default_factory=Histogram)
    looked_at: int = 0
    lies_in: int = -1
    checksum: str = ""
    file: str = ""
    sketch: str = ""

    @property
    def is_finite(self) -> bool:
        """Whether it holds neither NaN nor infinity."""
        return not self.nan and not self.infinite

    @property
    def largest(self) -> float:
        """The largest finite magnitude."""
        return max(abs(self.low), abs(self.high))

    def fits(self) -> Format | None:
        """Its format, if it is a floating one."""
        return FORMATS.get(self.format)


@dataclass(frozen=True, slots=True)
class CallRecord:
    """One call of a run. inputs, outputs: names and numbers of tensors in the run's table.

    came, computes: the formats as they came and as the op read them. rule, reason: what decided, empty where nothing
    did. given: arguments that are no tensors, as text; numbers with all their digits. forward: of a backward call, the
    forward call it belongs to.
    """

    id: CallId
    file: str
    line: int
    came: str
    computes: str
    rule: str = ""
    reason: str = ""
    inputs: tuple[tuple[str, int], ...] = ()
    outputs: tuple[tuple[str, int], ...] = ()
    given: tuple[tuple[str, str], ...] = ()
    forward: CallId | None = None
    is_cast: bool = False


@dataclass(slots=True)
class Run(Shown):
    """What a run computed: `nc.capture` makes it, `save` and `load` keep it.

    calls: in the order in which they ran. tensors: the table that they name tensors of. parameters: for each, its name
    and the numbers of the tensors that are its value, its gradient and its optimizer's moments. environment: versions,
    device, flags, seeds, policy. notes: what a reader has to know besides. tokens, log_probabilities: of a language
    model, in order; one number each (`keep_tokens`).
    """

    environment: dict[str, Any] = field(default_factory=dict)
    calls: list[CallRecord] = field(default_factory=list)
    tensors: list[TensorFacts] = field(default_factory=list)
    parameters: dict[str, dict[str, int]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    log_probabilities: list[float] = field(default_factory=list)

    def keep_tokens(self, tokens: Any, log_probabilities: Any) -> None:
        """Add tokens and the log-probability that the model gave each: a generation loop tells of one after the other.

        Both: numbers, sequences of any depth, or tensors and arrays (what has `tolist`), of equal size. RunError else.
        """
        ids, values = list(_flat(tokens)), [float(value) for value in _flat(log_probabilities)]
        if len(ids) != len(values):
            raise RunError(
                "run.keep_tokens", f"{len(ids)} tokens with {len(values)} log-probabilities",
                advice="Give one log-probability for each token: that of the token, not of the whole vocabulary.",
            )  # fmt: skip
        self.tokens += [int(token) for token in ids]
        self.log_probabilities += values

    def call(self, identity: CallId | str) -> CallRecord:
        """The call of that identity. RunError if there is none."""
        wanted = CallId.parse(identity) if isinstance(identity, str) else identity
        for call in self.calls:
            if call.id == wanted:
                return call
        raise RunError(
            f"call {wanted}", f"this run of {len(self.calls)} calls has none like it", advice="List run.calls."
        )

    def facts(self, named: Iterable[tuple[str, int]]) -> dict[str, TensorFacts]:
        """The tensors of a call by name: `run.facts(call.inputs)`."""
        return {name: self.tensors[number] for name, number in named}

    def not_finite(self) -> list[CallRecord]:
        """The calls that gave a NaN or an infinity, in order."""
        return [c for c in self.calls if any(not self.tensors[n].is_finite for _, n in c.outputs)]

    def __repr__(self) -> str:
        bad = len(self.not_finite())
        return f"<Run: {len(self.calls)} calls, {bad} of them not finite; print shows it>"

    def __str__(self) -> str:
        return run_text(self)

    # -- files ---------------------------------------------------------------------------------------------------------

    def data(self) -> dict[str, Any]:
        """What is written as JSON, numbers with all their digits."""
        return {
            "schema": SCHEMA, "environment": self.environment, "notes": self.notes, "parameters": self.parameters,
            "tokens": self.tokens, "log_probabilities": self.log_probabilities,
            "tensor_columns": list(_TENSOR_COLUMNS), "tensors": [_tensor_row(t) for t in self.tensors],
            "call_columns": list(_CALL_COLUMNS), "calls": [_call_row(c) for c in self.calls],
        }  # fmt: skip

    def to_json(self, indent: int | None = None) -> str:
        """JSON text under the schema `narrowcast.run/1` (docs/reference/run.md)."""
        data = self.data() | {"log_probabilities": [_short(value) for value in self.log_probabilities]}
        data["tensors"] = [[_short(value) for value in row] for row in data["tensors"]]
        return json.dumps(data, separators=None if indent else (",", ":"), indent=indent)

    @staticmethod
    def from_json(text: str, file: str = "<string>") -> Run:
        """The run in JSON text. RunError for other text, or another version of the schema."""
        where = (Origin(file),)
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise RunError("a saved run", f"not JSON: {error}", where, "Capture it anew.") from None
        found = data.get("schema") if isinstance(data, dict) else type(data).__name__
        if found != SCHEMA:
            raise RunError("a saved run", f"schema {found!r} where {SCHEMA!r} is known", where, "Capture it anew.")
        try:
            tensors = [_tensor_of(dict(zip(data["tensor_columns"], row, strict=True))) for row in data["tensors"]]
            calls = [_call_of(dict(zip(data["call_columns"], row, strict=True))) for row in data["calls"]]
            parameters = {str(k): {str(n): int(i) for n, i in v.items()} for k, v in data["parameters"].items()}
            named = [number for call in calls for _, number in (*call.inputs, *call.outputs)]
            named += [number for row in parameters.values() for number in row.values()]
            if named and not 0 <= min(named) <= max(named) < len(tensors):
                raise IndexError(f"tensor {max(named, key=abs)} of {len(tensors)}")
            run = Run(dict(data["environment"]), calls, tensors, parameters, list(map(str, data["notes"])))
            run.keep_tokens(data.get("tokens", []), data.get("log_probabilities", []))
            return run
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise RunError(
                "a saved run", f"a record is broken: {type(error).__name__}: {error}", where, "Capture it anew."
            ) from None

    def save(self, path: str | Path) -> Path:
        """Write it into a file, compressed, replacing it at once; the ending `.json.gz` is added where it lacks."""
        target = Path(path)
        if not target.name.endswith((".gz", ".json")):
            target = target.with_name(target.name + ENDING)
        text = self.to_json().encode()
        save_result(target, "a run", gzip.compress(text, 6, mtime=0) if target.name.endswith(".gz") else text)
        return target

    @staticmethod
    def load(path: str | Path) -> Run:
        """The run that `save` wrote into a file. RunError for what is missing, cut off, or another kind of file."""
        where = (Origin(str(path)),)
        try:
            raw = Path(path).read_bytes()
            text = (gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw).decode()
        except (OSError, EOFError, ValueError, zlib.error) as error:
            raise RunError(
                f"a saved run, {path}", f"{type(error).__name__}: {error}", where,
                "Give the file that narrowcast capture -o, or run.save, wrote.",
            ) from None  # fmt: skip
        return Run.from_json(text, str(path))


def _flat(values: Any) -> Iterator[Any]:
    values = values.tolist() if hasattr(values, "tolist") else values
    if isinstance(values, list | tuple):
        for value in values:
            yield from _flat(value)
    else:
        yield values


_TENSOR_COLUMNS, _CALL_COLUMNS = (tuple(f.name for f in fields(kind)) for kind in (TensorFacts, CallRecord))
_tensor_values, _call_values = (attrgetter(*columns) for columns in (_TENSOR_COLUMNS, _CALL_COLUMNS))
_ID, _FORWARD = (_CALL_COLUMNS.index(name) for name in ("id", "forward"))


def _tensor_row(tensor: TensorFacts) -> list[Any]:
    """asdict copies, and takes many times as long."""
    return [[v.first, *v.counts] if type(v) is Histogram else v for v in _tensor_values(tensor)]


def _short(value: Any) -> Any:
    """Nine digits say of a statistic what can be said; NaN and infinities are no JSON."""
    if isinstance(value, float):
        return float(f"{value:.9g}") if value == value and abs(value) != float("inf") else str(value)
    return value


def _tensor_of(row: dict[str, Any]) -> TensorFacts:
    known = {f.name: row[f.name] for f in fields(TensorFacts) if f.name in row}
    for name in ("exponents", "below"):
        first, *counts = known[name]
        known[name] = Histogram(int(first), tuple(int(n) for n in counts))
    known["shape"] = tuple(int(size) for size in known["shape"])
    for name in ("low", "high", "mean", "rms"):
        known[name] = float(known[name])
    sketch_rows(known.get("sketch", ""), known["shape"])
    return TensorFacts(**known)


def _call_row(call: CallRecord) -> list[Any]:
    row = list(_call_values(call))
    row[_ID], row[_FORWARD] = str(call.id), str(call.forward or "")
    return row


def _call_of(row: dict[str, Any]) -> CallRecord:
    known = {f.name: row[f.name] for f in fields(CallRecord) if f.name in row}
    known["id"] = CallId.parse(known["id"])
    known["forward"] = CallId.parse(known["forward"]) if known.get("forward") else None
    known |= {name: tuple((str(a), int(n)) for a, n in known[name]) for name in ("inputs", "outputs")}
    known["given"] = tuple((str(a), str(v)) for a, v in known["given"])
    return CallRecord(**known)


# -- as text ----------------------------------------------------------------------------------------------------------

LISTED = 8


def run_text(run: Run, every_call: bool = False) -> str:
    """The run's first screen; or all of its calls."""
    bad = run.not_finite()
    lines = [_head(run), _verdict(run, bad)]
    formats: dict[str, int] = {}
    for call in run.calls:
        if not call.is_cast:
            formats[call.computes or "-"] = formats.get(call.computes or "-", 0) + 1
    lines.append("computed in: " + ", ".join(f"{name} {n}" for name, n in sorted(formats.items(), key=lambda p: -p[1])))
    lines += [f"note: {note}" for note in run.notes]
    shown = run.calls if every_call else _worth_a_look(run)
    if shown:
        lines += ["", "call" + ("" if every_call else ", largest values first")]
        lines += [call_line(run, call) if every_call else _call_lines(run, call) for call in shown]
    if not every_call and len(run.calls) > len(shown):
        lines.append(f"... {len(run.calls) - len(shown)} more calls: --all lists them")
    return "\n".join(lines)


def _head(run: Run) -> str:
    facts = run.environment
    policy = facts.get("policy") or {}
    under = f", policy {policy['name']} in {policy['low']}" if policy else ""
    backward = sum(call.id.direction == "backward" for call in run.calls)
    return f"{len(run.calls)} calls ({backward} backward) on {facts.get('device', '?')}{under}"


def _verdict(run: Run, bad: list[CallRecord]) -> str:
    if not bad:
        return "every value is finite"
    made = _made_not_finite(run, bad)
    if made is not None:
        return f"{len(bad)} calls are not finite; the first made of finite inputs: {made.id} ({made.file}:{made.line})"
    if any(run.tensors[n].nan for call in bad for _, n in call.outputs):
        return f"{len(bad)} calls are not finite; their inputs were not, either"
    return f"every value is finite, but infinities that were given or filled in, as masks are, in {len(bad)} calls"


def _made_not_finite(run: Run, bad: list[CallRecord]) -> CallRecord | None:
    """The first call that made NaN, or an infinity out of finite inputs that was not filled in as a number."""
    for call in bad:
        inputs, outputs = ([run.tensors[n] for _, n in named] for named in (call.inputs, call.outputs))
        has_nan = any(t.nan for t in outputs)
        if all(t.is_finite for t in inputs):
            if has_nan or not (_is_given_infinity(call) or any(_is_mask(t) for t in inputs)):
                return call
        elif has_nan and not any(t.nan for t in inputs):
            return call
    return None


def _is_given_infinity(call: CallRecord) -> bool:
    return any(value in ("inf", "-inf") for _, value in call.given)


def _is_mask(tensor: TensorFacts) -> bool:
    """Whether it holds the lowest value of its format, which masks are filled with."""
    return (format := tensor.fits()) is not None and tensor.low <= -0.99 * format.max


def _worth_a_look(run: Run) -> list[CallRecord]:
    def largest(call: CallRecord) -> float:
        return max((run.tensors[n].largest for _, n in call.outputs), default=0.0)

    return sorted(run.calls, key=largest, reverse=True)[:LISTED]


def call_line(run: Run, call: CallRecord) -> str:
    """One call: identity, formats, the ranges of what it gave, its place."""
    results = [run.tensors[n] for _, n in call.outputs]
    gave = ", ".join(tensor_text(t) for t in results if t.fits() and t.elements)
    formats = call.computes or call.came or "-"
    return f"  {call.id}  {formats}  {gave}  {short_file(call.file)}:{call.line}"


def _call_lines(run: Run, call: CallRecord) -> str:
    """The same on two lines, of its first result alone."""
    gave = next((tensor_text(run.tensors[n]) for _, n in call.outputs if run.tensors[n].elements), "")
    return f"  {call.id}\n    {call.computes or call.came or '-'}  {gave}  {short_file(call.file)}:{call.line}"


def tensor_text(tensor: TensorFacts) -> str:
    """`fp16 [2, 8] -3.1..4.2 rms 0.9, 3 % infinite`."""
    parts = [f"{tensor.format} {list(tensor.shape)} {tensor.low:.3g}..{tensor.high:.3g} rms {tensor.rms:.3g}"]
    for name in ("nan", "infinite", "subnormal", "saturated"):
        share = getattr(tensor, name)
        if share:
            parts.append(f"{share:.2g} {name}")
    return ", ".join(parts)


def short_file(file: str) -> str:
    """The last two parts of a path."""
    return "/".join(file.split("/")[-2:])
