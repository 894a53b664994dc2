"""Which modules and calls of one run are those of another: a text file that is written, edited by hand and read back.

A line is `blocks.*.q + blocks.*.k + blocks.*.v = layers.*.qkv`, of modules, or of calls by their identities:
docs/reference/run.md says how it is written.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from narrowcast.core.ledger.identity import CallId
from narrowcast.errors import Origin, RunError, reason_of
from narrowcast.output.files import replace_text

ROOT = "(root)"
NOTHING = "-"
_SECTIONS = re.compile(r"\*")
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


@dataclass(frozen=True, slots=True)
class MappingLine:
    """One line: modules or calls (their identities as text) of a, those of b. One side may be empty: no partner."""

    a: tuple[str, ...]
    b: tuple[str, ...]
    line: int = field(default=0, compare=False)

    @property
    def is_of_calls(self) -> bool:
        """Whether it names calls, not modules."""
        return any(" #" in name for name in (*self.a, *self.b))

    def __str__(self) -> str:
        return f"{_side_text(self.a)} = {_side_text(self.b)}"


@dataclass(frozen=True, slots=True)
class RunMapping:
    """Modules and calls of two runs by pairs. file: where it was read, for errors. comments: written below."""

    entries: tuple[MappingLine, ...] = ()
    file: str = field(default="", compare=False)
    comments: tuple[str, ...] = ()

    @staticmethod
    def parse(text: str, file: str = "<string>") -> RunMapping:
        """Return the mapping of that text. Raise RunError with file and line for what is none."""
        entries, comments = [], []
        for number, line in enumerate(text.splitlines(), 1):
            content = line.strip()
            if content.startswith("#") and content not in _HEAD:
                comments.append(content.removeprefix("#").removeprefix(" "))
            elif content and not content.startswith("#"):
                entries.append(_entry(content, file, number))
        return RunMapping(tuple(entries), file, tuple(comments))

    @staticmethod
    def load(path: str | Path) -> RunMapping:
        """Return the mapping in a file. Raise RunError for one that is not there or is no text."""
        try:
            return RunMapping.parse(Path(path).read_text(encoding="utf-8"), str(path))
        except (OSError, UnicodeDecodeError) as error:
            found, where = reason_of(error), (Origin(str(path)),)
            advice = "Give a text file; narrowcast diff RUN_A RUN_B --mapping NEW_FILE writes one to start from."
            raise RunError(f"a mapping of runs, {path}", found, where, advice) from None

    def __str__(self) -> str:
        return "\n".join([*_HEAD, *map(str, self.entries), *(f"# {line}" for line in self.comments)]) + "\n"

    def save(self, path: str | Path) -> None:
        """Write the text, replacing the file at once. RunError where it cannot be written."""
        try:
            replace_text(Path(path), str(self))
        except OSError as error:
            found, where = reason_of(error), (Origin(str(path)),)
            advice = "Give a file in a folder that exists."
            raise RunError(f"writing a mapping to {path}", found, where, advice) from error

    def modules(self, a: Collection[str], b: Collection[str]) -> list[MappingLine]:
        """Return the entries about modules, `*` filled in. a, b: the paths that exist. RunError for any other."""
        of_modules = (entry for entry in self.entries if not entry.is_of_calls)
        return [line for entry in of_modules for line in self._filled_in(entry, a, b)]

    def calls(self) -> list[tuple[tuple[CallId, ...], tuple[CallId, ...], int]]:
        """Return the entries about calls: their identities, and the line."""
        entries = []
        for entry in self.entries:
            if entry.is_of_calls:
                a, b = (tuple(CallId.parse(name) for name in side) for side in (entry.a, entry.b))
                entries.append((a, b, entry.line))
        return entries

    def refused(self, line: int, found: str, advice: str) -> RunError:
        """Return the error about one of its lines."""
        return RunError("a mapping of runs", found, (Origin(self.file, line),), advice)

    def _filled_in(self, entry: MappingLine, a: Collection[str], b: Collection[str]) -> Iterator[MappingLine]:
        stars: set[tuple[str, ...]] = set()
        for names, there in ((entry.a, a), (entry.b, b)):
            stars |= {matched for name in names for path in there if (matched := _stars(name, path)) is not None}
        missing = ""
        filled = 0
        for parts in sorted(stars, key=lambda parts: [(len(part), part) for part in parts]):
            of_a, of_b = (tuple(_with_stars(name, parts) for name in side) for side in (entry.a, entry.b))
            line = MappingLine(of_a, of_b, entry.line)
            lacks = [f"run a has no calls in {n or ROOT}" for n in line.a if n not in a]
            lacks += [f"run b has no calls in {n or ROOT}" for n in line.b if n not in b]
            missing = missing or "".join(lacks[:1])
            if not lacks:
                filled += 1
                yield line
        if not filled:
            raise self.refused(entry.line, missing or f"neither run has calls in {entry}", _ADVICE)


_HEAD = (
    "# Modules (paths; * represents one part of a path) and calls of run a = those of run b.",
    "# Several, as of a fused projection: a.q + a.k + a.v = b.qkv. Without a partner: a.rotary = -",
)
_ADVICE = "Name modules as the runs do: narrowcast show RUN --all lists their calls."


def _entry(content: str, file: str, number: int) -> MappingLine:
    left, equals, right = content.partition(" = ")
    sides = [tuple(part.strip() for part in side.split(" + ")) for side in (left, right)]
    where = (Origin(file, number),)
    asked = f"a mapping of runs, {content!r}"
    advice = "Write MODULE = MODULE, MODULE + MODULE = MODULE, CALL = CALL or MODULE = -."
    if not equals or not all(all(side) for side in sides):
        raise RunError(asked, "no line with ' = ' between two names", where, advice)
    a, b = (() if side == (NOTHING,) else tuple("" if name == ROOT else name for name in side) for side in sides)
    if (not a and not b) or (len(a) > 1 and len(b) > 1):
        raise RunError(asked, "several names on both sides, or none on both", where, advice)
    if len({name.count("*") for name in (*a, *b)}) > 1:
        raise RunError(asked, "a * on one side only", where, "Write as many * on each side: they represent the same.")
    entry = MappingLine(a, b, number)
    if entry.is_of_calls:
        for name in (*a, *b):
            try:
                CallId.parse(name)
            except RunError as error:
                raise RunError(asked, f"{name!r}: {error.found}", where, error.advice) from None
    return entry


def _side_text(names: Iterable[str]) -> str:
    return " + ".join(name or ROOT for name in names) or NOTHING


def _stars(pattern: str, path: str) -> tuple[str, ...] | None:
    """Return what the * of a pattern represent in a path; None if the path is another."""
    match = re.fullmatch("([^.]+)".join(map(re.escape, _SECTIONS.split(pattern))), path)
    return match.groups() if match else None


def _with_stars(pattern: str, stars: tuple[str, ...]) -> str:
    parts = iter(stars)
    return _SECTIONS.sub(lambda _: next(parts), pattern)


def generalised(entries: Iterable[MappingLine]) -> Iterator[MappingLine]:
    """Yield the same entries, those that differ in equal numbers only as one with *. Single ones are unchanged."""
    groups: dict[tuple[tuple[str, ...], tuple[str, ...]], list[MappingLine]] = {}
    for entry in entries:
        pattern = MappingLine(tuple(_NUMBER.sub("*", n) for n in entry.a), tuple(_NUMBER.sub("*", n) for n in entry.b))
        groups.setdefault((pattern.a, pattern.b), []).append(entry)
    for (a, b), members in groups.items():
        is_one = len({name.count("*") for name in (*a, *b)}) == 1 and len(members) > 1 and {"*"}.isdisjoint((*a, *b))
        alike = all(len({tuple(_NUMBER.findall(n)) for n in (*m.a, *m.b)}) == 1 for m in members)
        yield from [MappingLine(a, b)] if is_one and alike and not members[0].is_of_calls else members
