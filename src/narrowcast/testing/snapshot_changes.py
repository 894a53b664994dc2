"""What changed between a snapshot of formats and a run: call by call, as data, as text for a stranger, as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from typing import Any

from narrowcast.core.ledger.identity import CallId
from narrowcast.core.ledger.pairing import grouped
from narrowcast.core.policy import Rule, Site
from narrowcast.formats import parse_format
from narrowcast.output.screen import LINES, Part, first_screen, wrapped
from narrowcast.output.words import counted
from narrowcast.testing.snapshot import CallFormats, Found, Snapshot

SCHEMA = "narrowcast.check/1"
CHANGED, NEW, GONE = "changed", "new", "gone"
SHOWN = 8
"""How many kinds of changes a failure lists; the JSON has all."""
LISTED = 3
"""How many calls are listed for an entry of a test's own table."""


@dataclass(frozen=True, slots=True)
class Change:
    """One call that is not as it was; kind: CHANGED, NEW or GONE. id: of the call as it is now, or of one gone."""

    kind: str
    id: CallId
    was: CallFormats | None
    now: CallFormats | None

    @property
    def follows(self) -> bool:
        """Whether it is decided as it was, about inputs that come in other formats: a consequence, not a cause."""
        was, now = self.was, self.now
        return was is not None and now is not None and was.rule == now.rule and was.input_formats != now.input_formats


@dataclass(frozen=True, slots=True)
class MovedCalls:
    """Calls whose formats are as they were, in modules that have another path now."""

    src: str
    dst: str
    calls: int


@dataclass(frozen=True, slots=True)
class SnapshotCheck:
    """A run held against a snapshot. changes: calls that are not as they were. moves: modules with another path.

    of_casts: only new casts were looked for.
    """

    was: Snapshot
    now: Snapshot
    changes: tuple[Change, ...]
    moves: tuple[MovedCalls, ...] = ()
    of_casts: bool = False

    @property
    def is_same(self) -> bool:
        """Whether every call is as it was."""
        return not self.changes and not self.moves

    def new_casts(self) -> SnapshotCheck:
        """Return the changes by which something is cast that was not."""
        changes = tuple(change for change in self.changes if _new_casts(change))
        return replace(self, changes=changes, moves=(), of_casts=True)

    def to_json(self, indent: int | None = None) -> str:
        """Return JSON text under the schema `narrowcast.check/1` (docs/reference/testing.md)."""
        data: dict[str, Any] = {
            "schema": SCHEMA, "verdict": "same" if self.is_same else "changed", "snapshot": self.was.file,
            "device_type": self.now.device_type, "was": _head(self.was), "now": _head(self.now),
            "changes": [_change_data(change) for change in self.changes],
            "moves": [{"from": m.src, "to": m.dst, "calls": m.calls} for m in self.moves], "notes": self.now.notes,
        }  # fmt: skip
        return json.dumps(data, indent=indent)

    def __str__(self) -> str:
        return check_text(self)


def compare_snapshots(was: Snapshot, now: Snapshot) -> SnapshotCheck:
    """Return what changed. If their number differs, calls of one op of one module are aligned by what they do."""
    before, after = (grouped(side.calls, lambda call: replace(call.id, number=1)) for side in (was, now))
    changes: list[Change] = []
    for key in after | before:
        changes += _changes_in(before.get(key, []), after.get(key, []))
    changes, moves = _without_moves(changes)
    return SnapshotCheck(was, now, tuple(changes), moves)


def _changes_in(before: list[CallFormats], after: list[CallFormats]) -> list[Change]:
    changes: list[Change] = []
    is_even = len(before) == len(after)
    for was, now in zip(before, after, strict=True) if is_even else _aligned(before, after):
        if now is None:
            changes += [] if was is None else [Change(GONE, was.id, was, None)]
        elif was is None:
            changes.append(Change(NEW, now.id, None, now))
        elif was.facts != now.facts:
            changes.append(Change(CHANGED, now.id, was, now))
    return changes


def _aligned(
    before: list[CallFormats], after: list[CallFormats]
) -> Iterator[tuple[CallFormats | None, CallFormats | None]]:
    matcher = SequenceMatcher(None, [c.facts for c in before], [c.facts for c in after], autojunk=False)
    for _, i, i_end, j, j_end in matcher.get_opcodes():
        both = min(i_end - i, j_end - j)
        yield from zip(before[i : i + both], after[j : j + both], strict=True)
        yield from ((call, None) for call in before[i + both : i_end])
        yield from ((None, call) for call in after[j + both : j_end])


