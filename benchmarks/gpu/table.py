"""The section of docs/internals/benchmarks.md about GPUs, from the result files. Needs no torch.

python benchmarks/gpu/table.py [--print] [--results FOLDER] [--into FILE]
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from pathlib import Path
from typing import Any

import results

PAGE = results.ROOT / "docs/internals/benchmarks.md"
BEGIN, END = "<!-- gpu:begin -->", "<!-- gpu:end -->"
NOTHING = "No results from a GPU yet; `make gpu` on a machine that has one writes them here."
Result = dict[str, Any]
SIDES = ("eager fp32", "eager tf32", "eager native", "compiled fp32", "compiled tf32", "compiled native",
         "compiled to(bf16)", "ours eager", "ours compiled", "ours fast")  # fmt: skip
RATIOS = ("fast over best other", "compiled native over fast")


def main(arguments: list[str] | None = None) -> int:
    """Write the section between its markers; 1 if the page has none."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--print", action="store_true", help="print the section, write nothing")
    parser.add_argument("--results", type=Path, default=results.RESULTS)
    parser.add_argument("--into", type=Path, default=PAGE)
    options = parser.parse_args(arguments)
    text = wrapped(section(options.results))
    if options.print:
        print(text)
        return 0
    page = options.into.read_text(encoding="utf-8")
    if BEGIN not in page or END not in page:
        print(f"{options.into} has no markers {BEGIN} and {END}")
        return 1
    head, _, rest = page.partition(BEGIN)
    made = f"{head}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}"
    options.into.write_text(made, encoding="utf-8")
    print(f"written to {options.into}")
    return 0


def wrapped(text: str) -> str:
    """The text with lines of at most 120 characters; rows of tables stay."""
    lines = []
    for line in text.splitlines():
        further = "  " if line.startswith("- ") else ""
        is_row = line.startswith("|") or not line
        lines += [line] if is_row else textwrap.wrap(line, 120, subsequent_indent=further, break_on_hyphens=False)
    return "\n".join(lines)


def section(folder: Path) -> str:
    """What is known of each machine; the results of small test runs are none."""
    parts = []
    for machine in sorted(folder.iterdir()) if folder.is_dir() else ():
        found = [r for f in sorted(machine.glob("*.json")) if (r := results.read(f)) is not None]
        found = [r for r in found if r.get("outcome") in (results.PASSED, results.FAILED) or r.get("checks")]
        if found and machine.is_dir() and not machine.name.endswith("-small"):
            parts.append("\n\n".join(filter(None, (part(found) for part in (_facts, _checks, _times, _memory, _more)))))
    return "\n\n".join(parts) or NOTHING


def _facts(found: list[Result]) -> str:
    m = found[0]["machine"]
    dates = sorted(r["date"][:10] for r in found)
    commits = sorted({f"{r['machine'].get('commit')}{'*' if r['machine'].get('is_changed') else ''}" for r in found})
    flags = ", ".join(f"{k} {v}" for k, v in (m.get("flags") or {}).items())
    gpu = f"{m.get('gpu') or m['cpu']}"
    if m.get("gpu"):
        gpu += f" ({m['gpu_memory_gib']} GiB, compute capability {m['capability']}, {m['gpus']} of them)"
    rows = (
        gpu, f"driver {m.get('driver_version')}, CUDA {m.get('cuda')}, cuDNN {m.get('cudnn')}",
        f"Triton {m.get('triton')}",
        f"torch {m['torch']}, Python {m['python']}", f"{m['cores']} cores of {m['cpu']}",
        f"narrowcast {', '.join(commits)}, {dates[0]} to {dates[-1]}",
        flags,
    )  # fmt: skip
    return f"### {m.get('gpu') or m['cpu']}\n\n" + ". ".join(rows) + "."


