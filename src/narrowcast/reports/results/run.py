"""A run as data: what each call of a model computed, with statistics of its tensors, and in which environment."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from narrowcast.core.ledger.identity import CallId
from narrowcast.errors import RunError
from narrowcast.output.words import counted
from narrowcast.reports.results.headroom import Headroom, headroom_of
from narrowcast.reports.results.result import Result, codec, renderer
from narrowcast.reports.results.run_records import CallRecord, StepRecord, TensorFacts, rows_of, short
from narrowcast.reports.results.sketch import sketch_rows
from narrowcast.reports.results.verdicts import FINITE, NOT_FINITE

ENDING = ".json.gz"
UNNAMED = "parameter "
"""With a number the name of a parameter that no module has which was called."""
_OF_STEPS: dict[str, Any] = {"steps": 0, "calls_before_step": 0, "first_gradients": {}, "optimizer_steps": []}
"""What only files of runs with steps of an optimizer hold, as it is in others."""


@dataclass(slots=True, repr=False)
class Run(Result):
    """What a run computed: `nc.capture` makes it, `save` and `load` keep it.

    calls: in the order in which they ran. tensors: the table that they name tensors of. parameters: for each, its name
    and the numbers of the tensors that are its value, its gradient and its optimizer's moments. environment: versions,
    device, flags, seeds, policy. notes: what a reader has to know besides. tokens, log_probabilities: of a language
    model, in order; one number each (`keep_tokens`). elapsed_ns: if times were asked for, of each call, the casts of
    its arguments included; cast_elapsed_ns: of each such cast the number of its call, both formats, and its time.
    returned: the numbers of the tensors that the models returned to their caller. steps: how often optimizers stepped;
    calls_before_step: how many calls came before the first step; first_gradients: by parameter the number of the
    gradient that it used; optimizer_steps: each step of an optimizer of torch's. weights_changed: which calls of the
    captured module, from 1, had other weights than the call before (`capture().of(module)`).
    """

    WHAT: ClassVar[str] = "a run"
    SCHEMA: ClassVar[str] = "narrowcast.run/2"
    INDENT: ClassVar[int | None] = None  # it has a record for each call

    environment: dict[str, Any] = field(default_factory=dict)
    calls: list[CallRecord] = field(default_factory=list)
    tensors: list[TensorFacts] = field(default_factory=list)
    parameters: dict[str, dict[str, int]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    log_probabilities: list[float] = field(default_factory=list)
    elapsed_ns: list[int] = field(default_factory=list)
    cast_elapsed_ns: list[tuple[int, str, str, int]] = field(default_factory=list)
    returned: list[int] = field(default_factory=list)
    steps: int = 0
    calls_before_step: int = 0
    first_gradients: dict[str, int] = field(default_factory=dict)
    optimizer_steps: list[StepRecord] = field(default_factory=list)
    weights_changed: list[int] = field(default_factory=list)

    def leave_out(self, numbers: Collection[int]) -> None:
        """Remove calls by their numbers, which fill new parameters; a note says how many."""
        left = {number: n for n, number in enumerate(n for n in range(len(self.calls)) if n not in numbers)}
        self.calls[:] = [self.calls[number] for number in left]
        self.elapsed_ns[:] = [self.elapsed_ns[number] for number in left if self.elapsed_ns]
        self.cast_elapsed_ns[:] = [(left[n], a, b, ns) for n, a, b, ns in self.cast_elapsed_ns if n in left]
        self.calls_before_step -= sum(number < self.calls_before_step for number in numbers)
        steps = self.optimizer_steps
        steps[:] = [replace(step, calls=step.calls - sum(n < step.calls for n in numbers)) for step in steps]
        self.notes.append(f"Left out: {counted(len(numbers), 'call')} of constructors, which fill new parameters.")

    def before_first_step(self) -> Run:
        """Return what ran before the first step of an optimizer, in which all weights have their first values."""
        calls = self.calls[: self.calls_before_step]
        last = max((number for call in calls for _, number in call.outputs), default=-1)
        parameters = {
            name: {"value": row.get("before", row["value"])} for name, row in self.parameters.items() if "value" in row
        }
        for name, number in self.first_gradients.items():
            parameters[name]["gradient"] = number
        returned = [number for number in self.returned if number <= last]
        return Run(self.environment, calls, self.tensors, parameters, self.notes, returned=returned)

    def keep_tokens(self, tokens: Any, log_probabilities: Any) -> None:
        """Add tokens and the log-probability of each: a generation loop adds one after the other.

        Both: numbers, sequences of any depth, or tensors and arrays (what has `tolist`), of equal size. RunError else.
        """
        ids, values = list(_flat(tokens)), [float(value) for value in _flat(log_probabilities)]
        if len(ids) != len(values):
            found = f"{len(ids)} tokens with {len(values)} log-probabilities"
            advice = "Give one log-probability for each token: that of the token, not of the whole vocabulary."
            raise RunError("run.keep_tokens", found, advice=advice)
        self.tokens += [int(token) for token in ids]
        self.log_probabilities += values

    def call(self, identity: CallId | str) -> CallRecord:
        """Return the call of that identity. Raise RunError if there is none."""
        wanted = CallId.parse(identity) if isinstance(identity, str) else identity
        for call in self.calls:
            if call.id == wanted:
                return call
        found = f"this run of {len(self.calls)} calls has none like it"
        raise RunError(f"call {wanted}", found, advice="List run.calls.")

    def facts(self, named: Iterable[tuple[str, int]]) -> dict[str, TensorFacts]:
        """Return the tensors of a call by name: `run.facts(call.inputs)`."""
        return {name: self.tensors[number] for name, number in named}

    def headroom(self, tolerance: float = 0.01) -> Headroom:
        """Return for each tensor that a call read or returned, and for fp16, bf16, e4m3 and e5m2, the shares that
        overflow or underflow without a scale, with one per tensor, with one per row.

        Of a run in fp32, best with statistics="whole": sampled ones may miss rare small values; the range, and so
        overflow, is exact. tolerance: the share of a tensor that may underflow. Nothing runs again. Raises RunError for
        a run without a wide tensor.
        """
        return headroom_of(self.calls, self.tensors, tolerance)

    def not_finite(self) -> list[CallRecord]:
        """Return the calls whose output has a NaN or an infinity, in order; what they give for their backward alone is
        none.
        """
        return [c for c in self.calls if any(not self.tensors[n].is_finite for _, n in c.returned)]

    def first_not_finite(self) -> CallRecord | None:
        """Return the first call that made NaN, or an infinity out of finite inputs: not one that it was given to fill
        in, nor the logarithm of zero and its like, if all that reads infinities makes finite values of them in the end.
        """
        bad = self.not_finite()
        end_finite = bool(bad) and self._end_finite(bad)
        for call in bad:
            inputs, outputs = ([self.tensors[n] for _, n in those] for those in (call.inputs, call.returned))
            has_nan = any(t.nan for t in outputs)
            if all(t.is_finite for t in inputs):
                is_meant = call.is_given_infinities(inputs) or (end_finite and call.may_be_at_pole(inputs))
                if has_nan or not is_meant:
                    return call
            elif has_nan and not any(t.nan for t in inputs):
                return call
        return None

    def _end_finite(self, bad: Iterable[CallRecord]) -> bool:
        """Return whether these calls make no NaN, and infinities that others read, which no model returns."""
        return not self._make_nan(bad) and self._go_no_further(bad)

    def _make_nan(self, bad: Iterable[CallRecord]) -> bool:
        return any(self.tensors[n].nan for call in bad for _, n in call.returned)

    def _go_no_further(self, bad: Iterable[CallRecord]) -> bool:
        """Return whether what these calls give and is not finite is read by others, and returned by no model."""
        read = {number for call in self.calls for _, n in call.inputs for number in (n, self.tensors[n].lies_in)}
        kept = {*self.returned, *(row["gradient"] for row in self.parameters.values() if "gradient" in row)}
        made = (n for call in bad for _, n in call.returned if not self.tensors[n].is_finite)
        return all(n in read and n not in kept for n in made)

    @property
    def verdict(self) -> str:
        """`not finite` where a call made a NaN or an infinity, or passed on a NaN that came from outside to what a
        model returns, as far as that was seen; else `finite`.
        """
        bad = self.not_finite()
        if not bad or self.first_not_finite() is not None:
            return NOT_FINITE if bad else FINITE
        is_over = not self._make_nan(bad) or (bool(self.returned) and self._go_no_further(bad))
        return FINITE if is_over else NOT_FINITE

    def data(self) -> dict[str, Any]:
        """Return what is written as JSON, numbers with all their digits."""
        data: dict[str, Any] = {
            "schema": self.SCHEMA, "environment": self.environment, "notes": self.notes, "parameters": self.parameters,
            "tokens": self.tokens, "log_probabilities": self.log_probabilities, **rows_of(self.tensors, self.calls),
        }  # fmt: skip
        timed = {"elapsed_ns": self.elapsed_ns, "cast_elapsed_ns": self.cast_elapsed_ns} if self.elapsed_ns else {}
        kept = {name: getattr(self, name) for name in ("returned", "weights_changed") if getattr(self, name)}
        of_steps = {name: codec().to_data(getattr(self, name)) for name in _OF_STEPS} if self.steps else {}
        return data | timed | kept | of_steps

    def to_json(self, indent: int | None = None) -> str:
        """Return JSON text under the schema `narrowcast.run/2` (docs/reference/run.md)."""
        data = self.data() | {"log_probabilities": [short(value) for value in self.log_probabilities]}
        data["tensors"] = [[short(value) for value in row] for row in data["tensors"]]
        return json.dumps(data, separators=None if indent else (",", ":"), indent=indent)

    def to_trace(self) -> str:
        """Return a trace in Chrome's format, which Perfetto opens: modules, calls and casts with measured times.

        RunError for a run whose calls were not timed: `nc.capture(..., times=True)` does.
        """
        return str(renderer("trace").run_trace(self))

    @classmethod
    def of_data(cls, data: Mapping[str, Any]) -> Run:
        """Return the run of such data. Raise one of `codec.BROKEN`, or RunError, for others."""
        of_data = codec().of_data
        tensors = [of_data(TensorFacts, dict(zip(data["tensor_columns"], row, strict=True))) for row in data["tensors"]]
        calls = [of_data(CallRecord, dict(zip(data["call_columns"], row, strict=True))) for row in data["calls"]]
        for tensor in tensors:
            sketch_rows(tensor.sketch, tensor.shape)
        own = {
            "elapsed_ns": [],
            "cast_elapsed_ns": [],
            "returned": [],
            "weights_changed": [],
            **_OF_STEPS,
            **data,
            "calls": [],
            "tensors": [],
        }
        run: Run = of_data(cls, own, is_whole=True)
        named = [number for call in calls for _, number in (*call.inputs, *call.outputs)]
        of_parameters = [run.first_gradients, *run.parameters.values()]
        named += [*run.returned, *(number for row in of_parameters for number in row.values())]
        if named and not 0 <= min(named) <= max(named) < len(tensors):
            raise IndexError(f"tensor {max(named, key=abs)} of {len(tensors)}")
        if not run.first_gradients.keys() <= run.parameters.keys():
            raise ValueError("a first gradient of no parameter")
        if len(run.tokens) != len(run.log_probabilities):
            raise ValueError(f"{len(run.tokens)} tokens with {len(run.log_probabilities)} log-probabilities")
        if run.elapsed_ns and len(run.elapsed_ns) != len(calls):
            raise ValueError(f"{len(run.elapsed_ns)} times of {len(calls)} calls")
        run.calls, run.tensors = calls, tensors
        return run

    def save(self, path: str | Path) -> Path:
        """Write it into a file, compressed, replacing it at once; the ending `.json.gz` is added where it lacks."""
        target = Path(path)
        if not target.name.endswith((".gz", ".json")):
            target = target.with_name(target.name + ENDING)
        return Result.save(self, target)


def _flat(values: Any) -> Iterator[Any]:
    values = values.tolist() if hasattr(values, "tolist") else values
    if isinstance(values, list | tuple):
        for value in values:
            yield from _flat(value)
    else:
        yield values
