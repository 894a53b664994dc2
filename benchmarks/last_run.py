"""The results of this run beside those of the last one that was kept (in git) for the same machine, so that a slip is
seen.

    python benchmarks/last_run.py [--since COMMIT] [--more-than 0.05]

Ratios and counts are compared, not times: the machines are shared. A figure that is not there on both sides, or is of
another machine, is left out, with its number.
"""

import argparse
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
SAME = ("cpu", "limits", "units", "cores", "torch_threads", "accelerator", "torch")
WORDS = ("ratio", "over", "instructions", "casts", "calls", "nodes", "spread", "gap")


def figures(data: object, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], float]]:
    """Every number with the keys that lead to it."""
    rows = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in rows:
        here = (*path, str(key))
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            yield here, float(value)
        else:
            yield from figures(value, here)


def comparable(path: tuple[str, ...]) -> bool:
    """Whether a figure means the same whatever else the machine does: medians of ratios, and counts."""
    names = " ".join(path).lower()
    return any(word in names for word in WORDS) and "quartile" not in names and "machine" not in path


def before(file: Path, commit: str) -> dict:
    """The kept result."""
    done = subprocess.run(
        ["git", "show", f"{commit}:./{file.name}"], cwd=file.parent, capture_output=True, text=True, check=False
    )
    return json.loads(done.stdout) if done.returncode == 0 else {}


def main() -> None:
    """Print the figures that differ, the largest changes first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--since", default="HEAD")
    parser.add_argument("--more-than", type=float, default=0.05)
    options = parser.parse_args()
    changed, alike, left_out, others = [], 0, 0, []
    for file in sorted(RESULTS.glob("*.json")):
        now, then = json.loads(file.read_text(encoding="utf-8")), before(file, options.since)
        if any(now.get("machine", {}).get(key) != then.get("machine", {}).get(key) for key in SAME):
            others.append(file.stem)
            continue
        old = dict(figures(then))
        for path, value in figures(now):
            if not comparable(path):
                continue
            if path not in old or not old[path]:
                left_out += 1
            elif abs(value / old[path] - 1) > options.more_than:
                changed.append((value / old[path], file.stem, path, old[path], value))
            else:
                alike += 1
    changed.sort(key=lambda row: -abs(row[0] - 1))
    print(f"{'figure':72}{'last':>9}{'now':>9}{'now/last':>10}")
    for change, stem, path, then, now in changed:
        print(f"{f'{stem}: ' + ', '.join(path):72.72}{then:9.4g}{now:9.4g}{change:10.3f}")
    print(f"{len(changed)} figures differ by more than {options.more_than:.0%}, {alike} do not, {left_out} are new")
    if others:
        print(f"of another machine, or kept nowhere: {', '.join(others)}")


if __name__ == "__main__":
    main()
