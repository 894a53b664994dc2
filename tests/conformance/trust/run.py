"""How often is it right? Sound programs about which nothing may be said, and faults that must be.

    cd tests/conformance/trust
    python run.py --sound --faults --state FILE [--count N] [--minutes M] [--seed S] [--shard i/n]
    python run.py --state FILE --summary [--json ../../../benchmarks/results/trust.json --page ../../../docs/trust.md]

Each trial runs in a process of its own, so that one that crashes or hangs is a result. What FILE has is not run again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import multiprocessing
import random
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import faults
import sound
import torch
import verbs
from program import Made, Program

import narrowcast as nc

OK, FALSE_ALARM, MISSED, HARMED, NOT_JUDGED = "ok", "false alarm", "missed", "harmed", "not judged"
WORDS = (OK, FALSE_ALARM, MISSED, HARMED, NOT_JUDGED)
LIMIT = 60.0
BEGIN, END = "<!-- written by tests/conformance/trust/run.py -->", "<!-- end -->"
Trial = tuple[dict[str, str], Callable[[], tuple[str, str]]]


def sound_trials(seed: int, composed: int) -> Iterator[Trial]:
    programs, missing = sound.corpus(seed, composed)
    for said in missing:
        print(said)
    for program in programs:
        for name, verb in (verbs.FORWARD | (verbs.TRAINING if program.trains else {})).items():
            for format, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):

                def one(program: Any = program, verb: Any = verb, dtype: torch.dtype = dtype) -> tuple[str, str]:
                    said = verb(program, dtype)
                    return (FALSE_ALARM, said) if said else (OK, "")

                yield {"kind": "sound", "verb": name, "name": program.name, "family": program.family,
                       "format": format}, one  # fmt: skip


def fault_trials() -> Iterator[Trial]:
    for fault in faults.all_faults():

        def one(fault: Any = fault) -> tuple[str, str]:
            if not fault.is_faulty():
                raise verbs.NotSound("no fault")
            said = fault.judged()
            return (MISSED, said) if said else (OK, "")

        yield {"kind": "fault", "verb": fault.verb, "name": fault.name, "family": fault.cause, "format": ""}, one


def judged(one: Callable[[], tuple[str, str]], end: Any) -> None:
    """In its own process."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    try:
        result = one()
    except verbs.NotSound as error:
        result = NOT_JUDGED, str(error)
    except verbs.Harmed as error:
        result = HARMED, str(error)
    except BaseException:
        result = HARMED, traceback.format_exc()[-1500:]
    end.send(result)


def guarded(one: Callable[[], tuple[str, str]]) -> tuple[str, str]:
    """What a process of its own says, if it says anything."""
    context = multiprocessing.get_context("fork")
    end, other = context.Pipe(duplex=False)
    process = context.Process(target=judged, args=(one, other))
    process.start()
    other.close()
    try:
        return end.recv() if end.poll(LIMIT) else (HARMED, f"no answer in {LIMIT:.0f} s")
    except EOFError:
        process.join(LIMIT)
        return HARMED, f"the process ended with {process.exitcode}"
    finally:
        process.kill()
        process.join(LIMIT)


def warm() -> None:
    """What each process would else import and probe again."""
    program = Program("warm", "", lambda: Made(torch.nn.Linear(4, 4), (torch.randn(2, 4),)))
    for name in nc.__all__:
        getattr(nc, name)
    for verb in verbs.FORWARD.values():
        with contextlib.suppress(verbs.NotSound):
            verb(program, torch.bfloat16)


def interval(right: int, of: int) -> tuple[float, float]:
    """Wilson's, at 95 %."""
    if not of:
        return 0.0, 1.0
    z, p = 1.96, right / of
    middle, half = p + z * z / (2 * of), z * math.sqrt(p * (1 - p) / of + z * z / (4 * of * of))
    return max(0.0, (middle - half) / (1 + z * z / of)), min(1.0, (middle + half) / (1 + z * z / of))


