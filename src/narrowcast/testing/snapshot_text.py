"""Snapshots as a text file that a reviewer reads in a diff: a section for each device, a line for each call."""

from __future__ import annotations

import re
from pathlib import Path

from narrowcast.core.ledger.identity import CallId
from narrowcast.errors import NarrowcastError, Origin, RunError, SnapshotError
from narrowcast.formats import FORMATS
from narrowcast.output.files import replace_text
from narrowcast.testing.snapshot import CallFormats, Snapshot, Snapshots, holds_for

SCHEMA = "narrowcast.formats/1"
_LEGEND = "# call | input dtypes -> compute dtypes -> output dtypes | what decided: the arguments that are cast"
_KEYS = ("model", "policy", "low", "torch", "gradients", "calls")
_CALL = re.compile(
    r"(?P<id>.+) \| (?P<input_formats>\S+) -> (?P<computes>\S+) -> (?P<result>\S+) \| (?P<rule>no rule|[\w()]+)"
    r"(?:: (?P<casts>[^|]+?))?(?: \| (?P<times>[1-9]\d*) times)?"
)
_CALL_FORM = "PATH OP #NUMBER | INPUT DTYPES -> COMPUTE DTYPES -> OUTPUT DTYPES | RULE: ARGUMENTS | N times"
_ANEW = "Have it from version control again, or delete it and write it again: pytest --narrowcast-update."


def snapshots_text(snapshots: Snapshots) -> str:
    """Return the file: lines that are alike are equal, and nothing in it changes unless formats do."""
    lines = [SCHEMA, _LEGEND]
    for section in snapshots.sections:
        lines += [
            "", f"device {section.device_type}", f"model {section.model}", f"policy {section.policy} {section.digest}",
            f"low {section.low}", f"torch {section.torch}", f"gradients {'on' if section.gradients else 'off'}",
            f"calls {len(section.calls)}", "", *(call_text(call) for call in section.calls),
        ]  # fmt: skip
    return "\n".join(lines) + "\n"


def call_text(call: CallFormats) -> str:
    """Return one line: `encoder aten.linear.default #1 | fp32 -> bf16 -> bf16 | lower: input, weight`."""
    return f"{call.id} | {call.said}"


def load_snapshots(path: str | Path) -> Snapshots:
    """Return the snapshots in a file. SnapshotError for one that is missing, broken, cut off, or of another kind."""
    try:
        text = Path(path).read_bytes().decode()
    except OSError as error:
        advice = "Write it once with pytest --narrowcast-update, or narrowcast check --update, and commit it."
        raise _wrong(path, f"{type(error).__name__}: {error.strerror}", advice) from None
    except UnicodeDecodeError:
        raise _wrong(path, "it is not text", "Give the file that an update wrote.") from None
    return parse_snapshots(text, str(path))


