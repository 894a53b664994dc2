"""What `explain` found, as data: the ledger of one run with what it was a run of, and the questions asked of it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar

from narrowcast.core.ledger import Tally
from narrowcast.core.policy import Rule
from narrowcast.reports.results.differences import SHOWN, CallError, Differences, OutputError
from narrowcast.reports.results.findings import Finding
from narrowcast.reports.results.graphs import CompiledGraph, DecisionDifference, GraphFlow, GraphRow
from narrowcast.reports.results.ledger import Ledger
from narrowcast.reports.results.result import Result, renderer
from narrowcast.reports.results.run import Run
from narrowcast.reports.results.run_records import site_text
from narrowcast.reports.results.verdicts import EXPLAINED, RAISES


@dataclass(frozen=True, slots=True)
class OpRow:
    """Calls of one op that were decided alike, wherever they are."""

    op: str
    calls: int
    input_formats: str
    computes: str
    result: str
    action: str
    reason: str
    moved_bytes: int
    direction: str


@dataclass(frozen=True, slots=True)
class RuleRow:
    """One of the policy's own rules: how many calls it decided, and in which modules. None: it matched nothing."""

    rule: str
    origin: str
    reason: str
    calls: int
    modules: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Attempt:
    """A policy under which a model was run that had raised under another; error: what it raises there, or nothing."""

    policy: str
    error: str


@dataclass(frozen=True, slots=True)
class Failure:
    """What raised while a model was explained that runs in fp32, and what was tried after it.

    op: the innermost call of torch that raised, an op or a function; empty if it was none. formats: of the tensors that
    it got.
    """

    op: str
    formats: str
    module_path: str
    file: str
    line: int
    error: str
    policy: str
    attempts: tuple[Attempt, ...]

    @property
    def text(self) -> str:
        """A sentence for a reader: which policy runs it, and what raised where."""
        runs = [f'policy "{a.policy}" runs it' for a in self.attempts if not a.error]
        fails = [f'policy "{a.policy}" raises, too ({a.error})' for a in self.attempts if a.error]
        tried = f"tried: {'; '.join((*runs, *fails))}" if self.attempts else "no other policy was tried"
        call = self.op.removesuffix(".default") or "the model's own code"
        got = f" got {' and '.join(self.formats.split(','))}" if self.formats else " raised"
        where = site_text(self.module_path, self.file, self.line)
        raises = f"torch raises here under {self.policy}, and not in fp32 ({tried}): {call}{got}{where}"
        return f"{raises}. It says: {self.error.rstrip('.')}."


@dataclass(frozen=True, slots=True)
class Comparison:
    """fp32 against the region, run on the real model: in short what `nc.compare` finds, with metric, time and memory.

    differences: that in full. time_ratio is region over fp32, the median of `repeats` alternating pairs, with the
    quartiles of the pairs' ratios. reference_peak_bytes, region_peak_bytes: the most that tensors made during the
    forward hold at once, beyond weight_bytes, those of parameters and buffers; memory_ratio: of the sums with these.
    casts_ms, kernels_ms: what conversions and all other ops take one by one; the rest of region_ms is in between.
    """

    differences: Differences
    metric_reference: dict[str, float]
    metric_found: dict[str, float]
    reference_ms: float
    region_ms: float
    time_ratio: float
    time_quartiles: tuple[float, float]
    repeats: int
    reference_peak_bytes: int
    region_peak_bytes: int
    memory_ratio: float
    weight_bytes: int = 0
    casts_ms: float = math.nan
    kernels_ms: float = math.nan
    reference_kernels_ms: float = math.nan

    @property
    def is_clear(self) -> bool:
        """Whether the quartiles of the ratios agree on which of the two takes longer."""
        low, high = self.time_quartiles
        return low > 1.0 or high < 1.0

    @property
    def outputs(self) -> tuple[OutputError, ...]:
        """The error of each output."""
        return self.differences.outputs

    @property
    def worst(self) -> list[CallError]:
        """The five calls most to blame, worst first."""
        return self.differences.worst[:SHOWN]

    @property
    def not_finite(self) -> Finding | None:
        """Where outputs are not finite and fp32's are, the first finding in the region."""
        return self.differences.not_finite

    @property
    def reference_not_finite(self) -> Finding | None:
        """The first finding of fp32 itself, if its outputs are not finite."""
        return self.differences.reference_not_finite