def _without_moves(changes: list[Change]) -> tuple[list[Change], tuple[MovedCalls, ...]]:
    """Return the changes without modules whose calls are now those of another path: a rename, reported in a line."""
    gone, new = _by_path(changes, GONE), _by_path(changes, NEW)
    waiting: dict[tuple[object, ...], list[str]] = {}
    for path, calls in new.items():
        waiting.setdefault(_signature(calls), []).append(path)
    counts: dict[tuple[str, str], int] = {}
    moved: set[tuple[str, str]] = set()
    for path, calls in gone.items():
        there = waiting.get(_signature(calls))
        if there and path not in new:
            to = there.pop(0)
            moved |= {(GONE, path), (NEW, to)}
            src, dst = (name.split(".") if name else [] for name in (path, to))
            while src and dst and src[-1] == dst[-1]:  # `encoder.layer.0`, `enc.layer.0` -> `encoder`, `enc`
                src.pop()
                dst.pop()
            key = ".".join(src), ".".join(dst)
            counts[key] = counts.get(key, 0) + len(calls)
    left = [change for change in changes if (change.kind, change.id.module_path) not in moved]
    return left, tuple(MovedCalls(src, dst, calls) for (src, dst), calls in counts.items())


def _by_path(changes: list[Change], kind: str) -> dict[str, list[CallFormats]]:
    by_path: dict[str, list[CallFormats]] = {}
    for change in changes:
        call = change.was if kind == GONE else change.now
        if change.kind == kind and call is not None:
            by_path.setdefault(call.id.module_path, []).append(call)
    return by_path


def _signature(calls: list[CallFormats]) -> tuple[object, ...]:
    return tuple((replace(call.id, module_path=""), call.facts) for call in calls)


def _new_casts(change: Change) -> tuple[str, ...]:
    """Return the arguments that are cast now and were not; all that a call casts that runs more often."""
    if change.now is None:
        return ()
    if change.was is None or change.now.times > change.was.times:
        return change.now.casts
    return tuple(name for name in change.now.casts if name not in change.was.casts)


# -- what a test writes down itself ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Unmet:
    """An entry of a test's own table that does not hold. calls: those that compute otherwise; none: it names none."""

    pattern: str
    formats: str
    calls: tuple[CallFormats, ...]


def unmet(snapshot: Snapshot, expected: Mapping[str, Any]) -> list[Unmet]:
    """Return the entries that do not hold: `aten.linear`, `encoder.* aten.softmax`, `head aten.matmul.default #2`, each
    with the format (`bf16`, or `bf16,fp32`) in which these calls compute. Patterns are those of a policy's rules.
    """
    entries = []
    for pattern, value in expected.items():
        wanted = frozenset(str(parse_format(part.strip())) for part in str(value).split(","))
        named, _, number = pattern.partition(" #")
        module, _, op = named.rpartition(" ")
        rule = Rule(op, "full", module=module or None)  # a text is read as an action
        calls = [c for c in snapshot.calls if rule.matches_op(c.id.op) and rule.matches_site(Site(c.id.module_path))]
        if number:
            calls = [c for c in calls if c.id.number == int(number) and c.id.module_path == module]
        wrong = tuple(c for c in calls if frozenset(filter(None, c.computes.split(","))) != wanted)
        if wrong or not calls:
            entries.append(Unmet(pattern, ",".join(sorted(wanted)), wrong))
    return entries


# -- as text and JSON --------------------------------------------------------------------------------------------------


def check_text(check: SnapshotCheck, most: int | None = SHOWN) -> str:
    """Return the verdict, each kind of change with its rule and its line, causes first, and what else differs.

    most: this many kinds of change at most.
    """
    if check.is_same:
        return _same(check)
    alike = _alike(check)
    blocks = [[summary(check)], *_moved(check), *(_change_lines(c, check.was.file) for c in alike[:most])]
    if most is not None and len(alike) > most:
        blocks.append([f"... and {sum(len(c) for c in alike[most:])} more, of {len(alike) - most} other kinds"])
    return "\n\n".join("\n".join(block) for block in [*blocks, [since_then(check)]])


def check_screen(check: SnapshotCheck, width: int, room: int = LINES) -> str:
    """Return the text on at most `room` lines of `width` columns: the first kinds of change."""
    if check.is_same:
        return first_screen([Part(wrapped(_same(check), width=width))], None, room)
    blocks = [*_moved(check), *(_change_lines(changes, check.was.file) for changes in _alike(check))]
    parts = [Part(wrapped(summary(check), width=width))]
    parts += [Part(["", *block], min(n, 1), units=(len(block) + 1,)) for n, block in enumerate(blocks)]
    since = Part(["", *wrapped(since_then(check), width=width)])
    return first_screen([*parts, since], lambda: check_text(check, None), room)


def _same(check: SnapshotCheck) -> str:
    now = check.now
    calls = f"{counted(len(now.calls), 'call')} of {now.model} on {now.device_type}"
    return f"{calls}: the formats are those of {check.was.file}"


def _moved(check: SnapshotCheck) -> list[list[str]]:
    names = [(f"{m.src or '(the root)'} is now {m.dst or '(the root)'}", m.calls) for m in check.moves]
    return [[f"moved    {move}: {counted(calls, 'call')}, with the same formats"] for move, calls in names]


