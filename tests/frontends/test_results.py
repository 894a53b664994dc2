"""Rules about what a call returns, in every front end."""

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F

import narrowcast as nc
from narrowcast.errors import PolicyError, RefusedError, RegionError, ScriptWarning

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


def alike(expected, found):
    """Whether all tensors are equal in dtype and bits."""
    return all(a.dtype is b.dtype and torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def in_each_front_end(model, x, chosen):
    """What the model returns compiled, scripted, traced and exported under a policy."""
    torch._dynamo.reset()
    yield nc.compile(model, backend="aot_eager", under=chosen)(x)
    yield nc.script(model, under=chosen)(x)
    yield nc.trace(model, x, under=chosen)(x)
    yield nc.export(model, (x,), under=chosen).module()(x)


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
    for found in in_each_front_end(model, x, chosen):
        assert alike(expected, found)


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


class Parts(NamedTuple):
    """What a module returns: a tensor, a pair, and a tensor."""

    first: torch.Tensor
    pair: tuple[torch.Tensor, torch.Tensor]
    last: torch.Tensor


class Several(torch.nn.Module):
    """Returns tensors by name, by position, and in a tuple."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x):
        hidden = self.linear(x)
        return Parts(hidden, (hidden.sin(), hidden * 2), x * 1)


class Around(torch.nn.Module):
    """Hands a low tensor to a module, and returns all that it gives."""

    def __init__(self, inner):
        super().__init__()
        self.before, self.inner = torch.nn.Linear(8, 8), inner

    def forward(self, x):
        parts = self.inner(self.before(x))
        return parts.first, parts.pair[0], parts.pair[1], parts.last


def about(part, action="to(fp16)"):
    """A rule about the results of the module `inner`."""
    return nc.Rule("module.call", action, module="inner", argument=f"result{part}")


OF_MODULES = {
    "by position": ([about(".0")], (HF, BF, BF, BF)),
    "by name": ([about(".first")], (HF, BF, BF, BF)),
    "a tuple in it": ([about(".pair")], (BF, HF, HF, BF)),
    "all of them": ([about("")], (HF, HF, HF, HF)),
    "one otherwise than the rest": ([about(".last", "to(fp32)"), about("")], (HF, HF, HF, FP)),
    "computed in fp32, and one given so": (
        [nc.Rule("module.call", "inside", module="inner"), about(".0", "to(fp32)")],
        (FP, BF, BF, BF),
    ),
}


@pytest.mark.parametrize("case", OF_MODULES)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_parts_of_what_a_module_returns(case):
    """By position, by name and inside of tuples, in each front end alike; each part is cast once, not on its way."""
    rules, dtypes = OF_MODULES[case]
    chosen = policy(*rules)
    torch.manual_seed(0)
    model, x = Around(Several()), torch.randn(4, 8)
    with torch.no_grad(), nc.autocast("cpu", policy=chosen):
        expected = model(x)
        low = model.before(x)
    assert tuple(t.dtype for t in expected) == dtypes
    if expected[0].dtype is FP:  # not rounded to the format of the input first
        with torch.no_grad():
            assert torch.equal(expected[0], model.inner.linear(low.float()))
    for found in in_each_front_end(model, x, chosen):
        assert alike(expected, found)


@pytest.mark.parametrize("part", ["9", "other"])
def test_a_script_refuses_a_part_that_its_module_does_not_return(part):
    """As the region does, when the module is called: with the parts that there are."""
    chosen = policy(about(f".{part}"))
    model, x = Around(Several()), torch.randn(4, 8)
    with pytest.raises(RegionError, match=rf"result\.{part} "), nc.autocast("cpu", policy=chosen):
        model(x)
    with pytest.raises(RegionError, match=rf"result\.{part} of inner.*no such part: result\.0, result\.first"):
        nc.script(model, under=chosen)


class Statistics(torch.nn.Module):
    """A norm with all that its kernel returns, and a list of two formats in one."""

    def __init__(self):
        super().__init__()
        self.linear, self.weight = torch.nn.Linear(8, 8), torch.nn.Parameter(torch.rand(8))

    def forward(self, x):
        hidden = self.linear(x)
        norm, mean, scale = torch.native_layer_norm(hidden, [8], self.weight, self.weight, 1e-5)
        return norm, mean, scale, torch.cat([hidden, x])


OF_STATISTICS = {
    "the last of three": (nc.Rule("aten.native_layer_norm", "to(bf16)", argument="result.2"), (BF, FP, BF, FP)),
    "all as the input": (nc.Rule("aten.native_layer_norm", "follow", argument="result"), (BF, BF, BF, FP)),
    "of two formats, low": (nc.Rule("aten.cat", "lower", argument="result"), (BF, FP, FP, BF)),
    "of two formats, as the first": (nc.Rule("aten.cat", "follow", argument="result"), (BF, FP, FP, BF)),
}


@pytest.mark.parametrize("case", OF_STATISTICS)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_results_in_another_format_than_the_arguments(case):
    """Statistics beside a result, and what is made of two formats, are cast in graphs and scripts, too."""
    rule, dtypes = OF_STATISTICS[case]
    torch.manual_seed(0)
    model, x = Statistics(), torch.randn(4, 8)
    with nc.autocast("cpu", policy=policy(rule)):
        expected = model(x)
    assert tuple(t.dtype for t in expected) == dtypes
    for found in in_each_front_end(model, x, policy(rule)):
        assert alike(expected, found)


class Composed(torch.nn.Module):
    """Ops that are nothing but calls of others, which native autocast lists."""

    def __init__(self):
        super().__init__()
        self.recurrent = torch.nn.GRU(8, 8)

    def forward(self, x, y):
        out, state = self.recurrent(x[None])
        return torch.einsum("ij,jk->ik", x, y), torch.tensordot(x, y, 1), out[0], state[0]


OF_COMPOSED = {
    "einsum": (nc.Rule("aten.einsum", "full", argument="result"), (FP, BF, FP, FP)),
    "what goes into einsum": (nc.Rule("aten.einsum", "to(fp16)", argument="tensors"), (BF, BF, FP, FP)),
    "tensordot": (nc.Rule("aten.tensordot", "to(fp64)", argument="result"), (BF, DP, FP, FP)),
    "what goes into a recurrent layer": (nc.Rule("aten.gru", "to(bf16)", argument="input"), (BF, BF, FP, FP)),
    "a state": (nc.Rule("aten.gru", "to(fp16)", argument="result.1"), (BF, BF, FP, HF)),
}


@pytest.mark.parametrize("case", OF_COMPOSED)
@pytest.mark.filterwarnings("ignore")
def test_one_argument_or_result_of_an_op_that_is_made_of_others(case):
    """It is cast, and the calls inside are cast as ever: the op as a whole has no rule. A script says what it loses."""
    rule, dtypes = OF_COMPOSED[case]
    torch.manual_seed(0)
    model, x, y = Composed(), torch.randn(8, 8), torch.randn(8, 8)
    with torch.no_grad(), nc.autocast("cpu", policy=policy(rule)):
        expected = model(x, y)
    assert tuple(t.dtype for t in expected) == dtypes
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = nc.compile(model, backend="aot_eager", under=policy(rule))(x, y)
        exported = nc.export(model, (x, y), under=policy(rule)).module()(x, y)
    for found in (compiled, exported):
        assert alike(expected, found)
    with pytest.warns(ScriptWarning, match=r"the rule .* does not hold in it"):
        script = nc.script(model, under=policy(rule))
    native = nc.script(model, under="bf16")(x, y)
    assert all(torch.equal(a, b) for a, b in zip(native, script(x, y), strict=True))


def test_the_ledger_of_a_graph_has_casts_around_what_an_op_is_made_of():
    """With their op, argument and rule, as a recording has them; one that has moved is known to match."""
    rule = nc.Rule("aten.einsum", "full", argument="result", reason="as asked")
    for weighs in (True, False):  # where a gradient flows no cast moves
        found = nc.explain(Product(weighs), (torch.randn(8, 8),), under=policy(rule), front_end="export")
        rows = [cast for cast in found.ledger.casts if cast.op.startswith("aten.einsum")]
        known = [(cast.argument, cast.src, cast.dst, cast.reason) for cast in rows]
        assert known == [("result", "bf16", "fp32", "as asked")] * weighs
        assert not found.differences
        (row,) = [row for row in found.rules if "einsum" in row.rule]
        assert row.calls == 1


class Product(torch.nn.Module):
    """One product, of a weight or of what comes in."""

    def __init__(self, weighs=False):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(8, 8)) if weighs else None

    def forward(self, a):
        return torch.einsum("ij,jk->ik", a, a if self.weight is None else self.weight)


def test_a_script_refuses_a_rule_about_one_of_the_calls_of_such_an_op():
    """It held for all of them: the others are cast as the calls inside."""
    with pytest.raises(RefusedError, match=r"call 2 of aten\.einsum"):
        nc.script(Product(), under=policy(nc.Rule("aten.einsum", "full", call=2)))
