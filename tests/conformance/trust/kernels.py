"""Sound kernels by the thousand, with a fresh seed: none may be named.

python tests/conformance/trust/kernels.py [--seed 7] [--often 4]
"""

import argparse
import sys
import time
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "numerics"))
from kernels_to_judge import cases, looked_at


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=time.time_ns() % 100_000)
    parser.add_argument("--often", type=int, default=4)
    asked = parser.parse_args()
    largest: dict[str, float] = defaultdict(float)
    not_judged: set[str] = set()
    named, judged = [], 0
    for name, function in cases(asked.seed, asked.often):
        for op, found in looked_at(function):
            if found is None:
                not_judged.add(op)
                continue
            judged, largest[op] = judged + 1, max(largest[op], found.share)
            named += [f"{op} in {name}: {found}"] * found.is_beyond
    for op, share in sorted(largest.items(), key=lambda pair: -pair[1]):
        print(f"{share:8.3f} of its bound  {op}")
    print(f"never judged: {', '.join(sorted(not_judged - largest.keys()))}")
    print(*named, sep="\n")
    print(f"seed {asked.seed}: {judged} kernels judged, {len(named)} named")
    return 1 if named else 0


if __name__ == "__main__":
    sys.exit(main())
