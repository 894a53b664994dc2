"""Run a suite of long parts, and go on where the last run ended.

    python tools/long_suite.py conformance               the parts that have not passed at this commit
    python tools/long_suite.py conformance --only ops    some of them
    python tools/long_suite.py conformance --again       all, whatever is kept
    python tools/long_suite.py conformance --summary     what is kept; nothing runs

Parts are lines of tools/long_suites.toml. What each came to is kept in build/long/SUITE/PART.json as soon as it has
ended: the commit, the exit code, seconds, the end of what it printed, and the machine's facts. A part that was stopped
runs again. Exits with 1 if a part has failed, or has not run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
SUITES = tomllib.loads((ROOT / "tools/long_suites.toml").read_text(encoding="utf-8"))
LAST = 4000
"""How many characters of a part's output are kept."""


def commit() -> str:
    """The commit that is checked out; with a mark where files differ from it."""
    said = [subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
            for words in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))]  # fmt: skip
    return said[0] + ("+" if said[1] else "")


class Suite:
    """One suite, with what is kept of its parts."""

    def __init__(self, name: str, folder: Path) -> None:
        self.parts: dict[str, str] = SUITES[name]
        self.folder = folder / name
        self.commit = commit()

    def kept(self, part: str) -> dict[str, Any] | None:
        """What a part came to at this commit; None if it has not ended, or ran at another."""
        file = self.folder / f"{part}.json"
        row = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        return row if row.get("commit") == self.commit else None

    def run(self, part: str) -> None:
        """Run a part to its end, and keep what it came to; print the end of its output if it failed."""
        sys.stdout.write(f"== {part}\n")
        sys.stdout.flush()
        began, log = time.monotonic(), self.folder / f"{part}.log"
        self.folder.mkdir(parents=True, exist_ok=True)
        env = {**os.environ, "BIN": str(Path(sys.executable).parent)}
        with log.open("wb") as output:
            command = ["bash", "-euo", "pipefail", "-c", self.parts[part].strip()]
            code = subprocess.run(command, cwd=ROOT, env=env, stdout=output, stderr=subprocess.STDOUT, check=False)
        text = log.read_text(encoding="utf-8", errors="replace")
        row = {"part": part, "commit": self.commit, "code": code.returncode, "machine": machine(),
               "seconds": round(time.monotonic() - began), "output": text[-LAST:]}  # fmt: skip
        (self.folder / f"{part}.json").write_text(json.dumps(row, indent=1), encoding="utf-8")
        if code.returncode:
            sys.stdout.write(row["output"])

    def summary(self) -> str:
        """A row for each part, and the hours of all."""
        rows = {part: self.kept(part) for part in self.parts}
        lines = [f"{part:20} {_state(row)}" for part, row in rows.items()]
        hours = sum(row["seconds"] for row in rows.values() if row) / 3600
        return "\n".join([*lines, f"{hours:.2f} hours at {self.commit[:12]}", ""])


def machine() -> dict[str, Any]:
    """The facts that results of benchmarks have, too."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from machine import facts

    return facts()


def _state(row: dict[str, Any] | None) -> str:
    if row is None:
        return "not run"
    return f"{'passed' if not row['code'] else 'failed'} in {row['seconds']} s"


def main() -> int:
    """Run, and say what it came to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("--only", nargs="+", default=[], metavar="PART")
    parser.add_argument("--again", action="store_true", help="run what has passed at this commit, too")
    parser.add_argument("--summary", action="store_true", help="run nothing")
    parser.add_argument("--keep", type=Path, default=ROOT / "build/long", help="where results are kept")
    given = parser.parse_args()
    suite = Suite(given.suite, given.keep)
    unknown = set(given.only) - suite.parts.keys()
    if unknown:
        parser.error(f"no part of {given.suite}: {', '.join(sorted(unknown))}; there are {', '.join(suite.parts)}")
    wanted = given.only or list(suite.parts)
    for part in wanted if not given.summary else ():
        row = suite.kept(part)
        if given.again or row is None or row["code"]:
            suite.run(part)
    sys.stdout.write(suite.summary())
    return 0 if given.summary else int(any((row := suite.kept(part)) is None or row["code"] for part in wanted))


if __name__ == "__main__":
    raise SystemExit(main())
