"""What is done at every region, call and compiled call: functions that run are counted, since clocks on busy machines
lie. The figures are in docs/internals/benchmarks.md.
"""

import sys

import pytest
import torch

import narrowcast as nc

LOW = torch.bfloat16
POLICY = nc.Policy.native().with_rules(nc.Rule("aten.gelu", "full", reason="a rule"))
X = torch.ones(2, 4)


def functions_called(run):
    """How many functions, Python's and C's, run in one call; the first calls, which prepare, apart."""
    for _ in range(5):
        run()
    count = 0

    def see(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(see)
    try:
        run()
    finally:
        sys.setprofile(before)
    return count - 2  # `run` itself, and the end of counting


def written(make):
    def run():
        with make():
            pass

    return run


def reused(make):
    region = make()

    def run():
        with region:
            pass

    return run


@pytest.mark.parametrize("form", [written, reused])
def test_a_region_is_entered_with_few_calls(form):
    """Native: about as many as torch's own. With a policy, three absent device types more are written and read."""
    theirs = functions_called(form(lambda: torch.autocast("cpu", LOW)))
    native = functions_called(form(lambda: nc.autocast("cpu", LOW)))
    policy = functions_called(form(lambda: nc.autocast("cpu", LOW, policy=POLICY)))
    assert theirs > 8
    assert native <= 1.5 * theirs
    assert policy <= native + 24


def test_arguments_are_checked_once(monkeypatch):
    """Of regions with the same ones; others, and another state of torch's, are looked at again."""
    from narrowcast.frontends.eager import opening

    made = []
    original = opening._make_opening
    monkeypatch.setattr(opening, "_make_opening", lambda *args: made.append(args) or original(*args))
    policy = nc.Policy.native().with_rules(nc.Rule("aten.erf", "full", reason="of this test"))
    for _ in range(3):
        nc.autocast("cpu", LOW, policy=policy)
    assert len(made) == 1
    nc.autocast("cpu", torch.float16, policy=policy)
    nc.autocast("cpu", policy=policy, enabled=False)
    assert len(made) == 3
    before = torch.get_autocast_dtype("cpu")
    torch.set_autocast_dtype("cpu", torch.float16)
    try:
        assert nc.autocast("cpu", policy=policy, enabled=False).fast_dtype is torch.float16
    finally:
        torch.set_autocast_dtype("cpu", before)
    torch.set_autocast_cache_enabled(False)
    try:
        assert not nc.autocast("cpu", LOW, policy=policy).prepared.facts.cache
    finally:
        torch.set_autocast_cache_enabled(True)
    assert nc.autocast("cpu", LOW, policy=policy).prepared.facts.cache


def test_an_op_that_a_policy_changes_runs_with_few_calls():
    """Over the same casts by hand."""
    low = torch.ones(2, 8, dtype=LOW)
    gelu = torch.nn.functional.gelu
    with torch.no_grad():
        with torch.autocast("cpu", LOW):
            by_hand = functions_called(lambda: gelu(low.float()))
        with nc.autocast("cpu", LOW, policy=POLICY):
            ours = functions_called(lambda: gelu(low))
    assert ours <= by_hand + 45


def test_a_compiled_call_adds_few_calls(fresh_dynamo):
    """Over torch.compile's inside torch.autocast; the check of each weight at rest apart."""

    class Scaled(torch.nn.Module):
        def forward(self, x):
            return x * 2

    def backend(graph, inputs):
        return lambda x: (x * 2,)  # calling a graph's module would be most of it

    theirs, ours = torch.compile(Scaled(), backend=backend), nc.compile(Scaled(), under=LOW, backend=backend)

    def in_region():
        with torch.autocast("cpu", LOW):
            return theirs(X)

    with torch.no_grad():
        nc.unpin(nc.pin(Scaled(), "fp32"))  # calls of modules are looked at, as after other tests
        assert functions_called(lambda: ours(X)) <= functions_called(in_region) + 40


def test_odd_arguments_are_taken_and_not_kept():
    """A truth value that is no bool, a list: as torch takes them, or an error; nothing is remembered of them."""
    policy = nc.Policy.native().with_rules(nc.Rule("aten.erf", "full", reason="of this other test"))
    before = len(policy.memory)
    with nc.autocast("cpu", LOW, enabled=torch.tensor(True), policy=policy):
        assert torch.mm(X, X.t()).dtype is LOW
    kept = [key for key in policy.memory if isinstance(key, tuple) and key and key[0] == "cpu"]
    assert not kept and len(policy.memory) > before
    with pytest.raises(Exception, match=r"device|str"):
        nc.autocast(["cpu"])
