"""The comparison of `make mutate` with the list of explained mutants; each check is shown what it must reject."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def mutate():
    spec = importlib.util.spec_from_file_location("mutate", ROOT / "tools/mutate.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutate"] = module  # dataclasses look themselves up
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        del sys.modules["mutate"]


@pytest.fixture
def a_mutant(mutate):
    return mutate.Mutant("placement/energy.py", "Energy.evaluate", "if a < b:", "if a <= b:")


def run_of(mutate, survivor, killed=19):
    others = [mutate.Mutant("decide.py", "decide", f"line {n}", "pass") for n in range(killed)]
    return [mutate.Outcome(survivor, False), *(mutate.Outcome(each, True) for each in others)]


def test_more_than_one_in_twenty_survivors_is_rejected(mutate, a_mutant):
    """One of twenty may survive without an explanation; one of nineteen may not."""
    assert mutate.problems(run_of(mutate, a_mutant), []) == []
    (problem,) = mutate.problems(run_of(mutate, a_mutant, killed=18), [])
    assert "1 of 19" in problem
    assert mutate.problems(run_of(mutate, a_mutant, killed=0), [a_mutant]) == []


def test_an_explanation_of_a_mutant_that_is_killed_is_rejected(mutate, a_mutant):
    """A test notices it now: it is no equivalent, and the reason in the list was wrong."""
    (problem,) = mutate.problems([mutate.Outcome(a_mutant, True)], [a_mutant])
    assert "is killed" in problem and "Energy.evaluate" in problem


def test_an_explanation_of_a_mutant_that_is_gone_is_rejected(mutate, a_mutant):
    """The line has changed since. A run of a part cannot tell."""
    other = mutate.Outcome(mutate.Mutant("decide.py", "decide", "a", "b"), True)
    (problem,) = mutate.problems([other], [a_mutant])
    assert "is gone" in problem
    assert mutate.problems([other], [a_mutant], is_whole=False) == []


def test_the_table_counts_each_file(mutate, a_mutant):
    """Mutants, killed, survived, and explained among those."""
    lines = mutate.table(run_of(mutate, a_mutant), [a_mutant]).splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["decide.py", "19", "19", "0", "0"],
        ["placement/energy.py", "1", "0", "1", "1"],
        ["all", "20", "19", "1", "1"],
    ]


def test_a_decorated_function_is_written_so_that_mutmut_sees_it(mutate):
    """The same class, with its property made by a call."""
    source = "class A:\n    @property\n    def b(self):\n        return 1\n\n    c = 2\n"
    names = {}
    exec(mutate.undecorated(source), names)
    assert names["A"]().b == 1 and names["A"].c == 2
    assert names["A"].b_undecorated(None) == 1


def test_every_explained_mutant_has_a_reason_and_a_place(mutate):
    """The list names files and functions that are there, and lines that are in them."""
    for each, reason in mutate.read_explained(mutate.EXPLAINED.read_text(encoding="utf-8")).items():
        text = (ROOT / mutate.PACKAGE / each.file).read_text(encoding="utf-8")
        assert f"def {each.function.rpartition('.')[2]}(" in text, each
        assert len(reason) > 20, each
        assert each.was != each.now, each
