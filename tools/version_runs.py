"""Two models with one torch and with another: captured, compared call by call, told in docs/reference/compatibility.md.

`make compat` calls it. The models are targets of the command line:

    narrowcast capture tools/version_runs.py:minilm --under native --under bf16 --backward --checksums -o RUN
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import narrowcast as nc
from narrowcast.core.ledger.identity import CallId
from narrowcast.output.words import number_text
from narrowcast.reports.results.run import ENDING, Run
from narrowcast.reports.results.run_differences import RunDifferences, RunRow
from narrowcast.reports.results.run_records import CallRecord
from narrowcast.reports.results.saved import load

ROOT = Path(__file__).parent.parent
REFERENCE = "2.13.0"
"""The torch that is developed with: that of the interpreter which runs `make compat`."""
REGIONS = {"fp32": (), "bf16": ("--under", "bf16")}
"""By format, the region; without one nothing is cast."""
MODELS = {"minilm": "MiniLM", "effnet_lite0": "EfficientNet-lite0"}
LISTED = 3
INTRODUCTION = """\
MiniLM (four documents) and EfficientNet-lite0 (two photographs) with each torch, compared call by call with torch
{reference} by [`nc.diff`](run.md): fp32 without a region, bf16 in a region of the policy `native`; forward and
backward, one thread. *Pairs*: of calls. *Other formats*: pairs that compute in other ones. *Same bits*: pairs that give
the same bits. *Apart*: by how much pairs differ at most, relatively (L2). *Alone*: calls without a partner. {reference}
against itself is the control: another process, nothing else.
"""
_DIGEST = """\
`policy.digest` is of the rules that hold for that torch: autocast's lists differ by version, as said above.
"""


# -- the models --------------------------------------------------------------------------------------------------------


def minilm() -> nc.Case:
    """The sentence encoder of the examples, on four documents."""
    _same_random_numbers()
    return _source(ROOT / "examples/minilm.py").case(4)


def effnet_lite0() -> nc.Case:
    """The convolutional classifier of the graph conformance, on two photographs."""
    _same_random_numbers()
    model, args, kwargs = _source(ROOT / "tests/conformance/models.py").effnet_lite0()
    return nc.Case(model, (args, kwargs), name="EfficientNet-lite0")


def _same_random_numbers() -> None:
    import torch

    torch.manual_seed(0)


def _source(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# -- captured and compared ---------------------------------------------------------------------------------------------


def capture_with(python: Path | str, folder: Path) -> dict[str, Path | str]:
    """The files of the runs that an interpreter makes, by model and format; or its last words, where it makes none."""
    settings = {"PYTHONPATH": str(ROOT / "src"), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    found: dict[str, Path | str] = {}
    for model in MODELS:
        for name, region in REGIONS.items():
            file = folder / f"{model}-{name}{ENDING}"
            command = [str(python), "-m", "narrowcast", "capture", f"{__file__}:{model}", *region, "--backward"]
            command += ["--checksums", "-o", str(file)]
            done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **settings}, check=False)
            said = (done.stderr or done.stdout).strip().splitlines() or [f"exit status {done.returncode}"]
            found[f"{model} {name}"] = file if done.returncode == 0 else said[-1]
    return found


def compare_versions(reference: Mapping[str, Path | str], other: Mapping[str, Path | str]) -> dict[str, Any]:
    """What `nc.diff` finds between the runs of two interpreters, as data that JSON has."""
    environment: dict[str, list[str]] = {}
    found: dict[str, Any] = {"against": "", "device": "", "environment": environment, "compared": {}}
    for name, files in ((name, (reference[name], file)) for name, file in other.items()):
        failed = next((file for file in files if isinstance(file, str)), "")
        if failed:
            found["compared"][name] = {"failed": failed}
            continue
        a, b = (load(file) for file in files)
        differences = nc.diff(a, b)
        found["against"] = a.environment["packages"]["torch"]
        found["device"] = b.environment["device"].partition(" (")[0]
        environment.update({fact: [one, another] for fact, one, another in differences.environment})
        found["compared"][name] = _as_data(differences, a, b)
    return found


def _as_data(found: RunDifferences, a: Run, b: Run) -> dict[str, Any]:
    module_calls = [_by_module_call(run) for run in (a, b)]
    same = sum(_are_same(_bits(a, module_calls[0], row.a), _bits(b, module_calls[1], row.b)) for row in found.rows)
    known = [row.difference for row in found.rows if row.measured_by]
    return {
        "pairs": len(found.rows), "same_bits": same, "largest": max(known, default=0.0),
        "formats": len(found.formats), "values": len(found.producers), "verdict": found.verdict,
        "gradients": len(found.gradients), "gradients_beyond": sum(row.is_beyond for row in found.gradients),
        "first_format": _row(found.first_format), "first_value": _row(found.first_value),
        "alone": [f"{one.run}: {one.id}" for one in found.unaligned],
    }  # fmt: skip


def _by_module_call(run: Run) -> dict[CallId, list[CallRecord]]:
    """The calls of a run by the identity of their first module call, which represents all of them in a row."""
    found: dict[tuple[object, ...], list[CallRecord]] = {}
    for call in run.calls:
        found.setdefault((call.id.module_path, call.id.op, call.id.number, call.id.direction), []).append(call)
    return {min(calls, key=lambda call: call.id.module_call).id: calls for calls in found.values()}


def _bits(run: Run, module_calls: Mapping[CallId, list[CallRecord]], names: Sequence[CallId]) -> list[str]:
    """The checksums of what the calls give; a tensor without elements has no bits."""
    gave = [run.tensors[number] for name in names for call in module_calls[name] for _, number in call.outputs]
    return [tensor.checksum for tensor in gave if tensor.elements]


def _are_same(a: list[str], b: list[str]) -> bool:
    return a == b and all(a)


def _row(row: RunRow | None) -> dict[str, Any] | None:
    if row is None:
        return None
    return {
        "call": " + ".join(map(str, row.a)), "format_a": row.format_a, "format_b": row.format_b,
        "difference": row.difference, "band": row.round_off_bound, "why": row.why,
        "given": [list(given) for given in row.given],
    }  # fmt: skip


# -- told --------------------------------------------------------------------------------------------------------------


def section(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The part of the page; nothing where nothing was compared. rows: by torch, `runs` of what compat.py keeps."""
    told = {row["runs"]["torch"]: row["runs"] for row in rows.values() if "runs" in row}
    if not told:
        return []
    lines = ["## The same models", "", INTRODUCTION.format(reference=REFERENCE)]
    lines += ["| torch | model | format | pairs | other formats | same bits | apart | alone | verdict |",
              "|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
    details: list[str] = []
    for torch, runs in told.items():
        for name, case in runs["compared"].items():
            model, form = name.split()
            head = f"| {torch} | {MODELS[model]} | {form} |"
            lines.append(f"{head} {' | '.join(_cells(case))} |")
            details += [_item(f"**{torch}, {MODELS[model]}, {form}**: {said}") for said in _details(case)]
    lines += ["", _environments(told), "", _DIGEST, *(details or [_NO_DIFFERENCE, _of_bits(told)]), ""]
    return lines


_NO_DIFFERENCE = "No call computes in another format, none makes a difference beyond round-off, and all have a partner."


def _of_bits(told: Mapping[str, Mapping[str, Any]]) -> str:
    """What the table's figures of bits come to."""
    cases = [case for runs in told.values() for case in runs["compared"].values()]
    others = sum(case["pairs"] - case["same_bits"] for case in cases)
    if not others:
        return "All give the same bits: on this processor, what these models compute does not depend on the version."
    return f"{others} of {sum(case['pairs'] for case in cases)} pairs give other bits, within what rounding explains."


def _cells(case: Mapping[str, Any]) -> list[str]:
    if "failed" in case:
        return ["-"] * 5 + ["**not captured**"]
    apart = number_text(case["largest"]) if case["largest"] else "0"
    counts = [case["pairs"], case["formats"], case["same_bits"], apart, len(case["alone"])]
    return [*map(str, counts), case["verdict"]]


def _details(case: Mapping[str, Any]) -> list[str]:
    """What differs first, and what has no partner."""
    if "failed" in case:
        return [case["failed"]]
    said = []
    if first := case["first_format"]:
        said.append(f"first in format `{first['call']}`, {first['format_a']} / {first['format_b']}")
    if first := case["first_value"]:
        given = "; ".join(f"{name} {a} / {b}" for name, a, b in first["given"])
        said.append(
            f"first in value `{first['call']}`, {number_text(first['difference'])} where round-off may make "
            f"{number_text(first['band'])}: {first['why']}{f' ({given})' if given else ''}; {case['values']} in all"
        )
    if case["gradients_beyond"]:
        said.append(f"{case['gradients_beyond']} of {case['gradients']} gradients beyond round-off")
    if case["alone"]:
        more = len(case["alone"]) - LISTED
        shown = ", ".join(f"`{one}`" for one in case["alone"][:LISTED])
        said.append(f"without a partner (a is {REFERENCE}) {shown}{f' and {more} more' if more > 0 else ''}")
    return said


def _environments(told: Mapping[str, Mapping[str, Any]]) -> str:
    lines = []
    for torch, runs in told.items():
        facts = [f"{name} {_short(a)} / {_short(b)}" for name, (a, b) in runs["environment"].items()]
        where = f"against {runs['against']} on {runs['device']}" if runs["against"] else "not compared"
        lines.append(_item(f"{torch}, {where}: {', '.join(facts) or 'the same environment'}."))
    return "\n".join(["Environments differ in:", "", *lines])


def _item(text: str) -> str:
    """In a list, on as many lines as it needs."""
    return textwrap.fill(f"- {text}", 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _short(value: str) -> str:
    """Digests are long, and a part tells them apart."""
    return value[:8] if len(value) == 64 else value
