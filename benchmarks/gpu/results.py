"""Result files: one per part, in a folder per machine; replaced at once, good for the source that they came from."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from pathlib import Path
from typing import Any

from part import Part

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RESULTS = ROOT / "benchmarks/results/gpu"
SCHEMA = "narrowcast.gpu/1"
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
RUNNING, UNFINISHED, KILLED, CRASHED = "running", "unfinished", "killed", "crashed"
FINISHED = (PASSED, FAILED)
"""Outcomes that are not tried again. What was skipped is: what it lacked may be there now, and it takes a second."""


def machine_folder(results: Path, facts: dict[str, Any], small: bool) -> Path:
    """Where the results of this machine are: named after its device."""
    name = str(facts.get("gpu") or facts.get("device_type") or "cpu")
    words = "-".join(filter(None, "".join(c if c.isalnum() else " " for c in name.lower()).split()))
    return results / (words + ("-small" if small else ""))


def key_of(part: Part, facts: dict[str, Any], small: bool) -> dict[str, Any]:
    """What a result holds for: torch, the device, the sources of Narrowcast and of the part itself.

    Sources by their content, so that a commit that changes neither (this very result, say) leaves results good, and a
    change that is not committed does not.
    """
    return {
        "torch": facts["torch"], "device": facts.get("gpu") or facts["device_type"], "small": small,
        "source": source_digest(), "part": part_digest(part),
    }  # fmt: skip


def source_digest() -> str:
    """Of every file of the package."""
    found = hashlib.sha256()
    for file in sorted((ROOT / "src/narrowcast").rglob("*")):
        if file.suffix in (".py", ".toml", ".txt"):
            found.update(str(file.relative_to(ROOT)).encode() + file.read_bytes())
    return found.hexdigest()[:16]


def part_digest(part: Part) -> str:
    """Of the part's own file, and of its arguments."""
    file = HERE / (part.target.partition(":")[0].replace(".", "/") + ".py")
    text = file.read_bytes() if file.exists() else b""
    return hashlib.sha256(text + json.dumps(dict(part.arguments), sort_keys=True).encode()).hexdigest()[:16]


def commit() -> dict[str, Any]:
    """The commit that this is, and whether files differ from it; nothing is known where there is no git."""
    try:
        head = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=30
        )
        state = subprocess.run(
            ["git", "status", "--porcelain", "--", "src", "benchmarks/gpu"], cwd=ROOT, capture_output=True, text=True,
            check=True, timeout=60,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return {"commit": None, "is_changed": None}
    return {"commit": head.stdout.strip()[:12], "is_changed": bool(state.stdout.strip())}


def read(path: Path) -> dict[str, Any] | None:
    """A result file; None if there is none that can be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and found.get("schema") == SCHEMA else None


def write(path: Path, result: dict[str, Any]) -> None:
    """Replace a result file at once: whatever reads it sees the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    made = path.with_name(f".{path.name}.{os.getpid()}")
    made.write_text(json.dumps(result, indent=1, default=str) + "\n", encoding="utf-8")
    made.replace(path)
