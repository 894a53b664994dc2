"""Many random programs through the front ends, in parts, each in a process of its own; goes on where it ended.

    python tests/conformance/script_sweep.py --count 10000 --shard 1/4 --state build/script_sweep
    python tests/conformance/script_sweep.py --state build/script_sweep --summary
    python tests/conformance/script_sweep.py --state build/script_sweep --reduce 17 script

Programs are known by their numbers: shard 1/4 has every fourth. All run in nc.script, as saved files, in nc.script of
these and of torch.jit.script (where torch has code for them), and in nc.trace; every tenth (--slow) is compiled and
exported, too. The state folder gets a file of JSON lines (one for each program and front end), and the sources of the
programs that differ. A crash, or a program that runs for minutes, is a line like others. The summary counts by front
end and cause. Exits with 1 if anything differs that script_runs.KNOWN does not name. Rows of another generator, told
by a digest of its first programs, do not count: a changed generator starts again.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import hashlib
import json
import logging
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import script_programs
from script_runs import FRONT_ENDS, Runs, judged
from sources import load

FAST, SLOW = FRONT_ENDS[:5], FRONT_ENDS[5:]
BATCH, SECONDS = 40, 600
DIGEST = hashlib.sha256("".join(map(script_programs.numbered, range(100))).encode()).hexdigest()[:12]


def front_ends(number: int, slow: int, chosen: list[str]) -> list[str]:
    """Where a program runs."""
    found = (*FAST, *SLOW) if number // 16 % slow == 0 else FAST  # whatever the shards are
    return [name for name in found if name in chosen]


def rows(state: Path) -> list[dict]:
    """The lines of all shards, of this generator."""
    found = []
    for file in sorted(state.glob("*.jsonl")):
        for line in file.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(json.JSONDecodeError):  # of a process that was ended as it wrote
                row = json.loads(line)
                found += [row] if row["generator"] == DIGEST else []
    return found


def to_do(numbers: Iterable[int], options: argparse.Namespace) -> list[tuple[int, str]]:
    """The programs and front ends of which there is no line yet, in order."""
    done = {(row["number"], row["front_end"]) for row in rows(options.state)}
    asked = [(n, front_end) for n in numbers for front_end in front_ends(n, options.slow, options.front_ends)]
    return [one for one in asked if one not in done]


def cause(wrong: list) -> str:
    """What differs, without what is different in each program: numbers, names, files."""
    what, part = max(wrong, key=lambda one: float("inf") if one[1] is None else one[1])
    text = re.sub(r"^flag=\w+ n=\d+ (\w+) call (\d)", r"\1", what)
    text += "" if part is None else " in sums of the low format" if part > 1e-5 else " in sums in fp32"
    place = r'File "[^"]*", line \d+.*|/\S+\.py:\d+(:\d+)?|0x[0-9a-f]+'
    text = re.sub(r"(?<!signal )\b\d+(\.\d+)?(e-?\d+)?", "#", re.sub(place, "", text))
    return " ".join(text.partition("Tensor: ")[0].split())[:260]


# -- the process that runs a batch


def run_batch(numbers: list[int], options: argparse.Namespace, file: Path) -> None:
    """A line for each program and front end, as soon as it is known."""
    from narrowcast.frontends.eager.registered import install_visiting
    from narrowcast.observation.observer.mode import _native_ops

    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    install_visiting(_native_ops("cpu").values(), "cpu")  # one weight cache for all ops, whatever ran before
    left = to_do(numbers, options)
    with file.open("a", encoding="utf-8") as stream:
        for number in numbers:
            runs = None
            for front_end in [f for n, f in left if n == number]:
                text = script_programs.numbered(number)
                runs = runs or Runs(load(text), text)
                wrong = runs.wrong(front_end)
                row = {"generator": DIGEST, "number": number, "front_end": front_end, "eager_raises": runs.raises,
                       "no_form": runs.no_form.get(front_end, ""), "wrong": wrong[:60]}  # fmt: skip
                print(json.dumps(row), file=stream, flush=True)


# -- the process that starts them


def sweep(options: argparse.Namespace) -> None:
    """All batches of a shard."""
    part, parts = map(int, options.shard.split("/"))
    file = options.state / f"shard_{part}_of_{parts}.jsonl"
    numbers = sorted(
        {n for n, _ in to_do(range(options.first + part - 1, options.first + options.count, parts), options)}
    )
    while numbers:
        batch = numbers[:BATCH]
        command = [sys.executable, __file__, "--state", str(options.state), "--slow", str(options.slow),
                   "--numbers", ",".join(map(str, batch)), "--into", str(file),
                   "--front-ends", *options.front_ends]  # fmt: skip
        ended = ""
        with Path(os.devnull).open("w") as nothing, (options.state / f"stderr_{part}").open("w") as stderr:
            try:
                code = subprocess.run(command, stdout=nothing, stderr=stderr, timeout=SECONDS, check=False).returncode
                ended = f"the process ended by signal {-code}" if code else ""
            except subprocess.TimeoutExpired:
                ended = f"no end after {SECONDS} s for a batch"
        if not ended:
            numbers = numbers[BATCH:]
            continue
        left = to_do(batch, options)
        if not left:  # it ended badly after its last line
            numbers = numbers[BATCH:]
            continue
        number, front_end = left[0]
        last = (options.state / f"stderr_{part}").read_text(encoding="utf-8").strip().splitlines()[-1:]
        with file.open("a", encoding="utf-8") as stream:
            row = {"generator": DIGEST, "number": number, "front_end": front_end, "eager_raises": False,
                   "no_form": "", "wrong": [[" ".join([ended, *last]), None]]}  # fmt: skip
            print(json.dumps(row), file=stream)
        numbers = numbers[numbers.index(number) :]


def summary(state: Path) -> int:
    """Printed by front end and cause, and the sources of what differs kept; how many differ."""
    found = list({(row["number"], row["front_end"]): row for row in rows(state)}.values())
    folder = state / "failures"
    folder.mkdir(exist_ok=True)
    total = 0
    for front_end in FRONT_ENDS:
        here = [row for row in found if row["front_end"] == front_end]
        names: collections.Counter[str] = collections.Counter()
        causes = collections.defaultdict(list)
        for row in here:
            if not row["wrong"]:
                continue
            text = script_programs.numbered(row["number"])
            wrong, known = judged(row["wrong"], front_end, text)
            names.update(known)
            if wrong:
                causes[cause(wrong)].append(row["number"])
                told = "\n".join(f"# {what} {part or ''}" for what, part in wrong[:4])
                (folder / f"{row['number']}_{front_end}.py").write_text(f"{told}\n{text}", encoding="utf-8")
        if here:
            differ = sum(map(len, causes.values()))
            total += differ
            print(f"{front_end}: {len(here)} programs, {sum(bool(row['no_form']) for row in here)} have no such form, "
                  f"{sum(row['eager_raises'] for row in here)} raise in eager code, {differ} differ")  # fmt: skip
        for name, count in names.most_common():
            print(f"    known, {count}: {name}")
        for text, numbers in sorted(causes.items(), key=lambda item: -len(item[1])):
            print(f"    DIFFERS, {len(numbers)}: {text} ({', '.join(map(str, numbers[:6]))})")
    return total


# -- small programs


def end_of_block(lines: list[str], start: int) -> int:
    """Behind a line and all that is deeper below it."""
    depth = len(lines[start]) - len(lines[start].lstrip())
    end = start + 1
    while end < len(lines) and (not lines[end].strip() or len(lines[end]) - len(lines[end].lstrip()) > depth):
        end += 1
    return end


def reduced(text: str, front_end: str) -> str:
    """The smallest program that is found by leaving out lines, and regions around lines, that differs alike."""

    def differs(lines: list[str]) -> str:
        text = "\n".join(lines) + "\n"
        try:
            module = load(text)
            wrong, _ = judged(Runs(module, text).wrong(front_end), front_end, text)
        except Exception:
            return ""
        return cause(wrong) if wrong else ""

    lines = [line for line in text.splitlines() if line.strip()]
    wanted = differs(lines)
    before: list[str] = []
    while wanted and lines != before:
        before = lines
        start = len(lines) - 1
        while start >= 0:
            end = end_of_block(lines, start)
            block = [line[4:] for line in lines[start + 1 : end]]
            for inside in ([], block) if block else ([],):
                fewer = [*lines[:start], *inside, *lines[end:]]
                if differs(fewer) == wanted:
                    lines = fewer
                    break
            start = min(start, len(lines)) - 1
    return "\n".join(lines) + "\n"


def main() -> int:
    """The sweep, its summary, or a small program; 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="the number of the first program")
    parser.add_argument("--shard", default="1/1", help="K/N: every N-th program from the K-th on")
    parser.add_argument("--state", type=Path, default=Path("build/script_sweep"))
    parser.add_argument("--slow", type=int, default=10, help="compile and export one program in this many")
    parser.add_argument("--front-ends", nargs="*", default=list(FRONT_ENDS), choices=FRONT_ENDS)
    parser.add_argument("--summary", action="store_true")
    parser.add_argument("--reduce", nargs=2, metavar=("NUMBER", "FRONT_END"))
    parser.add_argument("--numbers", help=argparse.SUPPRESS)
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.state.mkdir(parents=True, exist_ok=True)
    if options.numbers:
        run_batch([int(number) for number in options.numbers.split(",")], options, options.into)
        return 0
    if options.reduce:
        from narrowcast.frontends.eager.registered import install_visiting
        from narrowcast.observation.observer.mode import _native_ops

        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        install_visiting(_native_ops("cpu").values(), "cpu")
        text = reduced(script_programs.numbered(int(options.reduce[0])), options.reduce[1])
        print(text)
        print(*Runs(load(text), text).wrong(options.reduce[1])[:3], sep="\n")
        return 0
    if not options.summary:
        sweep(options)
    return int(summary(options.state) > 0)


if __name__ == "__main__":
    sys.exit(main())