def summary(check: SnapshotCheck) -> str:
    """Return a line: `BertModel on cpu differs from formats.txt: 2 changed, 1 new (91 calls)`."""
    now, file = check.now, check.was.file
    model = f"{now.model} on {now.device_type}"
    if check.of_casts:
        return (
            f"{model} casts what it did not cast in {file}: {len(check.changes)} of {counted(len(now.calls), 'call')}"
        )
    kinds = {kind: sum(c.kind == kind for c in check.changes) for kind in (CHANGED, NEW, GONE)}
    kinds["moved"] = sum(move.calls for move in check.moves)
    counts = ", ".join(f"{n} {kind}" for kind, n in kinds.items() if n)
    return f"{model} differs from {file}: {counts} ({counted(len(now.calls), 'call')})"


def _alike(check: SnapshotCheck) -> list[list[Change]]:
    """Return changes that are alike in other modules, together; those that follow from others last."""
    groups: dict[tuple[object, ...], list[Change]] = {}
    for change in check.changes:
        facts = tuple(call.facts if call is not None else None for call in (change.was, change.now))
        seen = change.now.found if change.now is not None else None
        key = (change.kind, change.id.op, facts, seen.rule if seen is not None else "")
        groups.setdefault(key, []).append(change)
    return sorted(groups.values(), key=lambda changes: changes[0].follows)


def _change_lines(changes: list[Change], file: str) -> list[str]:
    first = changes[0]
    lines = [f"{'follows' if first.follows else first.kind:<8} {first.id}"]
    if first.was is not None:
        lines.append(f"  was    {first.was.said}" + (f"    {file}:{first.was.line}" if first.was.line else ""))
    if first.now is not None:
        lines += [f"  now    {first.now.said}", *_found_lines(first.now)]
    if len(changes) > 1:
        paths = [change.id.module_path or "(the root)" for change in changes]
        last = f", the last in {paths[-1]}" if paths[-1] != paths[0] else ""
        lines.append(f"  and {len(changes) - 1} more like it{last}")
    return lines


def _found_lines(call: CallFormats) -> list[str]:
    """Return the rule that decided about a call of a run, with its place and reason, and the line of the call."""
    seen = call.found
    if seen is None:
        return []
    lines = [f"  rule   {seen.rule or 'none names this op: it follows its input dtype'}"]
    if seen.rule and seen.reason and seen.reason not in seen.rule:
        lines.append(f"         because {seen.reason}")
    return [*lines, f"  at     {seen.file}:{seen.line}" if seen.file else "  at     no line of yours"]


def unmet_text(entries: Iterable[Unmet]) -> str:
    """Return each entry, and of the calls that compute otherwise the first few."""
    blocks = []
    for entry in entries:
        head = f"{entry.pattern!r} is to compute in {entry.formats}"
        if not entry.calls:
            blocks.append(f"{head}: no call is one of these")
            continue
        lines = [f"{head}: {counted(len(entry.calls), 'call', 'do')} not"]
        for call in entry.calls[:LISTED]:
            lines += [f"  {call.id}", f"  now    {call.said}", *_found_lines(call)]
        if len(entry.calls) > LISTED:
            lines.append(f"  ... and {len(entry.calls) - LISTED} more")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def since_then(check: SnapshotCheck) -> str:
    """Return what else differs from when the snapshot was written; or that it must be the model or its inputs."""
    was, now = check.was, check.now
    policies = tuple(f"{s.policy} ({s.digest})" for s in (was, now))
    pairs = {
        "the model": (was.model, now.model), "the policy": policies, "the low format": (was.low, now.low),
        "gradients": tuple("on" if s.gradients else "off" for s in (was, now)),
    }  # fmt: skip
    changed = [f"{name} was {a} and is {b}" for name, (a, b) in pairs.items() if a != b]
    if changed:
        return f"Also changed since it was written: {'; '.join(changed)}."
    same = f"Policy ({now.policy}, {now.digest}), low format and gradients are the same"
    return f"{same}: the model, its inputs or a library changed."


def _head(snapshot: Snapshot) -> dict[str, Any]:
    names = ("model", "policy", "digest", "low", "torch", "gradients")
    return {name: getattr(snapshot, name) for name in names} | {"calls": len(snapshot.calls)}


def _change_data(change: Change) -> dict[str, Any]:
    data: dict[str, Any] = {"kind": change.kind, "follows": change.follows, "call": str(change.id)}
    for name, call in (("was", change.was), ("now", change.now)):
        facts = ("input_formats", "computes", "result", "rule", "casts", "times")
        data[name] = None if call is None else {"call": str(call.id)} | {f: getattr(call, f) for f in facts}
    seen = (change.now.found if change.now is not None else None) or Found()
    return data | {
        "file": seen.file, "line": seen.line, "decided_by": seen.rule, "reason": seen.reason,
        "snapshot_line": change.was.line if change.was else 0, "new_casts": list(_new_casts(change)),
    }  # fmt: skip
