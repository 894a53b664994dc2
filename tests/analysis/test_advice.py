"""What recordings and explanations warn of, and what each rule of a policy matched."""

import copy
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch import nn

import narrowcast as nc
from narrowcast.reports.results.saved import parse

X = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def model():
    """Two layers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))


def kinds(ledger):
    """The advice by kind, with the text of its line."""
    lines = Path(__file__).read_text().split("\n")
    return {advice.kind: lines[advice.line - 1].strip() for advice in ledger.advice}


def test_a_clean_training_step_needs_no_advice(model):
    """The region ends after the loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for region in (nc.autocast("cpu"), torch.autocast("cpu")):
        with nc.record() as ledger:
            with region:
                loss = nn.functional.cross_entropy(model(X).float(), torch.tensor([0, 1]))
            loss.backward()
            optimizer.step()
        assert ledger.advice == {}


@pytest.mark.parametrize("region", [nc.autocast("cpu"), torch.autocast("cpu")], ids=["ours", "native"])
def test_backward_and_step_in_a_region(model, region):
    """Each once, with its line."""
    optimizer = torch.optim.AdamW(model.parameters())
    with nc.record() as ledger, region:
        loss = model(X).float().sum()
        loss.backward()
        optimizer.step()
    assert kinds(ledger) == {
        "backward in a region": "loss.backward()",
        "optimizer step in a region": "optimizer.step()",
    }


def test_a_low_result_that_leaves_the_region(model):
    """For a float32 op: one that mixes formats, and one that a region would compute in fp32. A cast helps."""
    with nc.record() as ledger:
        with nc.autocast("cpu"):
            out = model(X)
        out.float() + torch.ones(2, 4)
        out * 2
    assert ledger.advice == {}
    with nc.record() as ledger:
        with nc.autocast("cpu"):
            out = model(X)
        out + torch.ones(2, 4)
    assert kinds(ledger) == {"left the region in a low format": "out + torch.ones(2, 4)"}
    (advice,) = ledger.advice
    assert "aten.linear.default" in advice.what and "test_advice.py:" in advice.what
    with nc.record() as ledger:
        with nc.autocast("cpu"):
            out = model(X)
        nn.functional.cross_entropy(out, torch.tensor([0, 1]))
    assert kinds(ledger) == {
        "left the region in a low format": "nn.functional.cross_entropy(out, torch.tensor([0, 1]))"
    }


def test_a_mixed_op_outside_is_explained_before_it_raises(model):
    """The forum's RuntimeError about Float and BFloat16."""
    with nc.record() as ledger, pytest.raises(RuntimeError):
        with nc.autocast("cpu"):
            out = model(X)
        torch.mm(out, torch.ones(4, 4))
    assert kinds(ledger) == {"left the region in a low format": "torch.mm(out, torch.ones(4, 4))"}


def test_forms_that_autocast_passes_by():
    """In place and out=; the functional form is named."""
    with nc.record() as ledger, nc.autocast("cpu"):
        made = torch.mm(X, X.t()).float()
        made.addmm_(X, X.t())
        torch.mm(X, X.t(), out=made)
        made.add_(1)  # which no list names
        made.relu_()
    skipped = [a for a in ledger.advice if a.kind == "skipped by autocast"]
    assert ["aten.addmm" in skipped[0].todo, "aten.mm" in skipped[1].todo, len(skipped)] == [True, True, 2]


@pytest.mark.parametrize("make", [nc.autocast, torch.autocast])
def test_a_region_that_casts_nothing(make):
    """Its line; not if it casts, is off, is empty, or raises."""
    with nc.record() as ledger:
        with make("cpu"):
            X.relu()
        with make("cpu", enabled=False):
            X.relu()
        with make("cpu"):
            pass
    assert kinds(ledger) == {"no casts": 'with make("cpu"):'}
    assert len(ledger.advice) == 1


@pytest.mark.parametrize("make", [nc.autocast, torch.autocast])
def test_a_block_of_few_ops_beside_a_region_that_casts(make):
    """A penalty of norms has nothing to cast, and its region is right."""
    with nc.record() as ledger:
        with make("cpu"):
            torch.mm(X, X.t())
        with make("cpu"):
            X.relu()
    assert not ledger.advice


def test_low_copies_of_weights_that_an_optimizer_trains_in_fp32(model):
    """Their masters are kept in fp32 already; of low weights that are trained themselves it is said."""
    low = copy.deepcopy(model).bfloat16()
    for trained, told in ((model, set()), (low, {"weights in a low format"})):
        optimizer = torch.optim.SGD(trained.parameters(), 0.1)
        with nc.record() as ledger:
            with nc.autocast("cpu"):
                loss = low(X).float().sum()
            loss.backward()
            for master, weight in zip(model.parameters(), low.parameters(), strict=True):
                master.grad = weight.grad.float()
            optimizer.step()
        assert {a.kind for a in ledger.advice} == told


def test_a_converted_model_in_a_region(model):
    """half() and a region are one too many; so explain says, without running anything."""
    found = nc.explain(model.bfloat16(), (X,), under="bf16")
    assert [a.kind for a in found.ledger.advice] == ["weights in a low format"]
    text = " ".join(str(found).split())
    assert "weights in a low format" in text and "Keep the weights in fp32" in text
    assert "weights in a low format" in found.to_text(every=True)