def summary(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each kind of program and verb, and one for all verbs."""
    rows = []
    for kind in ("sound", "fault"):
        of_kind = [r for r in results if r["kind"] == kind]
        for verb in [*sorted({r["verb"] for r in of_kind}), ""]:
            counts = Counter(r["result"] for r in of_kind if verb in (r["verb"], ""))
            of = sum(counts.values()) - counts[NOT_JUDGED]
            if of:
                low, high = interval(counts[OK], of)
                rows.append({"kind": kind, "verb": verb or "all", "trials": of, **{w: counts[w] for w in WORDS},
                             "right": counts[OK] / of, "low": low, "high": high})  # fmt: skip
    return rows


def as_markdown(rows: list[dict[str, Any]]) -> str:
    """The tables of docs/trust.md."""
    text = []
    for kind, word, title in (("sound", FALSE_ALARM, "Sound programs"), ("fault", MISSED, "Planted faults")):
        text += ["", f"| {title}: verb | trials | right | {word} | harmed | right, 95 % |", "|---|---|---|---|---|---|"]
        for row in rows:
            if row["kind"] == kind:
                text.append(f"| {row['verb']} | {row['trials']} | {row['right']:.1%} | {row[word]} | {row[HARMED]} "
                            f"| {row['low']:.1%} to {row['high']:.1%} |")  # fmt: skip
    return "\n".join(text[1:]) + "\n"


def key(row: dict[str, Any]) -> tuple[str, ...]:
    return tuple(row[name] for name in ("kind", "verb", "name", "format"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sound", action="store_true")
    parser.add_argument("--faults", action="store_true")
    parser.add_argument("--count", type=int, default=1 << 30, help="trials at most")
    parser.add_argument("--composed", type=int, default=30, help="programs composed of idioms")
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 100_000)
    parser.add_argument("--shard", default="0/1")
    parser.add_argument("--state", type=Path, required=True, help="a line of JSON for each trial")
    parser.add_argument("--only", default="", help="a part of a trial's verb and name")
    parser.add_argument("--summary", action="store_true")
    parser.add_argument("--json", type=Path, help="write the summary there")
    parser.add_argument("--page", type=Path, help="put its table into this page")
    asked = parser.parse_args()
    kept = [json.loads(line) for line in asked.state.read_text().splitlines()] if asked.state.exists() else []
    torch.set_num_threads(1)
    warm()
    shard, shards = map(int, asked.shard.split("/"))
    trials = [*sound_trials(asked.seed, asked.composed)] * asked.sound + [*fault_trials()] * asked.faults
    random.Random(asked.seed).shuffle(trials)
    trials = [t for t in trials[shard::shards] if asked.only in f"{t[0]['verb']} {t[0]['name']}"]
    print(f"seed {asked.seed}: {len(trials)} trials in this shard")
    done, end, bad = {key(row) for row in kept}, time.monotonic() + asked.minutes * 60, 0
    with asked.state.open("a") as file:
        for row, one in [t for t in trials if key(t[0]) not in done][: asked.count]:
            if time.monotonic() > end:
                break
            begin = time.monotonic()
            result, detail = guarded(one)
            found = {**row, "result": result, "seconds": round(time.monotonic() - begin, 2), "detail": detail[:3000]}
            kept.append(found)
            file.write(json.dumps(found) + "\n")
            file.flush()
            if result not in (OK, NOT_JUDGED):
                bad += 1
                print(f"{result}: {' | '.join(key(row))}\n    " + detail[:600].replace("\n", "\n    "), flush=True)
    if asked.summary:
        rows = summary(kept)
        print(as_markdown(rows))
        if asked.json:
            machine = {"torch": torch.__version__, "threads": 1}
            asked.json.write_text(json.dumps({"environment": machine, "rows": rows}, indent=1) + "\n")
        if asked.page:
            before, _, rest = asked.page.read_text().partition(BEGIN)
            asked.page.write_text(f"{before}{BEGIN}\n\n{as_markdown(rows)}\n{END}{rest.partition(END)[2]}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
