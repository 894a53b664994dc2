"""A few trials of those in `trust/`: right programs about which nothing is said, and plants that are faults."""

import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent / "trust"))

import faults
import idioms
import run
import verbs

SEEDS = (5000, 5001, 5002, 5004, 5005, 5006, 5007, 5008, 5010, 5011)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_is_said_of_composed_idioms(seed: int) -> None:
    """By watch, whose block changes no bit, and by compare: ten programs, in bf16 and fp16 by turns."""
    [program] = idioms.programs(seed, 1)
    dtype = (torch.bfloat16, torch.float16)[seed % 2]
    assert not verbs.TRAINING["watch backward"](program, dtype), program.name
    assert not verbs.FORWARD["compare forward"](program, dtype), program.name


def test_what_is_planted_is_a_fault() -> None:
    """Each program differs from its sound twin, or is not finite, without anybody looking; no cause has four plants."""
    planted = faults.all_faults()
    assert not [fault.name for fault in planted if not fault.is_faulty()]
    causes = [fault.cause for fault in planted]
    assert len(planted) >= 150 and max(map(causes.count, causes)) <= 3


def test_the_table_in_the_documents_is_that_of_the_last_run() -> None:
    """Of `benchmarks/results/trust.json`."""
    root = Path(__file__).parents[2]
    rows = json.loads((root / "benchmarks/results/trust.json").read_text(encoding="utf-8"))["rows"]
    assert run.as_markdown(rows) in (root / "docs/trust.md").read_text(encoding="utf-8")


def test_the_bounds_of_a_rate_are_wilsons() -> None:
    """As tables have them; none is beyond 0 or 1."""
    assert [round(bound, 4) for bound in run.interval(90, 100)] == [0.8256, 0.9448]
    assert run.interval(0, 0) == (0.0, 1.0) and run.interval(600, 600)[1] == 1.0
