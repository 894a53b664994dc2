"""The formats of each call of a model, as data that a test holds: a snapshot, made of what `explain` found."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from packaging.specifiers import InvalidSpecifier

from narrowcast.core.ledger import CallKind, Cast
from narrowcast.core.ledger.identity import CallId
from narrowcast.core.policy import Rule, in_range
from narrowcast.errors import Origin, SnapshotError
from narrowcast.output.lazy import imported
from narrowcast.reports.results.explanation import Explanation
from narrowcast.reports.results.ledger import Ledger

OR = " or "
"""Between the torch versions of a section."""
SEPARATE = 8
"""How many calls of one line that are decided alike have a row each."""
CONVERSION = "aten._to_copy.default"
"""The op by which a program's own code converts between formats."""


@dataclass(frozen=True, slots=True)
class Found:
    """Where a call was seen in this run, and what decided about it: the rule with its place, and its reason."""

    file: str = ""
    line: int = 0
    rule: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class CallFormats:
    """A call, or calls alike, with the formats of its floating tensors.

    came, computes, result: of its inputs, those that it computes in, of its output (`fp32`, `bf16,fp32`, or empty).
    rule: the action that decided, `no rule` where no rule did. casts: the arguments that are cast. times: how many
    calls of this place are alike. found: of a run. line: of a file, where the call stands in it.
    """

    id: CallId
    input_formats: str
    computes: str
    result: str
    rule: str
    casts: tuple[str, ...] = ()
    times: int = 1
    found: Found | None = field(default=None, compare=False)
    line: int = field(default=0, compare=False)

    @property
    def facts(self) -> tuple[object, ...]:
        """All that a snapshot says of it but which call it is."""
        return self.input_formats, self.computes, self.result, self.rule, self.casts, self.times

    @property
    def said(self) -> str:
        """`fp32 -> bf16 -> bf16 | lower: input, weight | 2 times`."""
        formats = " -> ".join(names or "-" for names in (self.input_formats, self.computes, self.result))
        casts = f": {', '.join(self.casts)}" if self.casts else ""
        times = f" | {self.times} times" if self.times > 1 else ""
        return f"{formats} | {self.rule}{casts}{times}"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The formats of a model's calls, in the order in which they first ran.

    torch: the versions for which they hold: `2.13`, `2.13 or 2.15`, or a range (`>=2.11,<2.16`). gradients: whether
    they were on. notes: about the run; they are not kept in a file. file, line: where it was read.
    """

    device_type: str
    model: str
    policy: str
    digest: str
    low: str
    torch: str
    gradients: bool
    calls: tuple[CallFormats, ...]
    notes: str = field(default="", compare=False)
    file: str = field(default="", compare=False)
    line: int = field(default=0, compare=False)

    def diff(self, now: Snapshot) -> Any:
        """Return the changes from this one to another, a SnapshotCheck, as `nc.diff` does."""
        return imported("narrowcast.testing.snapshot_changes").compare_snapshots(self, now)


def holds_for(versions: str, torch: str) -> bool:
    """Return whether `2.13`, `2.13 or 2.15` or `>=2.11,<2.16` holds a version. Raise SnapshotError for other text."""
    try:
        return any(in_range(f"=={v}.*" if v[:1].isdigit() else v, torch) for v in versions.split(OR))
    except InvalidSpecifier:
        advice = "Write 2.13, 2.13 or 2.15, or a range: >=2.11,<2.16."
        raise SnapshotError(f"torch {versions!r}", "not a range of versions", advice=advice) from None


def minor_of(torch: str) -> str:
    """Return the minor version: `2.13` of `2.13.0+cpu`."""
    return ".".join(torch.split(".")[:2])


# -- from a run --------------------------------------------------------------------------------------------------------


def snapshot_of(explanation: Explanation, rules: Iterable[Rule], torch: str, gradients: bool) -> Snapshot:
    """Return the calls of an explained run that have floating tensors. rules: all of the policy, built-in included."""
    ledger = explanation.ledger
    casts: dict[_Site, list[Cast]] = {}
    for cast, _ in ledger.kinds():
        casts.setdefault((cast.op, cast.module_path, cast.file, cast.line, cast.direction), []).append(cast)
    known = tuple(rules)
    calls = (
        CallFormats(
            identity, kind.input_formats, kind.computes, kind.result, kind.action,
            _arguments(kind, identity, casts), times,
            Found(kind.file, kind.line, _rule_text(kind, known, ledger), kind.reason),
        )
        for identity, kind, times in numbered(ledger)
        if kind.input_formats or kind.computes or kind.result
    )  # fmt: skip
    return Snapshot(
        explanation.device_type, " ".join(explanation.subject.split()), explanation.policy, explanation.digest[:8],
        explanation.low, torch, gradients, _each_once(calls), explanation.note,
    )  # fmt: skip


def _each_once(calls: Iterable[CallFormats]) -> tuple[CallFormats, ...]:
    """Return the calls under identities of their own. Several have the same where a function calls several models, or
    one of them in training and in evaluation: those that are alike are one row, others have the next free number.
    """
    rows: dict[CallId, CallFormats] = {}
    for call in calls:
        identity = call.id
        while identity in rows and rows[identity].facts[:-1] != call.facts[:-1]:
            identity = replace(identity, number=identity.number + 1)
        known = rows.get(identity)
        if known is None:
            rows[identity] = replace(call, id=identity)
        else:
            rows[identity] = replace(known, times=known.times + call.times)
    return tuple(rows.values())


def numbered(ledger: Ledger) -> Iterator[tuple[CallId, CallKind, int]]:
    """Yield each call of a kind under its identity, and how often it ran.

    Of more than SEPARATE calls in one call of a module that differ in nothing, their line included, as a loop makes
    them, the first represents all. What nobody counted is numbered in the order in which it first ran.
    """
    last: dict[tuple[str, str, str], int] = {}
    for kind, tally in ledger.calls.items():
        key = (kind.module_path, kind.op, kind.direction)
        numbers = sorted(tally.numbers) or [last.get(key, 0) + 1]
        last[key] = max(last.get(key, 0), *numbers)
        is_even = len(numbers) <= SEPARATE and tally.calls % len(numbers) == 0
        for number in numbers if is_even else numbers[:1]:
            times = tally.calls // len(numbers) if is_even else tally.calls
            yield CallId(kind.module_path, kind.op, number, direction=kind.direction), kind, times


_Site = tuple[str, str, str, int, str]


def _arguments(kind: CallKind, identity: CallId, casts: dict[_Site, list[Cast]]) -> tuple[str, ...]:
    """Return which arguments of this call are cast, in order; `self` of what converts by itself."""
    if kind.op == CONVERSION and kind.action == "no rule":
        return ("self",) if kind.input_formats != kind.result else ()
    there = casts.get((kind.op, kind.module_path, kind.file, kind.line, kind.direction), [])
    there = [cast for cast in there if cast.number in (0, identity.number)]
    ins, computes, outs = (set(names.split(",")) for names in (kind.input_formats, kind.computes, kind.result))
    return tuple(
        dict.fromkeys(
            cast.argument for cast in there
            if (cast.dst in outs if cast.argument.startswith("result") else cast.src in ins and cast.dst in computes)
        )
    )  # fmt: skip


def _rule_text(kind: CallKind, rules: tuple[Rule, ...], ledger: Ledger) -> str:
    """Return the rule that decided, with its place; empty where none did.

    A run in place of another device's may report the same rule in the list of the device that it is on.
    """
    there = [label for label, modules in ledger.matches.items() if kind.module_path in modules]
    for rule in rules:
        is_named = str(rule.action) == kind.action and (rule.reason or str(rule)) == kind.reason
        if is_named and rule.matches_op(kind.op) and any(f"{label} ".startswith(f"{rule} ") for label in there):
            return rule.label
    return ""


# -- several of them ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Snapshots:
    """What a file holds: a section for each device type, and for versions of torch that differ."""

    sections: tuple[Snapshot, ...] = ()
    file: str = ""

    def of(self, device_type: str, torch: str) -> Snapshot | None:
        """Return the section of a device type that holds for a version. Raise SnapshotError if there are two."""
        sections = [s for s in self.sections if s.device_type == device_type and holds_for(s.torch, torch)]
        if len(sections) > 1:
            where = tuple(Origin(self.file, s.line, f"torch {s.torch}") for s in sections)
            reason = f"{len(sections)} sections of {self.file} hold"
            raise SnapshotError(_asked(device_type, torch), reason, where, "Delete one, or narrow its torch versions.")
        return sections[0] if sections else None

    def needed(self, device_type: str, torch: str) -> Snapshot:
        """Return the section that holds. Raise SnapshotError if there is none, with what there is."""
        section = self.of(device_type, torch)
        if section is None:
            there = ", ".join(f"{s.device_type} with torch {s.torch}" for s in self.sections) or "nothing"
            advice = "Add them: run once with this torch and pytest --narrowcast-update (or narrowcast check --update)"
            advice += "; what the file holds of others stays."
            raise SnapshotError(_asked(device_type, torch), f"{self.file} holds {there}", (Origin(self.file),), advice)
        return section

    def with_section(self, snapshot: Snapshot, torch: str, versions: str = "") -> Snapshots:
        """Return these with what a run on this version of torch made, in place of what held for it.

        versions: for which it is declared to hold. Otherwise it joins a section that is equal, or represents this
        version alone; what another version has is left as it is.
        """
        held = self.of(snapshot.device_type, torch)
        if versions:
            others = [s for s in self.sections if s is not held and not _is_inside(s, snapshot.device_type, versions)]
            return self._sorted([*others, replace(snapshot, torch=versions)])
        others = [s for s in self.sections if s is not held]
        if held is not None and (held.calls == snapshot.calls or not _is_list(held.torch)):
            return self._sorted([*others, replace(snapshot, torch=held.torch)])
        minor = minor_of(torch)
        if held is not None:  # what the other versions of its list have was not looked at
            rest = [v for v in held.torch.split(OR) if v != minor]
            others += [replace(held, torch=OR.join(rest))] if rest else []
        twin = next((s for s in others if s.device_type == snapshot.device_type and s.calls == snapshot.calls), None)
        if twin is None:
            return self._sorted([*others, replace(snapshot, torch=minor)])
        others = [s for s in others if s is not twin]
        return self._sorted([*others, replace(snapshot, torch=OR.join([*twin.torch.split(OR), minor]))])

    def _sorted(self, sections: list[Snapshot]) -> Snapshots:
        return Snapshots(tuple(sorted(sections, key=lambda s: (s.device_type, s.torch))), self.file)


def _asked(device_type: str, torch: str) -> str:
    return f"the formats on {device_type} with torch {torch}"


def _is_list(versions: str) -> bool:
    return all(v[:1].isdigit() for v in versions.split(OR))


def _is_inside(section: Snapshot, device_type: str, versions: str) -> bool:
    if section.device_type != device_type or not _is_list(section.torch):
        return False
    return all(holds_for(versions, minor) for minor in section.torch.split(OR))


def check_versions(versions: str, torch: str) -> None:
    """Raise SnapshotError for what is no range of versions, or one without this torch."""
    if versions and not holds_for(versions, torch):
        advice = "Widen the range, or skip the test where another torch is installed."
        raise SnapshotError(f"a snapshot for torch {versions}", f"this is torch {torch}", advice=advice)
