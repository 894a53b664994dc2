"""What `nc.repair` found: the rules that mend a policy for a model, what each is worth, and the runs that it took."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from narrowcast.core.policy import Action, Policy, Rule, parse_action
from narrowcast.output.screen import COLUMNS, LINES, Part, first_screen, wrapped
from narrowcast.reports.results.lines import number_text, without_specials
from narrowcast.reports.results.result import Result

SCHEMA = "narrowcast.repair/1"

CLEAN, REPAIRED, OUT_OF_IDEAS, BEYOND = "nothing to repair", "repaired", "out of ideas", "not the policy's fault"
"""Verdicts: the policy was right as it is; it is with these rules; not all could be mended; fp32 itself fails."""

RAISED, NOT_FINITE, ERROR, METRIC = "raised", "not finite", "error", "metric"
"""What is wrong with a run: it raises; it makes NaN or infinity; its output is too far off; the metric is worse."""


@dataclass(frozen=True, slots=True)
class RepairRule:
    """A rule that a repair ends with.

    cause: what it mends, RAISED, NOT_FINITE, ERROR or METRIC. share: its part of that repair, from 0 to 1: of the
    square of the output's error, or one of so many places that raised or overflowed. calls: how many calls of a run it
    takes out of the low format. cost_ns: what that costs a run, without casts; NaN where no profile of the device says
    so. needed: what is wrong without it, if that was tried.
    """

    rule: Rule
    cause: str
    share: float
    calls: int = 0
    cost_ns: float = math.nan
    needed: str = ""


@dataclass(frozen=True, slots=True)
class Products:
    """How many products (matrix products, convolutions, attention) of a run compute in a low format, of how many."""

    low: int = 0
    all: int = 0


@dataclass(frozen=True, slots=True)
class RepairStep:
    """One run of the model under a policy, or in fp32: what was found, and the rules that were added or left out.

    error: relative, of the output that is furthest off; NaN where it was not asked for. metric: by name.
    products: of this run; of a run in fp32, and in files from before they were kept, none.
    """

    what: str
    found: str
    added: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    error: float = math.nan
    metric: dict[str, float] = field(default_factory=dict)
    products: Products = Products()


@dataclass(slots=True)
class Repair(Result):
    """What `nc.repair` found. `policy` is the repaired one, or what came of it.

    asked: what had to hold, for a reader. before, after: the first run, and the last that counts. reference: the metric
    in fp32. runs: how often the model ran, its metric included. untried: rules that were not tried without, since the
    model may run only so often. dropped: rules that were found, and turned out not to be needed.
    """

    WHAT: ClassVar[str] = "a repair"

    subject: str
    device_type: str
    low: str
    base: str
    policy: Policy
    asked: str = ""
    verdict: str = CLEAN
    rules: list[RepairRule] = field(default_factory=list)
    steps: list[RepairStep] = field(default_factory=list)
    before: RepairStep = field(default_factory=lambda: RepairStep("", ""))
    after: RepairStep = field(default_factory=lambda: RepairStep("", ""))
    reference: dict[str, float] = field(default_factory=dict)
    products_before: Products = Products()
    products_after: Products = Products()
    runs: int = 0
    dropped: list[str] = field(default_factory=list)
    untried: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=dict)

    @property
    def is_clean(self) -> bool:
        """Whether nothing is wrong under the policy that it ends with."""
        return self.verdict in (CLEAN, REPAIRED)

    def __repr__(self) -> str:
        return f"<Repair of {self.subject}: {self.verdict}, {len(self.rules)} rules, {self.runs} runs; print shows it>"

    def to_text(self, every: bool = False, width: int = COLUMNS, lines: int = LINES) -> str:
        """The first screen, at most so many lines and columns; or, with every, each rule, step and note."""
        return repair_text(self, every, width, lines)

    def data(self) -> dict[str, Any]:
        """What is written as JSON."""
        said = {
            key: getattr(self, key)
            for key in (
                "subject", "device_type", "low", "base", "asked", "verdict", "runs", "reference", "dropped", "untried",
                "notes", "environment",
            )
        }  # fmt: skip
        data = {
            **said, "policy": self.policy.to_toml(), "rules": [_row(rule) for rule in self.rules],
            "steps": [asdict(step) for step in self.steps], "before": asdict(self.before), "after": asdict(self.after),
            "products_before": asdict(self.products_before), "products_after": asdict(self.products_after),
        }  # fmt: skip
        return {"schema": SCHEMA, **without_specials(data)}


def _row(found: RepairRule) -> dict[str, Any]:
    rule = found.rule
    said = {"op": rule.op, "action": str(rule.action), "module": rule.module, "argument": rule.argument,
            "reason": rule.reason, "source": rule.source}  # fmt: skip
    return {**said, "cause": found.cause, "share": found.share, "calls": found.calls, "cost_ns": found.cost_ns,
            "needed": found.needed}  # fmt: skip


def repair_of(data: dict[str, Any]) -> Repair:
    """The repair that such JSON data say. KeyError, TypeError or ValueError for others."""
    rules = []
    for row in data["rules"]:
        action: Action = parse_action(row["action"])
        rule = Rule(row["op"], action, module=row["module"], argument=row["argument"], reason=row["reason"],
                    source=row["source"])  # fmt: skip
        rules.append(
            RepairRule(rule, row["cause"], float(row["share"]), row["calls"], float(row["cost_ns"]), row["needed"])
        )
    return Repair(
        data["subject"], data["device_type"], data["low"], data["base"], Policy.parse(data["policy"]), data["asked"],
        data["verdict"], rules, [_step(row) for row in data["steps"]], _step(data["before"]), _step(data["after"]),
        {name: float(value) for name, value in data["reference"].items()}, Products(**data["products_before"]),
        Products(**data["products_after"]), data["runs"], list(data["dropped"]), list(data["untried"]),
        list(data["notes"]), dict(data["environment"]),
    )  # fmt: skip


def _step(row: dict[str, Any]) -> RepairStep:
    metric = {name: float(value) for name, value in row["metric"].items()}
    return RepairStep(
        row["what"], row["found"], tuple(row["added"]), tuple(row["left_out"]), float(row["error"]), metric,
        Products(**row.get("products", {})),
    )  # fmt: skip


# -- as text ----------------------------------------------------------------------------------------------------------

SHOWN, SHOWN_NOTES = 4, 2
INDENT = 9


def repair_text(found: Repair, every_row: bool = False, width: int = COLUMNS, room: int = LINES) -> str:
    """The first screen, at most `room` lines; or every rule, step and note."""
    if every_row:
        return "\n".join(_lines(found, len(found.rules), True))
    texts = (_lines(found, shown, False) for shown in range(SHOWN, 0, -1))
    shown = next((lines for lines in texts if len(lines) < room), _lines(found, 0, False))
    return first_screen([Part(shown)], lambda: repair_text(found, True), width, room)


def _lines(found: Repair, shown: int, whole: bool) -> list[str]:
    head = f"{found.subject}: {found.base} in {found.low} on {found.device_type}, {counted(found.runs, 'run')}"
    lines = [*wrapped(head), *_cut(wrapped(f"asked: {found.asked}"), 2, whole)]
    lines += _cut(wrapped(f"{found.verdict.upper()}: {_said(found)}"), 4, whole)
    if found.rules:
        lines += [*wrapped(_kept_low(found)), "", f"{'share':>6} {'calls':>5} {'time':>8}  rule"]
        lines += [line for rule in found.rules[:shown] for line in _rule(rule, whole)]
        if shown < len(found.rules):
            lines.append(f"{'':{INDENT}}... {len(found.rules) - shown} more: result.rules, --all")
        lines.append("")
    if whole:
        lines += [line for n, step in enumerate(found.steps, 1) for line in wrapped(f"{n}. {_step_text(step)}")]
    if found.dropped:
        lines.append(_count(found.dropped, "was tried, and is not needed"))
    if found.untried:
        lines.append(_count(found.untried, "may not be needed: the model ran as often as it may"))
    for note in found.notes if whole else found.notes[:SHOWN_NOTES]:
        lines += _cut(wrapped(f"note: {note}"), 2, whole)
    return [*lines, *_advice(found)]


def _cut(lines: list[str], most: int, whole: bool) -> list[str]:
    """So many lines; an ellipsis where there were more."""
    if whole or len(lines) <= most:
        return lines
    return [*lines[: most - 1], f"{lines[most - 1][: COLUMNS - 4]} ..."]


def _said(found: Repair) -> str:
    before, after = found.before, found.after
    if found.verdict == CLEAN:
        return f"{after.found}{_figures(found, after)}"
    if found.verdict == BEYOND:
        return before.found
    rules = counted(len(found.rules), "rule")
    end = "clean" if found.verdict == REPAIRED else after.found
    return f"{before.found}{_figures(found, before)}; with {rules} {end}{_figures(found, after)}"


def counted(number: int, what: str) -> str:
    """`1 rule`, `2 rules`, `no rule`."""
    return f"{number or 'no'} {what}{'s' * (number > 1)}"


def _figures(found: Repair, step: RepairStep) -> str:
    """The output's error and the metric, where they are known."""
    said = [] if math.isnan(step.error) else [f"output error {number_text(step.error)}"]
    for name, value in list(step.metric.items())[:2]:
        reference = f", fp32 {found.reference[name]:.6g}" if name in found.reference else ""
        said.append(f"{name} {value:.6g}{reference}")
    return f" ({'; '.join(said)})" if said else ""


