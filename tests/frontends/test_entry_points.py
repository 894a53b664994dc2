"""What belongs to a goal is a value, and a region is given in one way to every front end."""

import inspect
import warnings

import pytest
import torch
from torch import nn

import narrowcast as nc
from narrowcast.cli.app import main

BF16 = torch.bfloat16
X = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4)).eval()


POLICY = nc.Policy.native().with_rules(nc.Rule("aten.gelu", "full"), nc.Rule("aten.linear", "full", module="2"))
FRONT_ENDS = {
    "compile": lambda model, **region: nc.compile(model, backend="aot_eager", **region)(X),
    "export": lambda model, **region: nc.export(model, (X,), **region).module()(X),
    "script": lambda model, **region: nc.script(model, **region)(X),
    "trace": lambda model, **region: nc.trace(model, X, **region)(X),
    "convert": lambda model, **region: nc.script(torch.jit.trace(model, X), **region)(X),
}


@pytest.fixture(autouse=True)
def quiet():
    """torch says of each script that it is deprecated."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


@pytest.mark.parametrize("name", FRONT_ENDS)
def test_a_region_that_was_made_is_the_same_as_its_parts(name):
    """Bit for bit; a region that is switched off rules nothing."""
    front_end = FRONT_ENDS[name]
    policy = nc.Policy.native().with_rules(nc.Rule("aten.gelu", "full")) if name == "convert" else POLICY
    region = nc.autocast("cpu", BF16, policy=policy)
    with region:
        expected = net()(X)
    for given in (region, policy):
        found = front_end(net(), under=given)
        assert found.dtype is expected.dtype and torch.equal(found, expected)
    off = front_end(net(), under=nc.autocast("cpu", BF16, enabled=False))
    assert torch.equal(off, net()(X))


@pytest.mark.parametrize("name", [*FRONT_ENDS, "explain"])
def test_what_no_region_can_be_is_refused_with_what_to_write(name):
    """What torch made, a number, a misspelt name."""
    front_end = FRONT_ENDS.get(name, lambda model, **region: nc.explain(model, (X,), **region))
    for under in (torch.autocast("cpu", BF16), 16):
        with pytest.raises(nc.errors.RegionError, match=r"under=[^\n]*\n[^\n]*narrowcast.autocast"):
            front_end(net(), under=under)
    with pytest.raises(nc.errors.RegionError, match="did you mean 'native'"):
        front_end(net(), under="nativ")


def test_explain_takes_a_region():
    """With its policy, format and device type."""
    found = nc.explain(net(), (X,), under=nc.autocast("cpu", torch.float16, policy=POLICY))
    assert (found.policy, found.low, found.device_type) == (POLICY.name, "fp16", "cpu")
    assert (
        found.ledger.op_formats()["aten.gelu.default"]
        == nc.explain(net(), (X,), under=nc.autocast("cpu", "fp16", policy=POLICY)).ledger.op_formats()[
            "aten.gelu.default"
        ]
    )


def test_a_name_and_a_value_are_one_goal():
    """What is said of a goal belongs to it, so that nothing is given to a goal that does not know it."""
    from narrowcast.core.goals import as_goal

    assert as_goal("fast") == nc.Goal.fast() and as_goal("memory") == nc.Goal.memory()
    assert nc.Goal.fast(verify=False).races is False and nc.Goal.fast().races and not nc.Goal.memory().races
    for function in (nc.compile, nc.export, nc.explain, nc.script, nc.trace):
        parameters = inspect.signature(function).parameters
        assert not set(parameters) & {
            "verify",
            "profile",
            "memory_limit_bytes",
            "slowdown_limit",
            "enabled",
            "policy",
            "region",
        }
        assert "under" in parameters and "dtype" not in parameters
    with pytest.raises(TypeError):
        nc.Goal.memory(memory_limit_bytes=5)
    with pytest.raises(nc.errors.GoalError, match=r"Goal.fast\(...\) or Goal.memory"):
        nc.compile(net(), goal="quick")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--no-verify",), "--no-verify with --goal exact"),
        (("--goal", "memory", "--no-verify"), "Write --goal fast"),
        (("--goal", "fast", "--slowdown-limit", "4"), "Write --goal memory"),
        (("--goal", "fast", "--memory-limit-bytes", "0"), "positive number of bytes"),
    ],
)
def test_flags_that_do_not_belong_to_the_goal_are_errors(flags, said, capsys):
    """On the command line, too."""
    with pytest.raises(SystemExit) as stopped:
        main(["explain", "examples/minilm.py", "--front-end", "compile", *flags])
    assert stopped.value.code == 2
    assert said in " ".join(capsys.readouterr().err.split())
