"""Rules about what a call returns, in every front end."""

import pytest
import torch
import torch.nn.functional as F

import narrowcast as nc
from narrowcast.errors import PolicyError, RefusedError

BF, HF, FP, DP = torch.bfloat16, torch.float16, torch.float32, torch.float64


class Block(torch.nn.Module):
    """A linear layer, an activation, and an op with two results."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x):
        hidden = self.linear(x)
        active = F.gelu(hidden)
        best, _ = torch.topk(active, 2)
        return hidden, active, best


CASES = {
    "inside": ((nc.Rule("aten.gelu", "inside"),), (BF, BF, BF)),
    "linear gives fp32": ((nc.Rule("aten.linear", "to(fp32)", argument="result"),), (FP, FP, FP)),
    "the first of two": ((nc.Rule("aten.topk", "to(fp16)", argument="result.0"),), (BF, BF, HF)),
    "as its input": (
        (nc.Rule("aten.gelu", "full"), nc.Rule("aten.gelu", "follow", argument="result")),
        (BF, BF, BF),
    ),
    "low": ((nc.Rule("aten.gelu", "full"), nc.Rule("aten.gelu", "lower", argument="result")), (BF, BF, BF)),
    "only in a module": (
        (nc.Rule("aten.linear", "full", argument="result", module="linear"),),
        (FP, FP, FP),
    ),
}


def policy(*rules):
    """Native with these rules."""
    return nc.Policy.native().with_rules(rules)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_results_have_the_formats_that_rules_give_them(case):
    """In eager code, compiled, scripted, traced and exported, bit for bit."""
    rules, dtypes = CASES[case]
    chosen = policy(*rules)
    torch.manual_seed(0)
    model, x = Block(), torch.randn(4, 8)
    with nc.autocast("cpu", policy=chosen):
        expected = model(x)
    assert tuple(t.dtype for t in expected) == dtypes
    settings = {"under": chosen}
    for found in (
        nc.compile(model, backend="aot_eager", **settings)(x),
        nc.script(model, **settings)(x),
        nc.trace(model, x, **settings)(x),
        nc.export(model, (x,), under=chosen).module()(x),
    ):
        assert all(a.dtype is b.dtype and torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def plain(x):
    """Its format is not known before it runs."""
    return F.gelu(x)


@pytest.mark.parametrize("rule", [nc.Rule("aten.gelu", "inside"), nc.Rule("aten.gelu", "to(fp16)", argument="result")])
def test_scripts_that_do_not_know_what_comes_in(rule):
    """They look when they run."""
    scripted = nc.script(plain, under=nc.autocast("cpu", policy=policy(rule)))
    for dtype in (BF, HF, FP, DP):
        x = torch.randn(4, dtype=dtype)
        with nc.autocast("cpu", policy=policy(rule)):
            expected = plain(x)
        found = scripted(x)
        assert found.dtype is expected.dtype and torch.equal(found, expected)


def test_scripts_whose_regions_are_switched_when_they_run():
    """The cast of the result is switched with the region."""
    chosen = policy(nc.Rule("aten.gelu", "to(fp16)", argument="result"))

    def chosen_region(x, on: bool):
        with nc.autocast("cpu", enabled=on, policy=chosen):
            return F.gelu(x)

    scripted = nc.script(chosen_region)
    for on in (True, False):
        x = torch.randn(4)
        expected, found = chosen_region(x, on), scripted(x, on)
        assert found.dtype is expected.dtype and torch.equal(found, expected)


def test_the_ledger_lists_casts_of_results():
    """With the rule that asked, in eager code and in graphs."""
    chosen = policy(nc.Rule("aten.linear", "to(fp32)", argument="result", reason="read by numpy"))
    model, x = Block(), torch.randn(4, 8)
    with nc.record() as ledger, nc.autocast("cpu", policy=chosen):
        model(x)
    (cast,) = (c for c in ledger.casts if c.argument == "result")
    assert (cast.src, cast.dst, cast.reason) == ("bf16", "fp32", "read by numpy")
    graphs = nc.explain(model, (x,), under=chosen, front_end="compile").ledger
    (edit,) = [e for e in graphs.edits if e.argument == "result"]
    assert (edit.src, edit.dst, edit.reason) == ("bf16", "fp32", "read by numpy")


def test_gradients_flow_through_casts_of_results():
    """As through any cast."""
    chosen = policy(nc.Rule("aten.linear", "to(fp32)", argument="result"))
    model, x = Block(), torch.randn(4, 8)
    with nc.autocast("cpu", policy=chosen):
        loss = model(x)[0].sum()
    loss.backward()
    assert model.linear.weight.grad is not None and model.linear.weight.grad.dtype is FP


def test_what_cannot_be_said_of_results_is_an_error():
    """An in-place op returns what it writes to; a script may not know what a result is to follow."""
    with pytest.raises(PolicyError, match="returns what it writes to"):
        nc.autocast("cpu", policy=policy(nc.Rule("aten.add_.Tensor", "full", argument="result")))
    with pytest.raises(PolicyError, match="looks at all arguments together"):
        nc.Rule("aten.gelu", "promote", argument="result")
    follows = policy(nc.Rule("aten.gelu", "follow", argument="result"), nc.Rule("aten.gelu", "full"))
    with pytest.raises(RefusedError, match="does not say what format comes in"):
        nc.script(plain, under=nc.autocast("cpu", policy=follows))


@pytest.mark.parametrize(
    ("op", "argument", "advice"),
    [
        ("aten.add_.Tensor", "self", "Write one of: other"),
        ("aten.add.out", "out", "Write one of: other, self"),
        ("aten.batch_norm", "running_mean", "Write one of: bias, input, weight"),
        ("aten.relu_.default", None, "Delete"),
    ],
)
def test_a_rule_about_what_an_op_writes_to_is_refused(op, argument, advice):
    """A cast makes a copy, and the op would write to that: such a rule did nothing, and nobody said so."""
    with pytest.raises(PolicyError, match=advice):
        nc.autocast("cpu", policy=policy(nc.Rule(op, "lower", argument=argument)))


def test_a_result_that_an_op_does_not_have():
    """By its position."""
    with pytest.raises(PolicyError, match="no result of that position"):
        nc.autocast("cpu", policy=policy(nc.Rule("aten.topk", "full", argument="result.2")))
    with pytest.raises(PolicyError, match="no result of that position"):
        nc.autocast("cpu", policy=policy(nc.Rule("aten.topk", "full", argument="result.values")))
    nc.autocast("cpu", policy=policy(nc.Rule("aten.split.Tensor", "full", argument="result.5")))


NORMS = {
    "layer_norm": lambda: torch.nn.LayerNorm(6),
    "group_norm": lambda: torch.nn.GroupNorm(2, 8),
    "batch_norm": lambda: torch.nn.BatchNorm2d(8).eval(),
    "rms_norm": lambda: torch.nn.RMSNorm(6),
}


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_a_norm_of_a_low_input_beside_wide_weights_gives_the_format_of_its_input(name):
    """Its result is cast then, where a rule wants fp32: graphs took it for the widest format, and cast nothing."""
    op = f"aten.{name}"
    chosen = policy(nc.Rule(op, "lower", argument="input"), nc.Rule(op, "to(fp32)", argument="result"))
    model, x = NORMS[name](), torch.randn(2, 8, 6, 6)
    with nc.autocast("cpu", policy=chosen):
        expected = model(x)
    assert expected.dtype is FP
    torch._dynamo.reset()
    found = {
        "compile": nc.compile(model, under=chosen, backend="aot_eager")(x),
        "export": nc.export(model, (x,), under=chosen).module()(x),
        "script": nc.script(model, under=chosen)(x),
        "trace": nc.trace(model, (x,), under=chosen)(x),
    }
    assert all(result.dtype is FP and torch.equal(result, expected) for result in found.values()), found