def _kept_low(found: Repair) -> str:
    products, cost = found.products_after, sum(rule.cost_ns for rule in found.rules)
    said = f"{products.low} of {products.all} products still compute in {found.low}"
    went_through = found.products_before.all == products.all
    said += f" (before: {found.products_before.low})" if went_through else ""
    if math.isnan(cost):
        return said
    return f"{said}; by the device's profile the rules {'cost' if cost >= 0 else 'save'} {_time(abs(cost))} a run"


def _rule(found: RepairRule, whole: bool) -> list[str]:
    figures = f"{share_text(found.share):>6} {found.calls or '-':>5} {_signed(found.cost_ns):>8}  "
    lines = wrapped(figures + str(found.rule), " " * INDENT)
    said = [found.rule.reason, f"without it: {found.needed}" if found.needed and whole else ""]
    for each in filter(None, said):
        lines += _cut(wrapped(" " * INDENT + each, " " * INDENT), 2, whole)
    return lines


def _step_text(step: RepairStep) -> str:
    error = "" if math.isnan(step.error) else f", output error {number_text(step.error)}"
    metric = "".join(f", {name} {value:.6g}" for name, value in step.metric.items())
    changes = [f"adds {rule}" for rule in step.added] + [f"without {rule}" for rule in step.left_out]
    return f"{step.what}: {step.found}{error}{metric}" + "".join(f"; {change}" for change in changes)


