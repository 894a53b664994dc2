"""Whether two runs of a model compute in the same formats, call by call: eager code, and another front end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from narrowcast.core.ledger.identity import CallId
from narrowcast.core.ledger.pairing import grouped, pairs_of

LISTED = 8


@dataclass(frozen=True, slots=True)
class RanCall:
    """A call of a run: the formats in which it computed and of its output, the rule if one decided, and its line."""

    id: CallId
    computes: str
    result: str
    rule: str
    file: str
    line: int

    @property
    def formats(self) -> str:
        """`bf16 -> bf16`."""
        return f"{self.computes or '-'} -> {self.result or '-'}"


@dataclass(frozen=True, slots=True)
class Disagreement:
    """Calls that compute otherwise in another front end; whole: all of a module, whose ops are other ones there."""

    front_end: str
    eager: tuple[RanCall, ...]
    found: tuple[RanCall, ...]


@dataclass(frozen=True, slots=True)
class Agreement:
    """What `assert_front_ends_agree` found.

    calls: for each front end that was taken, how many of eager code's calls were held against one of its own.
    not_taken: why another was not. as_a_whole: modules that compute by other ops, or not as many, in a front end (a
    compiler leaves out what nobody uses): only the set of their formats was held. disagreements: what is not the same.
    """

    calls: dict[str, int]
    not_taken: dict[str, str]
    as_a_whole: dict[str, tuple[str, ...]]
    disagreements: tuple[Disagreement, ...] = ()


@dataclass(frozen=True, slots=True)
class BesideEager:
    """One front end beside eager code."""

    calls: int
    as_a_whole: tuple[str, ...]
    disagreements: tuple[Disagreement, ...]


def compare_calls(front_end: str, eager: Iterable[RanCall], others: Iterable[RanCall]) -> BesideEager:
    """Compare two runs: by identity where a module makes the same calls; in order where these are other ops, the same
    number of them (`addmm` for `linear`); or else, for the rest of a module's calls, the set of formats.
    """
    ours, theirs = (
        grouped(calls, lambda call: (call.id.module_path, call.id.module_call)) for calls in (eager, others)
    )
    count = 0
    whole: list[str] = []
    disagreements: list[Disagreement] = []
    for key, calls in ours.items():
        pairs, left, left_there = _pairs(calls, theirs.get(key, []))
        count += len(pairs)
        disagreements += [
            Disagreement(front_end, (a,), (b,)) for a, b in pairs if (a.computes, a.result) != (b.computes, b.result)
        ]
        if left or left_there:
            whole.append(key[0] or "(the root)")
            if left_there and not {c.computes for c in left_there} <= {c.computes for c in calls}:
                disagreements.append(Disagreement(front_end, tuple(left or calls), tuple(left_there)))
    whole += [path or "(the root)" for path, module_call in theirs if (path, module_call) not in ours]
    return BesideEager(count, tuple(dict.fromkeys(whole)), tuple(disagreements))


def _pairs(
    ours: Sequence[RanCall], theirs: Sequence[RanCall]
) -> tuple[list[tuple[RanCall, RanCall]], list[RanCall], list[RanCall]]:
    """Return calls that belong together, and what is left on each side."""
    counts = tuple(Counter(call.id.op for call in calls) for calls in (ours, theirs))
    same = {op for op in counts[0] if counts[0][op] == counts[1][op]}
    found = pairs_of({call.id: call for call in theirs if call.id.op in same}, {call.id: call for call in ours})
    pairs, left = [(b, a) for a, b in found.both.values()], list(found.only_b.values())
    left_there = [call for call in theirs if call.id not in found.both]
    if len(left) == len(left_there):
        return [*pairs, *zip(left, left_there, strict=True)], [], []
    return pairs, left, left_there


def disagreement_lines(disagreements: Sequence[Disagreement]) -> list[str]:
    """Return lines for any reader: which call, in which formats here and there, the rule, the line."""
    lines = []
    for each in disagreements[:LISTED]:
        first, other = each.eager[0], each.found[0]
        others = f" (and {len(each.eager) - 1} more)" if len(each.eager) > 1 else ""
        op = "" if other.id == first.id else f"    {other.id}"
        lines += [
            f"{first.id}{others}",
            f"  {'eager':<8} {first.formats}",
            f"  {each.front_end:<8} {other.formats}{op}",
            f"  rule     {first.rule or 'no rule names this op: it follows its input dtype'}",
            f"  at       {first.file}:{first.line}" if first.file else "  at       no line of yours",
        ]
    if len(disagreements) > LISTED:
        lines.append(f"... and {len(disagreements) - LISTED} more")
    return lines