def _checks(found: list[Result]) -> str:
    lines = ["| part | outcome | checks | failed | skipped | seconds |", "|---|---|---|---|---|---|"]
    for r in found:
        counts = [[c["outcome"] for c in r.get("checks", [])].count(kind) for kind in ("failed", "skipped")]
        lines.append(f"| {r['part']} | {r['outcome']} | {len(r.get('checks', []))} | {counts[0]} | {counts[1]} "
                     f"| {r.get('seconds', 0):.0f} |")  # fmt: skip
    sweeps = [r["data"] for r in found if r["part"].startswith("ops-") and r.get("data")]
    text = "**Conformance**\n\n" + "\n".join(lines)
    if sweeps:
        total = {k: sum(s.get(k, 0) for s in sweeps) for k in ("ops", "samples", "with gradients", "differences")}
        text += (f"\n\nOpInfo: {total['ops']} ops, {total['samples']} samples, {total['with gradients']} of them with "
                 f"gradients, native against ours and against native's rules by our kernels: "
                 f"{total['differences']} differences.")  # fmt: skip
    failed = [(r["part"], c) for r in found for c in r.get("checks", []) if c["outcome"] == "failed"]
    if failed:
        text += "\n\nFailed:\n\n" + "\n".join(f"- {p}, {c['name']}: {_cell(c['detail'])[:90]}" for p, c in failed[:40])
    return text


def _rows(found: list[Result]) -> list[Result]:
    return [r["data"] for r in found if r["part"].startswith("placement-") and r.get("data", {}).get("sides")]


def _times(found: list[Result]) -> str:
    rows = _rows(found)
    if not rows:
        return ""
    lines = [f"| model, mode | {' | '.join(SIDES)} | {' | '.join(RATIOS)} | best other |",
             "|" + "---|" * (len(SIDES) + len(RATIOS) + 2)]  # fmt: skip
    for row in rows:
        cells = [_number(row["sides"].get(side, {}).get("ms")) for side in SIDES]
        cells += [_number(row["ratios"].get(name), 4) for name in RATIOS]
        lines.append(f"| {row['model']}, {row['mode']} | {' | '.join(cells)} | {row['ratios'].get('best other', '')} |")
    text = "**Placement**: milliseconds of a call, or of a training step without the optimizer, between events on the "
    text += "device; medians of alternating rounds.\n\n" + "\n".join(lines)
    graphs = [r for r in rows if "CUDA graphs: ours over native" in r["ratios"]]
    for row in graphs:
        a, b = (row["sides"][name]["ms"] for name in ("ours compiled, CUDA graphs", "compiled native, CUDA graphs"))
        text += f'\n\n{row["model"]} with mode="reduce-overhead": ours {_number(a)} ms, native {_number(b)} ms.'
    return text


def _memory(found: list[Result]) -> str:
    rows = _rows(found)
    if not any(side.get("peak_mib") for row in rows for side in row["sides"].values()):
        return ""
    lines = [f"| model, mode | weights | {' | '.join(SIDES)} |", "|" + "---|" * (len(SIDES) + 2)]
    for row in rows:
        cells = [
            f"{s['held_mib']:.0f} + {s['peak_mib']:.0f}" if (s := row["sides"].get(side)) else "" for side in SIDES
        ]
        lines.append(f"| {row['model']}, {row['mode']} | {row['weights_mib']:.0f} | {' | '.join(cells)} |")
    text = (
        "**Memory**, MiB: what a side keeps from call to call besides the model's weights, and what one call takes at "
    )
    text += "most besides. Sides share copies of weights: who makes them first has them in its figure.\n\n"
    return text + "\n".join(lines)


def _more(found: list[Result]) -> str:
    parts = {r["part"]: r.get("data") or {} for r in found}
    text = []
    over = parts.get("overhead", {})
    for name, title in (("regions", "entering and leaving a region"), ("ops", "one op in a region"),
                        ("compiled_calls", "a compiled call of a tiny model")):  # fmt: skip
        if over.get(name):
            text.append(f"Microseconds of {title}: " + ", ".join(f"{k} {v}" for k, v in over[name].items()) + ".")
    if over.get("forwards"):
        ratios = ", ".join(f"{k} {v['over torch.autocast']}" for k, v in over["forwards"].items())
        text.append(f"An eager forward over that under torch.autocast: {ratios}.")
    if parts.get("profile", {}).get("low over fp32"):
        lines = ["| family | bf16 | bf16, with backward | fp16 | fp16, with backward |", "|---|---|---|---|---|"]
        for family, row in parts["profile"]["low over fp32"].items():
            cells = [_number(row.get(k)) for k in ("bf16", "bf16, with backward", "fp16", "fp16, with backward")]
            lines.append(f"| {family} | {' | '.join(cells)} |")
        text.append("Time of low formats over fp32, median over the calls of the profile:\n\n" + "\n".join(lines))
    return "**Costs**\n\n" + "\n\n".join(text) if text else ""


def _number(value: float | None, digits: int = 3) -> str:
    return "" if value is None else f"{value:.{digits}g}"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


if __name__ == "__main__":
    sys.exit(main())
