"""Saved results, read back: which kind of file it is, and the result that it holds. Nothing in a file is executed."""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path
from typing import TypeVar

from narrowcast.errors import NarrowcastError, Origin, RunError, reason_of
from narrowcast.output.collector import collector_paused
from narrowcast.reports.results.codec import BROKEN
from narrowcast.reports.results.differences import Differences
from narrowcast.reports.results.explanation import Explanation
from narrowcast.reports.results.findings import Watching
from narrowcast.reports.results.headroom import Headroom
from narrowcast.reports.results.invariance import Invariance
from narrowcast.reports.results.ledger import Ledger
from narrowcast.reports.results.parity import Parity
from narrowcast.reports.results.profile import Profile
from narrowcast.reports.results.repair import Repair
from narrowcast.reports.results.result import Result
from narrowcast.reports.results.run import Run
from narrowcast.reports.results.run_differences import RunDifferences
from narrowcast.reports.results.scaler_history import History
from narrowcast.reports.results.storage import StorageCheck
from narrowcast.reports.results.training import TrainingCheck

R = TypeVar("R", bound=Result)
KINDS: dict[str, type[Result]] = {
    kind.SCHEMA: kind
    for kind in (
        Differences, Explanation, Headroom, History, Invariance, Ledger, Parity, Profile, Repair, Run, RunDifferences,
        StorageCheck, TrainingCheck, Watching,
    )
}  # fmt: skip


def load(path: str | Path, kind: type[R] = Result) -> R:  # type: ignore[assignment]
    """Return the result that `save`, or a command, wrote into a file.

    kind: what it has to be: `nc.load("run.json.gz", nc.Run)`. RunError for a file that is missing, cut off, of another
    kind, or of another version.
    """
    if not isinstance(path, str | Path):
        raise RunError(
            f"load({type(path).__name__})", "it is no path", advice="Give the file that save, or a command, wrote."
        )
    try:
        raw = Path(path).read_bytes()
        text = (gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw).decode()
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise _unreadable(str(path), reason_of(error)) from None
    result = parse(text, str(path))
    if not isinstance(result, kind):
        raise _unreadable(str(path), f"it holds {result.WHAT}", f"Give a file that holds {kind.WHAT}.")
    return result


def parse(text: str, file: str = "<string>") -> Result:
    """Return the result in JSON text. Raise RunError for other text, or another version of the schema."""
    with collector_paused():
        return _parsed(text, file)


def _parsed(text: str, file: str) -> Result:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _unreadable(file, reason_of(error)) from None
    schema = data.get("schema") if isinstance(data, dict) else type(data).__name__
    kind = KINDS.get(schema) if isinstance(schema, str) else None
    if kind is None and not str(schema).startswith("narrowcast."):
        raise _unreadable(file, "it holds no result of Narrowcast")
    if kind is None:
        found = f"its schema is {schema!r}, which this version does not know"
        raise _unreadable(file, found, "Write it again with this version of Narrowcast.")
    try:
        return kind.of_data(data)
    except (*BROKEN, NarrowcastError, RecursionError) as error:
        lacks = isinstance(error, KeyError)
        found = f"a record lacks {error}" if lacks else f"a record is broken: {type(error).__name__}: {error}"
        raise _unreadable(file, found, "Write it again.") from None


def _unreadable(file: str, found: str, advice: str = "Give a file that save, or a command, wrote.") -> RunError:
    return RunError(f"a saved result, {file}", found, (Origin(file),), advice)