def save_snapshots(snapshots: Snapshots, path: Path) -> None:
    """Write the file at once. SnapshotError if it cannot be written; then the old one is as it was."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, snapshots_text(snapshots))
    except OSError as error:
        asked, found = f"writing the snapshot {path}", f"{type(error).__name__}: {error.strerror}"
        advice = "Give a path that may be written to; nothing was changed."
        raise SnapshotError(asked, found, (Origin(str(path)),), advice) from error


def parse_snapshots(text: str, file: str = "<string>") -> Snapshots:
    """Return the snapshots in text. SnapshotError for other text, with the line and what is wrong with it."""
    lines = text.splitlines()
    first = lines[0].strip() if lines else ""
    if first != SCHEMA:
        found = f"it begins with {first[:40]!r}" if first else "it is empty"
        advice = "Give a file that pytest --narrowcast-update or narrowcast check --update wrote."
        if first.startswith(SCHEMA.partition("/")[0]):
            found = f"schema {first!r} where {SCHEMA!r} is known"
            advice = "Read it with the version of Narrowcast that wrote it."
        raise _wrong(file, found, advice, 1)
    sections: list[_DeviceSection] = []
    for number, line in enumerate(lines[1:], 2):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        where = (Origin(file, number),)
        if line.startswith(("<<<<<<<", "=======", ">>>>>>>", "|||||||")):
            raise _broken("a merge was not resolved here", where)
        if line.startswith("device "):
            sections.append(_DeviceSection(line.removeprefix("device ").strip(), number))
        elif not sections:
            raise _broken(f"{line[:60]!r} is before the first line `device ...`", where)
        elif " | " in line:
            sections[-1].add_call(line, number, where)
        else:
            sections[-1].add_fact(line, where)
    return Snapshots(tuple(section.made(file) for section in sections), file)


def _wrong(file: str | Path, found: str, advice: str, line: int = 0) -> SnapshotError:
    return SnapshotError(f"the snapshot {file}", found, (Origin(str(file), line),), advice)


def _broken(found: str, where: tuple[Origin, ...]) -> SnapshotError:
    return SnapshotError(f"the snapshot {where[0].file}", found, where, _ANEW)


class _DeviceSection:
    def __init__(self, device_type: str, line: int) -> None:
        self._device_type, self._line = device_type, line
        self._facts: dict[str, str] = {}
        self._calls: list[CallFormats] = []
        self._seen: dict[CallId, int] = {}

    def add_fact(self, line: str, where: tuple[Origin, ...]) -> None:
        key, _, value = line.partition(" ")
        if key not in _KEYS:
            raise _broken(f"{line[:60]!r} is neither a call ({_CALL_FORM}) nor one of: {', '.join(_KEYS)}", where)
        if key in self._facts:
            raise _broken(f"`{key}` is twice in the section of {self._device_type}", where)
        if not value.strip():
            raise _broken(f"`{key}` says nothing", where)
        self._facts[key] = value.strip()

    def add_call(self, line: str, number: int, where: tuple[Origin, ...]) -> None:
        match = _CALL.fullmatch(line)
        if match is None:
            raise _broken(f"{line[:80]!r} is not of the form {_CALL_FORM}", where)
        try:
            identity = CallId.parse(match["id"])
        except RunError:
            raise _broken(f"{match['id'][:60]!r} is no call: PATH OP #NUMBER", where) from None
        inputs, computes, result = (_formats(match[name], where) for name in ("input_formats", "computes", "result"))
        if identity in self._seen:
            raise _broken(f"{identity} is here and on line {self._seen[identity]}", where)
        self._seen[identity] = number
        casts = tuple(match["casts"].split(", ")) if match["casts"] else ()
        times = int(match["times"] or 1)
        self._calls.append(CallFormats(identity, inputs, computes, result, match["rule"], casts, times, line=number))

    def made(self, file: str) -> Snapshot:
        where, facts = (Origin(file, self._line),), self._facts
        missing = [key for key in _KEYS if key not in facts]
        if missing:
            raise _broken(f"the section of {self._device_type} lacks: {', '.join(missing)}", where)
        if facts["calls"] != str(len(self._calls)):
            counts = f"the section of {self._device_type} says calls {facts['calls']} and has {len(self._calls)}"
            raise _broken(f"{counts}: it was cut off, or merged wrongly", where)
        if facts["gradients"] not in ("on", "off"):
            raise _broken(f"gradients are {facts['gradients']!r}, not on or off", where)
        try:
            holds_for(facts["torch"], "2.13")
        except NarrowcastError as error:
            raise _broken(f"{error.asked} is {error.found}", where) from None
        policy, _, digest = facts["policy"].rpartition(" ")
        return Snapshot(
            self._device_type, facts["model"], policy, digest, facts["low"], facts["torch"],
            facts["gradients"] == "on", tuple(self._calls), file=file, line=self._line,
        )  # fmt: skip


def _formats(names: str, where: tuple[Origin, ...]) -> str:
    """Return the names as a ledger has them. Raise SnapshotError for what is no format."""
    if names == "-":
        return ""
    for name in names.split(","):
        if name not in FORMATS:
            raise _broken(f"{name!r} is no format; known are {', '.join(FORMATS)}", where)
    return names