@dataclass(frozen=True, slots=True, repr=False)
class Explanation(Result):
    """A run of a model under a policy, explained.

    ran_on says what was run: `fake tensors` (no compute), fake tensors standing in for a device that is not here, or
    `the model itself`; `note` why, if it is not the first. For a front end other than eager the ledger is that of the
    graphs (of eager code, where nothing was captured), and `differences` are calls that eager code decides otherwise:
    none, unless there is a fault. flow: what flows between the calls of eager code, if it ran on fake tensors. rules:
    what each rule of the policy's own matched. failure: what raised; the explanation is then of what ran before. timed:
    a run whose calls were timed, if that was asked for. gradients: whether they were on. stored: bytes of what
    `nc.store` keeps of the model, before and now, by kind.
    """

    WHAT: ClassVar[str] = "an explanation"
    SCHEMA: ClassVar[str] = "narrowcast.explanation/4"

    subject: str
    device_type: str
    low: str
    policy: str
    digest: str
    ran_on: str
    note: str
    ledger: Ledger
    comparison: Comparison | None = None
    front_end: str = "eager"
    graphs: tuple[CompiledGraph, ...] = ()
    flow: GraphFlow | None = None
    differences: tuple[DecisionDifference, ...] = ()
    rules: tuple[RuleRow, ...] = ()
    failure: Failure | None = None
    timed: Run | None = field(default=None, compare=False)
    gradients: bool = True
    stored: dict[str, tuple[int, int]] = field(default_factory=dict)

    def graph_rows(self) -> list[GraphRow]:
        """Return one line per captured graph: calls, casts, what the passes did, why it ends; empty for eager code."""
        return [graph.row for graph in self.graphs if graph.row is not None]

    @property
    def has_stand_in(self) -> bool:
        """Whether the cpu stood in for a device that is not here."""
        return "standing in" in self.ran_on or "on the cpu with" in self.ran_on

    def flows(self) -> list[GraphFlow]:
        """Return what flows between the calls of each captured graph, or of eager code on fake tensors."""
        captured = [graph.flow for graph in self.graphs if graph.flow.steps]
        return captured or ([self.flow] if self.flow is not None and self.flow.steps else [])

    def op_rows(self) -> list[OpRow]:
        """Return every op with its formats and why, most bytes first."""
        rows: dict[tuple[str, ...], Tally] = {}
        for kind, tally in self.ledger.calls.items():
            key = (kind.op, kind.input_formats, kind.computes, kind.result, kind.action, kind.reason, kind.direction)
            rows.setdefault(key, Tally()).add(tally)
        op_rows = [
            OpRow(op, row.calls, inputs, computes, result, action, reason, row.moved_bytes, direction)
            for (op, inputs, computes, result, action, reason, direction), row in rows.items()
        ]
        return sorted(op_rows, key=lambda row: (row.direction != "forward", -row.moved_bytes, row.op))

    def to_trace(self) -> str:
        """Return a trace in Chrome's format, which Perfetto opens: of eager code measured, of graphs predicted times.

        RunError without times: `explain(..., times=True)` has them.
        """
        return str(renderer("trace").explanation_trace(self))

    def to_model_explorer(self) -> dict[str, str]:
        """Return node data of an exported program for Model Explorer, JSON texts by name: `formats`, `errors`, `costs`.

        Errors are there with `run=True`, costs with `times=True`. RunError for other front ends, and with a goal.
        """
        return dict(renderer("model_explorer").model_explorer_files(self))

    @property
    def verdict(self) -> str:
        """`raises`; with `run=True` what the comparison with fp32 says; else `explained`."""
        if self.failure is not None:
            return RAISES
        return EXPLAINED if self.comparison is None else self.comparison.differences.verdict


def rule_rows(rules: Iterable[Rule], ledger: Ledger) -> tuple[RuleRow, ...]:
    """Return what each of a policy's own rules matched, in the order of the policy; rules that matched nothing, too."""
    rows = []
    for rule in rules:
        modules = ledger.matches.get(rule.label, {})
        if modules or not rule.is_builtin:
            origin = str(rule.origin) if rule.origin is not None else ""
            rows.append(RuleRow(str(rule), origin, rule.reason, sum(modules.values()), tuple(modules)))
    return tuple(rows)
