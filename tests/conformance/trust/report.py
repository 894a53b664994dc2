"""Counts of trials as the tables of docs/trust.md, and the file that they are kept in."""

from __future__ import annotations

import datetime
import json
import math
import textwrap
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from program import ADVICE, FALSE_ALARM, HARMED, MISSED, NOT_JUDGED, PLACE, RIGHT

ROOT = Path(__file__).parents[3]
RESULTS, PAGE = ROOT / "benchmarks/results/trust.json", ROOT / "docs/trust.md"
BEGIN, END = "<!-- written by tests/conformance/trust/run.py -->", "<!-- end -->"
WORDS = (RIGHT, FALSE_ALARM, MISSED, PLACE, ADVICE, HARMED, NOT_JUDGED)
PEERS = ("Narrowcast", "DebugMode", "detect_anomaly", "hooks")
Counts = dict[str, dict[str, dict[str, int]]]  # by kind, verb and word


def interval(right: int, of: int) -> tuple[float, float]:
    """Wilson's, at 95 %."""
    if not of:
        return 0.0, 1.0
    z, p = 1.96, right / of
    middle, half = p + z * z / (2 * of), z * math.sqrt(p * (1 - p) / of + z * z / (4 * of * of))
    return max(0.0, (middle - half) / (1 + z * z / of)), min(1.0, (middle + half) / (1 + z * z / of))


def stem(verb: str) -> str:
    """Of a fault's verb: without what it was asked of."""
    return verb.split(",")[0].split()[0]


def counted(rows: Iterable[dict[str, Any]]) -> Counts:
    found: dict[str, dict[str, Counter[str]]] = {}
    for row in rows:
        verb = stem(row["verb"]) if row["kind"] == "fault" else row["verb"]
        of_kind = found.setdefault(row["kind"], {})
        of_kind.setdefault(verb, Counter())[row["result"]] += 1
        if row["kind"] == "peer":
            of_kind.setdefault(f"{verb}: {row['family']}", Counter())[row["result"]] += 1
    return {kind: {verb: dict(of_kind[verb]) for verb in sorted(of_kind)} for kind, of_kind in found.items()}


def added(rows: Iterable[dict[str, int]]) -> dict[str, int]:
    return dict(sum((Counter(row) for row in rows), Counter()))


def judged(row: dict[str, int]) -> int:
    return sum(row.values()) - row.get(NOT_JUDGED, 0)


def share(row: dict[str, int]) -> str:
    """How many are right, and where the rate lies."""
    of, right = judged(row), row.get(RIGHT, 0)
    if not of:
        return "-"
    low, high = interval(right, of)
    return f"{right / of:.1%} ({low:.1%} to {high:.1%})"


def table(kept: dict[str, Any], kind: str, title: str, words: tuple[str, ...]) -> list[str]:
    """A row for each verb: at first contact, how many were right of how many in each corpus; and now, in words."""
    parts = {name: kept.get(name, {}).get(kind, {}) for name in ("first", "second", "now")}
    verbs = list(dict.fromkeys(verb for name in ("now", "first", "second") for verb in parts[name]))
    lines = [f"| {title} | first: corpus 1 | corpus 2 | now | {' | '.join(words)} | right, 95 % |",
             "|" + "---|" * (5 + len(words))]  # fmt: skip
    for verb in [*verbs, "all"]:
        rows = [added(part.values()) if verb == "all" else part.get(verb, {}) for part in parts.values()]
        first = [f"{row.get(RIGHT, 0)} of {judged(row)}" if row else "-" for row in rows[:2]]
        cells = [verb, *first, str(judged(rows[2])), *(str(rows[2].get(word, 0)) for word in words), share(rows[2])]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def peers(kept: dict[str, Any]) -> list[str]:
    """What each peer named, by kind of fault, whatever it advises."""
    found = kept.get("now", {}).get("peer", {})
    families = list(dict.fromkeys(verb.partition(": ")[2] for verb in found if ": " in verb))
    lines = [f"| faults named | {' | '.join(PEERS)} |", "|" + "---|" * (1 + len(PEERS))]
    for family in [*families, ""]:
        rows = [found.get(f"{peer}: {family}" if family else peer, {}) for peer in PEERS]
        cells = [f"{row.get(RIGHT, 0) + row.get(ADVICE, 0)} of {sum(row.values())}" for row in rows]
        lines.append(f"| {' | '.join([family or 'all', *cells])} |")
    return lines


def tables(kept: dict[str, Any]) -> str:
    """Of what is kept."""
    parts = (
        table(kept, "sound", "Sound programs", (FALSE_ALARM, HARMED)),
        table(kept, "fault", "Planted faults", (PLACE, ADVICE, MISSED, HARMED)), peers(kept),
    )  # fmt: skip
    said = [f"False alarms and harm now: {kept['now'].get('alarms', 'none')}.", f"Now: {kept['now']['of']}."]
    return "\n\n".join(["\n".join(part) for part in parts] + [textwrap.fill(text, 118) for text in said]) + "\n"


def alarms_of(rows: list[dict[str, Any]]) -> str:
    """By verb and family, with how many."""
    bad = [row for row in rows if row["kind"] == "sound" and row["result"] in (FALSE_ALARM, HARMED)]
    found = Counter(f"{row['verb']} of {row['family']}" for row in bad)
    return "; ".join(f"{what}: {number}" for what, number in sorted(found.items())) or "none"


def save(rows: list[dict[str, Any]], programs: int, families: int) -> None:
    """The figures of now into the file of results, and all tables into the page."""
    kept = json.loads(RESULTS.read_text(encoding="utf-8"))
    causes = len({row["family"] for row in rows if row["kind"] == "fault"})
    seeds = ", ".join(map(str, sorted({row["seed"] for row in rows})))
    of = f"{programs} programs of {families} families, {causes} causes, seed {seeds}, torch {torch.__version__}"
    kept["now"] = {"of": f"{of}, {datetime.date.today()}", "alarms": alarms_of(rows), **counted(rows)}
    RESULTS.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{tables(kept)}\n{END}{rest.partition(END)[2]}", encoding="utf-8")
