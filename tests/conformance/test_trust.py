"""A few trials of those in `trust/`: right programs of which nothing is said, plants that are faults, the judge."""

import json
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent / "trust"))

import idioms
import planting
import program
import report
import run
import verbs
import wrong_values

SEEDS = (5002, 5004, 5005, 5006, 5008, 5011)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_is_said_of_composed_idioms(seed: int) -> None:
    """By watch, whose block changes no bit, and by compare: six programs, in bf16 and fp16 by turns."""
    [drawn] = idioms.programs(seed, 1)
    dtype = (torch.bfloat16, torch.float16)[seed % 2]
    assert not verbs.TRAINING["watch backward"](drawn, dtype), drawn.name
    assert not verbs.FORWARD["compare forward"](drawn, dtype), drawn.name


def test_a_program_that_is_moved_is_harmed() -> None:
    """Whoever draws a random number, or leaves a hook, has harmed it."""
    [drawn] = idioms.programs(SEEDS[0], 1)
    for does, named in ((lambda model: torch.rand(()), "random numbers"),
                        (lambda model: model.register_forward_hook(lambda *_: None), "hooks")):  # fmt: skip
        verb = verbs.at_rest(lambda made, dtype, trains, does=does: str(does(made.model))[:0], verbs.forward)
        with pytest.raises(verbs.Harmed, match=named):
            verb(drawn, torch.bfloat16)


def test_silence_about_a_fault_is_a_miss() -> None:
    """A fault that is named elsewhere is no hit, either."""
    plant = wrong_values.VALUES["logarithm of zero"][1]
    [(file, line)] = planting.lines_of(plant)
    words = [planting.placed(named, {(file, line)}, "").word for named in ([], [(file, line + 1)], [(file, line)])]
    assert words == [program.MISSED, program.PLACE, program.RIGHT]
    said = wrong_values.watched(planting.Layers, lambda y: y, "log", False, torch.float16)
    assert said.word == program.MISSED


def test_what_is_planted_is_a_fault() -> None:
    """Each program differs from its sound twin, or is not finite, without anybody looking; no cause has four plants."""
    planted = run.all_faults(seed=0)
    quick = [fault for fault in planted if fault.verb != "diff, models"]
    assert not [fault.name for fault in quick if not fault.is_faulty()]
    assert len(planted) >= 400 and max(Counter(fault.cause for fault in planted).values()) <= 3


def test_the_tables_in_the_documents_are_those_of_the_last_run() -> None:
    """Of `benchmarks/results/trust.json`."""
    kept = json.loads(report.RESULTS.read_text(encoding="utf-8"))
    assert report.tables(kept) in report.PAGE.read_text(encoding="utf-8")


def test_the_bounds_of_a_rate_are_wilsons() -> None:
    """As tables have them; none is beyond 0 or 1."""
    assert [round(bound, 4) for bound in report.interval(90, 100)] == [0.8256, 0.9448]
    assert report.interval(0, 0) == (0.0, 1.0) and report.interval(600, 600)[1] == 1.0
