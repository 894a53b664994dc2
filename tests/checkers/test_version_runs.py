"""What the page on compatibility says of models with two torches: each difference is told, and so is what failed."""

import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import narrowcast as nc
from narrowcast.core.ledger.identity import CallId

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tool():
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        yield importlib.import_module("version_runs")
    finally:
        sys.path.remove(str(ROOT / "tools"))


@pytest.fixture(scope="module")
def run():
    """Two layers, one of them called twice."""
    torch.manual_seed(0)
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    model = nn.Sequential(first, first, second)
    return nc.capture(model, (torch.randn(4, 8),), checksums=True)


def compared(tool, folder, a, b):
    """The row of the data, and the page."""
    files = [one.save(folder / f"{name}.json.gz") for name, one in (("a", a), ("b", b))]
    found = tool.compare_versions({"minilm bf16": files[0]}, {"minilm bf16": files[1]})
    return found["compared"]["minilm bf16"], page(tool, found)


def page(tool, found):
    kept = json.loads(json.dumps({"2.15.0": {"runs": {"torch": "2.15.0+cpu", "python": "3.13.0", **found}}}))
    lines = "\n".join(tool.section(kept)).splitlines()
    assert all(len(line) <= 120 for line in lines if not line.startswith("|"))
    return " ".join("\n".join(lines).split())


def changed(run, number, **facts):
    """The run with one call that is another."""
    calls = [replace(call, **facts) if n == number else call for n, call in enumerate(run.calls)]
    return replace(run, calls=calls, tensors=list(run.tensors), environment=dict(run.environment))


def test_a_run_gives_the_bits_of_itself(tool, run, tmp_path):
    """Both calls of a layer are one pair."""
    case, text = compared(tool, tmp_path, run, run)
    assert (case["pairs"], case["same_bits"], case["verdict"], case["alone"]) == (2, 2, "alike", [])
    assert "| 2.15.0+cpu | MiniLM | bf16 | 2 | 0 | 2 | 0 | 0 | alike |" in text and "No call computes" in text


def test_bits_count_in_every_call(tool, run, tmp_path):
    """Also where no other fact of the calls differs."""
    other = changed(run, 0)
    number = other.calls[1].outputs[0][1]
    assert other.calls[1].id.module_call == 2
    other.tensors[number] = replace(other.tensors[number], checksum="0")
    case, _ = compared(tool, tmp_path, run, other)
    assert (case["pairs"], case["same_bits"]) == (2, 1)


def test_a_difference_is_told_with_its_call(tool, run, tmp_path):
    """In format, in value, and of what has no partner."""
    other = changed(run, 2, computes="bf16")
    number = other.calls[2].outputs[0][1]
    far = {"low": -9.0, "high": 9.0, "rms": 5.0, "sketch": "", "checksum": "0"}
    other.tensors[number] = replace(other.tensors[number], **far)
    other.calls.append(replace(run.calls[2], id=CallId("2", "aten.cholesky.default")))
    other.environment["packages"] = {**run.environment["packages"], "torch": "9.9"}
    case, text = compared(tool, tmp_path, run, other)
    assert (case["formats"], case["values"], case["same_bits"], case["verdict"]) == (1, 1, 1, "values differ")
    assert "first in format `2 aten.linear.default #1`, fp32 / bf16" in text
    assert "first in value `2 aten.linear.default #1`" in text and "1 in all" in text
    assert "`b: 2 aten.cholesky.default #1`" in text and "No call computes" not in text
    assert f"packages.torch {run.environment['packages']['torch']} / 9.9" in text


def test_a_model_that_was_not_captured_is_said(tool, run, tmp_path):
    """With the last words of the run."""
    file = run.save(tmp_path / "a.json.gz")
    found = tool.compare_versions({"minilm fp32": file}, {"minilm fp32": "ImportError: no transformers"})
    text = page(tool, found)
    assert "**not captured**" in text and "ImportError: no transformers" in text and "No call computes" not in text


def test_an_interpreter_that_cannot_says_why(tool, tmp_path):
    """No file is taken for a run."""
    found = tool.capture_with("/bin/false", tmp_path)
    assert set(found.values()) == {"exit status 1"} and len(found) == 4


def test_the_page_says_what_the_data_says(tool):
    """Drift of docs/reference/compatibility.md is an error; `make compat` writes both."""
    rows = json.loads((ROOT / "docs/reference/compatibility.json").read_text(encoding="utf-8"))
    written = "\n".join(tool.section(rows))
    assert "| MiniLM |" in written
    assert written in (ROOT / "docs/reference/compatibility.md").read_text(encoding="utf-8")
