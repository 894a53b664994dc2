"""What the first call under goal="fast" compiles, times and remembers: counted, not clocked."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import narrowcast as nc
from narrowcast.core.goals import as_goal
from narrowcast.frontends.graphs.compiled import watch_graphs
from narrowcast.frontends.race import candidates, placing
from narrowcast.programs.placement.peak import Peak

sys.path.insert(0, str(Path(__file__).parent.parent / "conformance"))

import models

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
FAST = as_goal("fast")
FEW, MANY = 10, placing.LARGE + 1


def made(name, ms, sure=1.0, calls=FEW, peak=None):
    """A candidate, as far as the prediction goes."""
    placement = SimpleNamespace(raised=0, calls=range(calls))
    return SimpleNamespace(
        name=name, predicted_ns=ms * 1e6, sure=sure, is_compiled="op by op" not in name, placement=placement,
        peak=peak and Peak(peak),
    )  # fmt: skip


def left(*found, fused=True, goal=FAST):
    return [c.name for c in placing.worth_timing(found, goal, fused)]


def test_what_the_prediction_rules_out_is_neither_compiled_nor_timed():
    """By a quarter, where all was measured; by much more, where it was not."""
    assert left(made("placed", 10), made("policy", 12), made("high", 13)) == ["placed", "policy"]
    unsure = [made("placed", 10, 0.5), made("policy", 12, 0.5), made("high", 24, 0.5), made("far", 26, 0.5)]
    assert left(*unsure) == ["placed", "policy", "high"]


def test_uniform_formats_stand_for_placed_ones_that_gain_next_to_nothing():
    """In compiled code, where each candidate takes as long again; elsewhere all are tried."""
    found = [made("placed", 10), made("policy", 10.3), made("high", 12)]
    assert left(*found) == ["policy", "high"]
    assert left(*found, fused=False) == ["placed", "policy", "high"]


def test_of_a_large_graph_one_candidate_is_compiled():
    """The best one; and what runs as it is takes no compiling."""
    found = [made("placed", 10, calls=MANY), made("policy", 11, calls=MANY), made("high", 12, calls=MANY)]
    assert left(*found) == ["placed"]
    assert left(*found, made("placed, op by op", 11, calls=MANY)) == ["placed", "placed, op by op"]
    assert left(made("high", 10.2, calls=MANY), *found) == ["high"]


def test_one_that_runs_as_it_is_stays():
    """What is compiled may turn out not to run."""
    found = [made("placed", 10), made("placed, op by op", 15), made("high, op by op", 16)]
    assert left(*found) == ["placed", "placed, op by op"]
    assert left(made("placed", 10), made("placed, op by op", 26)) == ["placed"]


def test_without_verification_the_placed_one_is_taken():
    """Whatever is predicted: nothing is timed."""
    found = [made("placed", 10), made("policy", 9)]
    assert left(*found, goal=nc.Goal.fast(verify=False)) == ["placed"]


def test_for_memory_the_lowest_peak_in_the_time_allowed_is_taken():
    """The fastest of several with the same peak; one that takes longer needs the user's word."""
    found = [made("placed", 10, peak=7), made("policy", 12, peak=5), made("high", 11, peak=5), made("far", 21, peak=1)]
    assert left(*found, goal=nc.Goal.memory()) == ["high"]
    assert left(*found, goal=nc.Goal.memory(slowdown_limit=3)) == ["far"]
    assert left(*found, goal=nc.Goal.memory(slowdown_limit=1)) == ["placed"]


def counting(counts):
    """A backend that counts what it compiles."""

    def backend(graph, inputs):
        counts.append(graph)
        return graph

    return backend


def run(counts, policy="native"):
    """The graphs of a U-Net, compiled in a process that has forgotten everything but what is on disk."""
    torch._dynamo.reset()
    model, args, kwargs = models.unet()
    with torch.no_grad(), watch_graphs() as graphs:
        nc.compile(model.eval(), under=policy, backend=counting(counts), goal="fast")(*args, **kwargs)
    return graphs


def test_a_remembered_choice_is_found_though_the_profile_has_grown(monkeypatch):
    """Its formats are kept with it: nothing else is planned, compiled or timed, and the formats are the same."""
    counts, others = [], []
    (first,) = run(counts)
    assert len(counts) >= 1 and not first.from_disk and first.placement.calls
    monkeypatch.setattr(candidates.TimePrices, "call", lambda self, step, operands, format: float(format.bits))
    monkeypatch.setattr(placing, "make_candidates", lambda *args: pytest.fail("it was chosen already"))
    (again,) = run(others)
    assert again.from_disk and again.chosen == first.chosen and len(others) == 1
    assert [c.chosen for c in again.placement.calls] == [c.chosen for c in first.placement.calls]
    assert len(again.candidates) == 1


def test_another_policy_is_another_question():
    """The choice of one policy is not taken for that of another."""
    run([])
    (other,) = run([], nc.Policy.native().with_rules(nc.Rule("aten.linear", "full", reason="a rule")))
    assert not other.from_disk


def test_formats_that_do_not_fit_are_not_taken(monkeypatch):
    """A choice on disk that names other choices than the graph has is made again."""
    (first,) = run([])
    load = placing.load_choice
    monkeypatch.setattr(placing, "load_choice", lambda key: placing.replace(load(key), formats=("bf16", "fp32")))
    (again,) = run([])
    monkeypatch.undo()
    assert run([])[0].from_disk
    assert not again.from_disk and len(again.candidates) == len(first.candidates) > 1


def test_a_race_ends_with_the_time_it_is_given(monkeypatch):
    """A few rounds in any case; no more where compiling took a moment."""
    from narrowcast.frontends.race import choosing

    monkeypatch.setattr(choosing, "time_call", lambda run, args, trains: 1e7)
    both = {name: name for name in ("placed", "policy")}
    assert choosing.time_sides(both, (), frozenset(), 0.0).rounds == choosing.LEAST_ROUNDS
    race = choosing.Choosing(both, frozenset(), lambda choice: None, seconds=0.01)
    assert race.seconds == choosing.LEAST_SECONDS


def test_a_large_graph_is_given_to_the_compiler_once(monkeypatch):
    """Though it has several candidates."""
    model, x = nn.Sequential(*(nn.Linear(8, 8) for _ in range(MANY))), torch.randn(2, 8)
    worth, counts = placing.worth_timing, []
    monkeypatch.setattr(placing, "worth_timing", lambda found, goal, fused: worth(found, goal, True))
    with torch.no_grad(), watch_graphs() as graphs:
        nc.compile(model, under="bf16", backend=counting(counts), goal="fast")(x)
    assert len(graphs[0].candidates) > 1 and len(counts) == 1


def test_where_those_that_are_left_are_wrong_another_is_taken(monkeypatch):
    """A fault in one placement is no reason to fall back."""
    right = placing._is_right
    wrong = []

    def is_right(candidate, values):
        if not wrong:
            wrong.append(candidate.name)
            return False
        return right(candidate, values)

    monkeypatch.setattr(placing, "_is_right", is_right)
    worth = placing.worth_timing
    monkeypatch.setattr(placing, "worth_timing", lambda found, goal, fused: worth(found, goal, fused)[:1])
    (graph,) = run([])
    assert not graph.fallback and graph.chosen and graph.chosen != wrong[0]
