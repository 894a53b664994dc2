"""Run the tests as they are hardest on one another: in random order, two runs at a time, and file by file alone.

python tools/shuffled_tests.py [SEED]      prints the seed: the same one gives the same order
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]


def run(*arguments: str, seed: int | None = None) -> subprocess.Popen[bytes]:
    """Start pytest in the repository."""
    settings = {"NARROWCAST_SHUFFLE": str(seed)} if seed is not None else {}
    return subprocess.Popen([*PYTEST, *arguments], cwd=ROOT, env={**os.environ, **settings})


def main() -> int:
    """How many runs failed."""
    seed = int(sys.argv[1]) if len(sys.argv) > 1 else random.randrange(10_000)
    sys.stdout.write(f"order {seed} and {seed + 1}, side by side\n")
    sys.stdout.flush()
    failed = sum(process.wait() != 0 for process in [run(seed=seed), run(seed=seed + 1)])
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        failed += run(str(file.relative_to(ROOT)), "--no-header").wait() != 0
    sys.stdout.write(f"{failed} runs failed; order {seed}\n")
    return failed


if __name__ == "__main__":
    sys.exit(main())