def test_advice_is_counted_once_per_line_and_saved(model):
    """A loop is one line; the JSON form keeps it."""
    with nc.record() as ledger, nc.autocast("cpu"):
        for _ in range(3):
            model(X).float().sum().backward()
    assert list(ledger.advice.values()) == [3]
    again = parse(ledger.to_json())
    assert again.advice == ledger.advice and again.matches == ledger.matches
    assert ledger.merge(again).advice == {next(iter(ledger.advice)): 6}
    assert "backward in a region" in str(ledger)
    shown = " ".join(ledger.to_text(every=True).partition("\nAdvice")[2].split())
    assert "backward in a region" in shown and "times 3, line" in shown


POLICY = """
extends = "native"

[[rule]]
op = "aten.linear"
module = "0"
action = "full"

[[rule]]
op = "aten.linear"
module = "nowhere.*"
action = "full"

[[rule]]
op = "module.call"
module = "2"
argument = "result"
action = "to(fp32)"
"""


@pytest.mark.parametrize("front_end", ["eager", "compile", "export", "script"])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_explain_says_what_each_rule_matched_and_which_matched_nothing(model, front_end):
    """With the rule's line."""
    found = nc.explain(model, (X,), under=nc.Policy.parse(POLICY, "my.toml"), front_end=front_end)
    rows = {row.origin: (row.calls > 0, row.modules) for row in found.rules}
    assert rows == {"my.toml:5": (True, ("0",)), "my.toml:10": (False, ()), "my.toml:15": (True, ("2",))}
    text = str(found)
    assert "matched nothing" in text and "my.toml:10" in text
    assert found.to_json().count('"my.toml:') >= 3


@pytest.mark.parametrize(
    "leave",
    [
        lambda m: nn.functional.relu(m(X)),
        lambda m: m(X).view(-1),
        lambda m: m(X) * 2,
    ],
)
def test_low_results_are_followed_through_ops_that_no_list_names(model, leave):
    """Inside the region and outside of it, views included."""
    with nc.record() as ledger:
        with nc.autocast("cpu"):
            out = leave(model)
        out.detach().reshape(-1) + torch.ones(8)
    assert list(kinds(ledger)) == ["left the region in a low format"]


def test_a_backward_that_begins_with_a_listed_op_is_seen(model):
    """autograd.grad and a gradient that is given, too."""
    with nc.record() as ledger, nc.autocast("cpu"):
        out = model[0](X)
        torch.autograd.grad(out, [model[0].weight], torch.ones_like(out))
    assert list(kinds(ledger)) == ["backward in a region"]


def test_code_that_is_as_it_should_be_needs_no_advice(model):
    """custom_bwd, recomputation, scripts, generators, ops whose in-place form computes the same."""
    from torch.utils.checkpoint import checkpoint

    class Gate(torch.autograd.Function):
        @staticmethod
        @nc.custom_fwd
        def forward(ctx, x):
            return x * 1

        @staticmethod
        @nc.custom_bwd
        def backward(ctx, grad):
            return grad * 2

    @nc.autocast("cpu")
    def steps():
        yield torch.mm(X, X.t())
        yield X.relu()

    scripted = torch.jit.script(nn.Linear(8, 8))
    with nc.record() as ledger:
        with torch.autocast("cpu"):
            out = Gate.apply(checkpoint(model, X.clone().requires_grad_(), use_reentrant=True))
            loss = out.float().sum()
        loss.backward()
        with torch.autocast("cpu"):
            scripted(X)
        list(steps())
        with torch.autocast("cpu"):
            torch.mm(X, X.t()).float().exp_()
    assert ledger.advice == {}


def test_recordings_that_overlap_leave_torch_as_it_was():
    """Whatever the order in which they end."""
    before = torch.autocast.__enter__
    first, second = nc.record(), nc.record()
    first.__enter__()
    second.__enter__()
    assert torch.autocast.__enter__ is not before
    second.__exit__(None, None, None)
    first.__exit__(None, None, None)
    assert torch.autocast.__enter__ is before


def test_a_recording_does_not_stand_in_the_way_of_a_swap():
    """Nobody may refer weakly to tensors that are swapped."""
    a, b = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.zeros(2, 2))
    with nc.record(), nc.autocast("cpu"), torch.no_grad():
        torch.mm(torch.mm(a, a), b)
        torch.utils.swap_tensors(a, b)
    assert a.sum() == 0 and b.sum() == 4


def test_a_rule_that_says_what_native_says_is_not_without_effect():
    """Native keeps prod in fp32 already: the rule matches, whichever of the two is cited."""
    policy = 'schema = "narrowcast.policy/1"\nname = "x"\nextends = ["native"]\n[[rule]]\nop = "{}"\naction = "full"\n'
    for op, is_called in (("aten.prod.dim_int", True), ("aten.cumprod.default", False)):
        with nc.record() as ledger, nc.autocast("cpu", torch.float16, policy=nc.Policy.parse(policy.format(op))):
            torch.rand(4, 16).half().prod(-1)
        assert ("rule without effect" in {advice.kind for advice in ledger.advice}) is not is_called


@pytest.mark.parametrize("settings", [{}, {"under": "bf16"}, {"real": True}, {"run": True}], ids=str)
@pytest.mark.parametrize("is_left_open", [False, True])
def test_the_region_of_an_explanation_is_not_the_steps_own(settings, is_left_open):
    """It is around all of a step: a backward outside of the program's regions is outside."""
    net = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def step():
        with ExitStack() as stack:
            with torch.autocast("cpu", torch.bfloat16):
                loss = net(X).float().square().mean()
            if is_left_open:
                stack.enter_context(torch.autocast("cpu", torch.bfloat16))
            loss.backward()
            optimizer.step()
        return loss

    found = kinds(nc.explain(step, (), **settings).ledger)
    assert set(found) == ({"backward in a region", "optimizer step in a region"} if is_left_open else set())
