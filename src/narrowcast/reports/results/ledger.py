"""The ledger: an append-only record of a run's casts and refusals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, ClassVar

from narrowcast.core.ledger.pairing import other_counts
from narrowcast.core.ledger.records import Advice, CallKind, Cast, EditRecord, Refusal, Tally, Totals
from narrowcast.output.words import counted
from narrowcast.reports.results.result import Result
from narrowcast.reports.results.verdicts import RECORDED, REFUSED

LISTED = 100_000
"""How many casts are listed one by one; those after them are counted by kind, so that memory is bounded."""


@dataclass(frozen=True, slots=True)
class CastChange:
    """One line of a ledger diff: casts alike in op, argument, module and formats, and how many there were."""

    op: str
    argument: str
    module_path: str
    src: str
    dst: str
    direction: str
    before: int
    after: int

    def __str__(self) -> str:
        arrow = f"{self.src} -> {self.dst}" + (" (backward)" if self.direction == "backward" else "")
        where = f" in {self.module_path}" if self.module_path else ""
        return f"{self.op} {self.argument}{where}: {arrow}: {self.before} -> {self.after}"


@dataclass(slots=True, repr=False)
class Ledger(Result):
    """Casts and refusals in the order in which they happened, tallies of all calls, and the edits made to graphs.

    casts: the first LISTED ones. counted: those after them, alike ones together, each without its sizes. advice: how
    often each piece was given. matches: for each rule that decided something, by its text, the modules in which it did,
    and how many calls. notes: about the run as a whole, such as that the low format has no fast units here.
    """

    WHAT: ClassVar[str] = "a ledger"
    SCHEMA: ClassVar[str] = "narrowcast.ledger/2"

    casts: list[Cast] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    calls: dict[CallKind, Tally] = field(default_factory=dict)
    edits: list[EditRecord] = field(default_factory=list)
    advice: dict[Advice, int] = field(default_factory=dict)
    matches: dict[str, dict[str, int]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    counted: dict[Cast, Tally] = field(default_factory=dict)

    def add(self, cast: Cast) -> None:
        """Append one cast; or count it, once LISTED are there."""
        if len(self.casts) < LISTED:
            self.casts.append(cast)
        else:
            self._count_cast(cast, Tally(1, cast.moved_bytes))

    def _count_cast(self, cast: Cast, times: Tally) -> None:
        self.counted.setdefault(replace(cast, elements=0, moved_bytes=0), Tally()).add(times)

    def kinds(self) -> Iterator[tuple[Cast, Tally]]:
        """Yield all casts, those that are counted with how many there were."""
        yield from ((cast, Tally(1, cast.moved_bytes)) for cast in self.casts)
        yield from self.counted.items()

    @property
    def cast_count(self) -> int:
        """How many casts there were."""
        return len(self.casts) + sum(tally.calls for tally in self.counted.values())

    def note(self, sentence: str) -> None:
        """Say something about the run as a whole, once."""
        if sentence and sentence not in self.notes:
            self.notes.append(sentence)

    def count_match(self, rule: str, module_path: str, calls: int = 1) -> None:
        """Add calls that a rule decided, or decided an argument of."""
        by_module = self.matches.setdefault(rule, {})
        by_module[module_path] = by_module.get(module_path, 0) + calls

    def count_call(self, kind: CallKind, moved_bytes: int, number: int = 0, multiplications: int | None = None) -> None:
        """Add one call, with the bytes that it moved and the multiplications that it made, to the tally of calls that
        are alike. number: as in `Cast`.
        """
        numbers = {number} if number else set()
        self.calls.setdefault(kind, Tally()).add(Tally(1, moved_bytes, numbers, multiplications))

    def totals(self) -> Totals:
        """Return counts and bytes over all casts, refusals and calls."""
        sums = Counter({"casts": self.cast_count, "refusals": len(self.refusals)})
        for cast, tally in self.kinds():
            sums[cast.how] += tally.calls
            sums[cast.direction] += tally.calls
            sums["repeated"] += tally.calls * (cast.repeated and cast.how == "copied")
            sums["cast_bytes"] += tally.moved_bytes
        for tally in self.calls.values():
            sums["calls"] += tally.calls
            sums["op_bytes"] += tally.moved_bytes
        return Totals(**{field.name: sums[field.name] for field in fields(Totals)})

    def op_formats(self) -> dict[str, dict[str, int]]:
        """Return for each op how many calls computed in which formats: `{"aten.linear.default": {"bf16": 37}}`."""
        table: dict[str, Counter[str]] = {}
        for kind, tally in self.calls.items():
            table.setdefault(kind.op, Counter())[kind.computes or "-"] += tally.calls
        return {op: dict(formats) for op, formats in table.items()}

    def merge(self, *others: Ledger) -> Ledger:
        """Return a ledger with the records of this one and then of the others."""
        merged = Ledger()
        for ledger in (self, *others):
            for cast in ledger.casts:
                merged.add(cast)
            for cast, times in ledger.counted.items():
                merged._count_cast(cast, times)
            merged.refusals += ledger.refusals
            merged.edits += ledger.edits
            for note in ledger.notes:
                merged.note(note)
            for advice, often in ledger.advice.items():
                merged.advice[advice] = merged.advice.get(advice, 0) + often
            for rule, modules in ledger.matches.items():
                for path, calls in modules.items():
                    merged.count_match(rule, path, calls)
            for kind, tally in ledger.calls.items():
                merged.calls.setdefault(kind, Tally()).add(tally)
        return merged

    def diff(self, other: Ledger) -> tuple[CastChange, ...]:
        """Return what changes from this ledger to `other`: groups of casts with other numbers. Lines may have moved."""
        before, after = _groups(self.kinds()), _groups(other.kinds())
        return tuple(CastChange(*key, *counts) for key, counts in other_counts(before, after).items())

    @property
    def verdict(self) -> str:
        """`refusals` where calls were refused, else `recorded`."""
        return REFUSED if self.refusals else RECORDED

    def data(self) -> dict[str, Any]:
        """Return what is written as JSON, with the sums."""
        totals = self.totals()
        return {**Result.data(self), "totals": {**asdict(totals), "share_of_casts": totals.share_of_casts}}

    def __repr__(self) -> str:
        t = self.totals()
        share = f"{t.share_of_casts:.1%} of the bytes moved"
        counts = f"{counted(t.refusals, 'refusal')}, {counted(t.calls, 'call')}"
        return f"<Ledger: {counted(t.casts, 'cast')} ({share}), {counts}; print shows them>"


_Alike = tuple[str, str, str, str, str, str]


def _groups(casts: Iterable[tuple[Cast, Tally]]) -> Counter[_Alike]:
    counts = Counter[_Alike]()
    for c, tally in casts:
        counts[c.op, c.argument, c.module_path, c.src, c.dst, c.direction] += tally.calls
    return counts