def _count(rules: list[str], said: str) -> str:
    if len(rules) == 1:
        return f"1 rule more {said}"
    return f"{len(rules)} rules more {said.replace('was tried, and is', 'were tried, and are')}"


def _advice(found: Repair) -> list[str]:
    if found.verdict == CLEAN:
        return ["Nothing to do."]
    if found.verdict == BEYOND:
        return wrapped("No rule mends that. nc.watch() around the run in fp32 shows the calls.")
    rules = 'nc.autocast(..., policy=result.policy); result.policy.save("fixed.toml") keeps it.'
    if found.verdict == OUT_OF_IDEAS:
        return wrapped("What is left no rule of an op or a module mends: see the notes and `result.steps`.")
    return wrapped(f"To use it: {rules}")


def share_text(share: float) -> str:
    """`62%`; `<1%` of what is there, and less."""
    return f"{share:.0%}" if share >= 0.005 or not share else "<1%"


def _time(ns: float) -> str:
    size, unit = (ns / 1e6, "ms") if ns >= 1e6 else (ns / 1e3, "us")
    return f"{size:.0f} {unit}" if size >= 10 else f"{size:.1f} {unit}"


def _signed(ns: float) -> str:
    return "-" if math.isnan(ns) else f"{'-' if ns < 0 else '+'}{_time(abs(ns))}"
