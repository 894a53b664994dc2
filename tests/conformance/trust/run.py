"""How often is it right? Sound programs about which nothing may be said, and faults that must be named.

    cd tests/conformance/trust
    python run.py --state FILE [--kinds sound,fault,peer] [--minutes M] [--seed S] [--shard 1/2] [--only WORD]
    python run.py --state FILE --summary [--page]

Each trial runs in a process of its own, so that one that crashes or hangs is a result. What FILE has of this seed is
not run again; shards may share it. The trials are shuffled: those before the minutes are over are a sample.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import random
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fields
import idioms
import language
import loops
import loops_of_scales
import peers
import pictures
import published
import report
import sequences
import torch
import verbs
import wrong_arguments
import wrong_kernels
import wrong_loops
import wrong_models
import wrong_precision
import wrong_values
from kernels_to_judge import cases, inspected
from planting import Fault
from program import DTYPES, FALSE_ALARM, HARMED, NOT_JUDGED, PROGRAMS, RIGHT, Made, Program, Said

import narrowcast as nc

TABLES = (language, sequences, pictures, fields, published)
SOUND_PAIRS = wrong_models.pairs_of_runs.SOUND
LIMIT = 120.0


@dataclass(frozen=True, slots=True)
class Trial:
    """One question, and what asks and judges it."""

    kind: str
    verb: str
    name: str
    family: str
    format: str
    ask: Callable[[], Said]

    @property
    def row(self) -> dict[str, Any]:
        return {key: getattr(self, key) for key in ("kind", "verb", "name", "family", "format")}


LOOPS = [*loops.LOOPS, *loops_of_scales.LOOPS_OF_SCALES]


def corpus(seed: int, composed: int) -> list[Program]:
    """All programs of the tables, and this many composed again."""
    return [*PROGRAMS.values(), *idioms.programs(seed, composed)]


def verbs_of(subject: Program | loops.Loop) -> dict[str, verbs.Verb]:
    if isinstance(subject, loops.Loop):
        return verbs.OF_LOOPS
    made = Made(torch.nn.Identity(), ()) if subject.family == "composed idioms" else verbs.made_anew(subject)
    found = verbs.FORWARD | (verbs.TRAINING if subject.trains else {})
    found |= verbs.WITH_TWIN if made.twin is not None else {}
    found |= verbs.WITH_CACHE if made.decode is not None else {}
    return found | (verbs.COMPILED if subject.name in verbs.TO_COMPILE else {})


def sound_trials(seed: int, composed: int) -> Iterator[Trial]:
    for subject in (*corpus(seed, composed), *LOOPS):
        for name, verb in verbs_of(subject).items():
            low = DTYPES if name not in verbs.WITH_TWIN | verbs.WITH_CACHE else DTYPES | {"fp32": None}
            for format, dtype in low.items():

                def ask(subject: Any = subject, verb: Any = verb, dtype: Any = dtype) -> Said:
                    return alarm(verb(subject, dtype))

                yield Trial("sound", name, subject.name, subject.family, format, ask)
    others: dict[tuple[str, str], Callable[[], str]] = {
        ("diff, pairs", name): lambda pair=pair: verbs.alike(*pair()) for name, pair in SOUND_PAIRS.items()
    }
    others |= {("compare, kernels", f"kernels {n}"): lambda n=n: sound_kernels(n) for n in range(seed, seed + 3)}
    for (verb, name), of in others.items():
        yield Trial("sound", verb, name, verb, "", lambda of=of: alarm(of()))


def alarm(said: str) -> Said:
    return Said(FALSE_ALARM, said) if said else Said(RIGHT)


def sound_kernels(seed: int) -> str:
    """Those that are beyond their bounds, of some thousand in low formats with values of many sizes."""
    looked = ((name, *found) for name, call in cases(seed) for found in inspected(call))
    return "\n".join(f"{op} in {name}: {found}" for name, op, found in looked if found is not None and found.is_beyond)


def all_faults(seed: int) -> list[Fault]:
    tables = (wrong_values, wrong_precision, wrong_kernels, wrong_arguments, wrong_loops)
    return [*(fault for table in tables for fault in table.faults()), *wrong_models.faults(seed)]


def fault_trials(seed: int) -> Iterator[Trial]:
    for fault in all_faults(seed):

        def ask(fault: Fault = fault) -> Said:
            return fault.judged() if fault.is_faulty() else Said(NOT_JUDGED, "no fault")

        yield Trial("fault", fault.verb, fault.name, fault.cause, "", ask)


def peer_trials() -> Iterator[Trial]:
    yield from (Trial("peer", peer, name, family, "", ask) for peer, name, family, ask in peers.trials())


# -- in processes of their own ----------------------------------------------------------------------------------------


def answered(ask: Callable[[], Said], end: Any) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    try:
        said = ask()
    except verbs.NotSound as error:
        said = Said(NOT_JUDGED, str(error))
    except verbs.Harmed as error:
        said = Said(HARMED, str(error))
    except BaseException:
        said = Said(HARMED, traceback.format_exc()[-1500:])
    end.send(tuple(said))


def guarded(ask: Callable[[], Said]) -> Said:
    """What a process of its own says, if it says anything."""
    context = multiprocessing.get_context("fork")
    end, other = context.Pipe(duplex=False)
    process = context.Process(target=answered, args=(ask, other))
    process.start()
    other.close()
    try:
        return Said(*end.recv()) if end.poll(LIMIT) else Said(HARMED, f"no answer in {LIMIT:.0f} s")
    except EOFError:
        process.join(LIMIT)
        return Said(HARMED, f"the process ended with {process.exitcode}")
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
    for stem in published.HERE:
        published.of_transformers(stem)
    peers.by_debug_mode(peers.Program(torch.nn.Linear(4, 4), torch.randn(2, 4), torch.bfloat16))


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("seed", "kind", "verb", "name", "format"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default="sound,fault,peer", help="of trials")
    parser.add_argument("--composed", type=int, default=30, help="programs composed of idioms")
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 100_000, help="of programs and their weights")
    parser.add_argument("--shard", default="1/1")
    parser.add_argument("--state", type=Path, required=True, help="a line of JSON for each trial")
    parser.add_argument("--only", default="", help="a part of `verb name format`")
    parser.add_argument("--summary", action="store_true", help="of the file's rows; nothing is run")
    parser.add_argument("--page", action="store_true", help="the summary into docs/trust.md")
    asked = parser.parse_args()
    asked.state.touch()
    kept = [json.loads(line) for line in asked.state.read_text(encoding="utf-8").splitlines()]
    if asked.summary:
        print(json.dumps(report.counted(kept), indent=1))
        if asked.page:
            subjects = (*corpus(0, asked.composed), *LOOPS)
            report.save(kept, len(subjects), len({subject.family for subject in subjects}))
        return 1 if any(row["kind"] != "peer" and row["result"] not in (RIGHT, NOT_JUDGED) for row in kept) else 0
    print("\n".join(published.MISSING), end="\n" * bool(published.MISSING))
    torch.set_num_threads(1)
    warm()
    verbs.SEED[0] = asked.seed
    of_kind = {"sound": lambda: sound_trials(asked.seed, asked.composed), "fault": lambda: fault_trials(asked.seed),
               "peer": peer_trials}  # fmt: skip
    trials = [trial for kind in asked.kinds.split(",") for trial in of_kind[kind]()]
    trials = [t for t in trials if asked.only in f"{t.verb} {t.name} {t.format}"]
    random.Random(asked.seed).shuffle(trials)
    number, shards = map(int, asked.shard.split("/"))
    trials = trials[number - 1 :: shards]
    print(f"seed {asked.seed}: {len(trials)} trials in this shard")
    done, end, bad = {key(row) for row in kept}, time.monotonic() + asked.minutes * 60, 0
    with asked.state.open("a", encoding="utf-8") as file:
        for trial in trials:
            row = {"seed": asked.seed, **trial.row}
            if time.monotonic() > end:
                break
            if key(row) in done:
                continue
            begin = time.monotonic()
            said = guarded(trial.ask)
            row |= {"result": said.word, "seconds": round(time.monotonic() - begin, 2), "detail": said.why[:3000]}
            file.write(json.dumps(row) + "\n")
            file.flush()
            if said.word not in (RIGHT, NOT_JUDGED) and trial.kind != "peer":
                bad += 1
                print(f"{said.word}: {' | '.join(key(trial.row | {'seed': ''})[1:])}\n    "
                      + said.why[:600].replace("\n", "\n    "), flush=True)  # fmt: skip
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
