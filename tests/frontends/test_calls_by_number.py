"""Rules about the n-th call of an op: the same call in eager, compiled, exported, scripted and traced code."""

import itertools
import warnings

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import narrowcast as nc
from narrowcast.errors import PolicyError, RefusedError

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
X = torch.randn(2, 8, 8)


class Attention(torch.nn.Module):
    """Two products in one call."""

    def forward(self, q, k, v):
        scores = torch.matmul(q, k.transpose(-1, -2))
        return torch.matmul(scores.softmax(-1), v)


class Net(torch.nn.Module):
    """Modules that are called twice, and products of its own before, between and after their calls."""

    def __init__(self):
        super().__init__()
        self.a, self.b = Attention(), Attention()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x):
        x = self.linear(self.a(x, x, x))
        x = torch.matmul(x, x.transpose(-1, -2))
        y = self.b(x, x, x)
        x = torch.matmul(self.b(y, y, y), y)
        return torch.matmul(x, self.a(x, y, x))


def policy(call, module=None, action="full"):
    return nc.Policy("p").with_rules(nc.Rule("aten.matmul", action, module=module, call=call))


def in_fp32(model, rules, *args):
    """The module paths and numbers of the products that eager code computes in fp32, and what it gives."""
    with torch.no_grad(), nc.record() as ledger, nc.autocast("cpu", torch.bfloat16, policy=rules):
        out = model(*args)
    found = {}
    for kind, tally in ledger.calls.items():
        if "matmul" in kind.op and kind.computes == "fp32":
            found.setdefault(kind.module_path, set()).update(tally.numbers)
    return found, out


FRONT_ENDS = {
    "compile": lambda model, rules: nc.compile(model, under=nc.autocast("cpu", policy=rules), backend="aot_eager"),
    "export": lambda model, rules: nc.export(model, (X,), under=nc.autocast("cpu", policy=rules)).module(),
    "script": lambda model, rules: nc.script(model, under=nc.autocast("cpu", policy=rules)),
    "trace": lambda model, rules: nc.trace(model, (X,), under=nc.autocast("cpu", policy=rules)),
}


class Methods(torch.nn.Module):
    """Calls that are written as methods of tensors."""

    def forward(self, x):
        scores = x.matmul(x.transpose(-1, -2)).softmax(-1)
        return scores.matmul(x).cumsum(-1).matmul(x)


@pytest.mark.parametrize("call", [1, 2, 3])
def test_calls_of_methods_are_counted_in_compiled_code(call, fresh_dynamo):
    """They are nodes of another kind in Dynamo's graphs."""
    found, out = in_fp32(Methods(), policy(call), X)
    assert found == {"": {call}}
    under = nc.autocast("cpu", policy=policy(call))
    assert torch.equal(nc.compile(Methods(), under=under, backend="aot_eager", fullgraph=True)(X), out)


@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize(
    ("call", "module", "expected"),
    [
        (2, None, {"": {2}, "a": {2}, "b": {2}}),
        (1, "b", {"b": {1}}),
    ],
)
def test_the_nth_call_is_the_same_in_every_front_end(front_end, call, module, expected, fresh_dynamo):
    """Also where the module is called twice, and where it computes between the calls of its parts."""
    model, rules = Net().eval(), policy(call, module)
    found, out = in_fp32(model, rules, X)
    assert found == expected
    with torch.no_grad():
        assert torch.equal(FRONT_ENDS[front_end](model, rules)(X), out)


def test_compiled_code_is_still_compiled(fresh_dynamo):
    """The hook that counts calls stands in the way of nothing."""
    found = nc.explain(Net().eval(), (X,), under=policy(2), front_end="compile")
    assert [graph.after is not None for graph in found.graphs] == [True]
    numbers = {k.module_path: set(t.numbers) for k, t in found.ledger.calls.items() if k.computes == "fp32"}
    assert numbers["a"] >= {2}
    assert not found.differences


def test_a_captured_call_names_the_call_that_a_rule_means():
    """What a capture calls #2 is what `call = 2` is about: each call of each op, by a rule made of its identity."""
    model = Net().eval()
    run = nc.capture(model, (X,), under="native")
    ids = {
        (c.id.module_path, c.id.op, c.id.number) for c in run.calls if c.id.op.startswith(("aten.matmul", "aten.li"))
    }
    assert len(ids) == 8
    for path, op, number in sorted(ids):
        rule = nc.Rule(op, "to(fp16)", module=path or None, call=number)
        again = nc.capture(model, (X,), under=nc.Policy("one").with_rules(rule))
        low = {(c.id.module_path, c.id.op, c.id.number) for c in again.calls if c.computes == "fp16" and c.id.op == op}
        expected = {(p, o, n) for p, o, n in ids if (o, n) == (op, number) and p.startswith(path)}
        assert low == expected, rule


class OfItself(Attention):
    def forward(self, x):
        return super().forward(x, x, x)


class Checkpointed(torch.nn.Module):
    """A function of its own, and a part, both computed again in the backward."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.part, self.use_reentrant = OfItself(), use_reentrant

    def forward(self, x):
        x = torch.matmul(x, x)
        x = checkpoint(lambda y: torch.matmul(torch.matmul(y, y), y), x, use_reentrant=self.use_reentrant)
        return checkpoint(self.part.__call__, x, use_reentrant=self.use_reentrant)


class Around(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize(("call", "module"), [(2, None), (3, None), (2, "inner.part"), (None, "inner.part")])
def test_what_a_checkpoint_recomputes_goes_on_counting(use_reentrant, call, module):
    """And stands in the modules in which it stood in the forward: the gradients are those without a checkpoint.

    Without the cache: a reentrant checkpoint makes a leaf of its input, whose cast autocast then shares (torch's, too),
    so that its gradient is summed in bf16.
    """

    def gradient(model):
        x = X.clone().requires_grad_()
        with nc.autocast("cpu", torch.bfloat16, policy=policy(call, module), cache_enabled=False):
            out = model(x)
        out.float().sum().backward()
        return x.grad

    class Plain(Checkpointed):
        def forward(self, x):
            x = torch.matmul(x, x)
            return self.part(torch.matmul(torch.matmul(x, x), x))

    assert torch.equal(gradient(Around(Checkpointed(use_reentrant))), gradient(Around(Plain(use_reentrant))))


class Loop(torch.nn.Module):
    def forward(self, x, n: int):
        for _ in range(n):
            x = torch.matmul(x, x)
        return x


class Branch(torch.nn.Module):
    def forward(self, x, n: int):
        if n > 2:
            x = torch.matmul(x, x)
        return torch.matmul(x, x)


class Alike(torch.nn.Module):
    """Both branches make one call."""

    def forward(self, x, n: int):
        if n > 2:
            x = torch.matmul(x, x)
        else:
            x = torch.matmul(x, x.transpose(-1, -2))
        return torch.matmul(x, x)


class Repeats(torch.nn.Module):
    """Each turn of the loop is a call of the module from its beginning."""

    def __init__(self):
        super().__init__()
        self.inner = Attention()

    def forward(self, x, n: int):
        for _ in range(n):
            x = self.inner(x, x, x)
        return x


@pytest.mark.parametrize("model", [Loop, Branch])
def test_a_script_that_cannot_know_the_number_refuses_the_rule(model):
    """A branch or a loop of unknown length makes it depend on data; a rule about another module is accepted."""
    with pytest.raises(RefusedError, match="not known before it runs"):
        nc.script(model(), under=nc.autocast("cpu", policy=policy(2)))
    nc.script(model(), under=nc.autocast("cpu", policy=policy(2, "elsewhere")))  # it is about nothing here


@pytest.mark.parametrize("model", [Alike, Repeats])
@pytest.mark.parametrize("n", [1, 3])
def test_a_script_counts_where_every_way_counts_alike(model, n):
    """Branches with equally many calls and loops over a module keep the number certain, so results equal eager's."""
    made = nc.script(model(), under=nc.autocast("cpu", policy=policy(2)))
    with torch.no_grad():
        assert torch.equal(made(X, n), in_fp32(model(), policy(2), X, n)[1])


class Broken(torch.nn.Module):
    def forward(self, x):
        x = torch.matmul(x, x)
        torch._dynamo.graph_break()
        return torch.matmul(x, x)


class Outer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.broken, self.whole = Broken(), Attention()

    def forward(self, x):
        x = self.broken(x)
        return self.whole(x, x, x)


def test_behind_a_graph_break_nobody_knows_the_number(fresh_dynamo):
    """The rule is refused there, and holds in modules that are called behind it."""
    made = nc.compile(Outer(), under=nc.autocast("cpu", policy=policy(2)), backend="aot_eager")
    with pytest.raises(Exception, match=r"a rule about call 2 of aten\.matmul\.default"):
        made(X)
    torch._dynamo.reset()
    model, rules = Outer(), policy(2, "whole")
    made = nc.compile(model, under=nc.autocast("cpu", policy=rules), backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(made(X), in_fp32(model, rules, X)[1])


def test_a_number_that_no_call_has_is_told_once():
    """Four runs with a rule about call 9 warn once, and the warning gives the highest number that occurs."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        rules = policy(9)
        for _ in range(4):
            in_fp32(Net(), rules, X)
    told = [str(w.message) for w in found if "call 9" in str(w.message)]
    assert len(told) == 1
    assert "at most 3 such calls are made in one call of a module" in told[0]


def test_threads_count_for_themselves():
    """Eight runs of one model in four threads give the same result as one run by itself."""
    from concurrent.futures import ThreadPoolExecutor

    model, rules = Net().eval(), policy(2)
    expected = in_fp32(model, rules, X)[1]

    def run(_):
        with torch.no_grad(), nc.autocast("cpu", torch.bfloat16, policy=rules):
            return model(X)

    with ThreadPoolExecutor(4) as pool:
        assert all(torch.equal(out, expected) for out in pool.map(run, range(8)))


def test_a_call_that_raises_leaves_the_count_as_it_was():
    """The caller's next product is #2 even though a part raised after a product of its own."""

    class Fails(torch.nn.Module):
        def forward(self, x):
            torch.matmul(x, x)
            raise ValueError("on purpose")

    class Tries(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.part = Fails()

        def forward(self, x):
            x = torch.matmul(x, x)
            with pytest.raises(ValueError, match="on purpose"):
                self.part(x)
            return torch.matmul(x, x)

    assert in_fp32(Tries(), policy(2), X)[0] == {"": {2}}


def test_calls_outside_of_modules_are_counted_from_the_region_on():
    """Each op has its own count, and every region starts again at 1."""

    def run():
        with nc.autocast("cpu", torch.bfloat16, policy=policy(2)):
            return [torch.mm(X[0], X[0]).dtype, *(torch.matmul(X, X).dtype for _ in range(3))]

    bf, fp = torch.bfloat16, torch.float32
    assert run() == run() == [bf, bf, fp, bf]


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ('op = "aten.*"\ncall = 2', "counted by themselves"),
        ('op = "aten.mm"\ncall = 0', "counted from 1"),
        ('op = "aten.mm"\ncall = true', "counted from 1"),
        ('op = "aten.mm"\ncall = "2"', "a value of type str"),
        ('op = "module.call"\ncall = 2', "calls of ops"),
        ('op = "backward.aten.mm"\ncall = 2', "calls of the forward"),
    ],
)
def test_a_number_that_nobody_counts_is_refused_with_its_line(row, found):
    """Wildcards, module calls, the backward and numbers that are not positive integers do not parse."""
    with pytest.raises(PolicyError, match=found) as error:
        nc.Policy.parse(f'[[rule]]\n{row}\naction = "full"', "my.toml")
    assert "my.toml:" in str(error.value)


def test_a_policy_with_numbers_is_written_and_read_back():
    """TOML keeps the numbers, and policies that differ in a number alone have different digests."""
    made = policy(3, "a").with_rules(nc.Rule("aten.mm", "full", call=1))
    again = nc.Policy.parse(made.to_toml())
    assert again == made
    assert [rule.call for rule in again.rules] == [3, 1]
    digests = {policy(call).digest for call in (None, 1, 2)}
    assert len(digests) == 3


def test_a_rule_about_one_call_wins_over_the_op_alone_and_loses_to_a_module():
    """The most specific rule decides, regardless of the order in which the rules were added."""
    one = nc.Rule("aten.matmul", "full", call=2)
    rules = [one, nc.Rule("aten.matmul", "to(fp16)"), nc.Rule("aten.matmul", "to(bf16)", module="a")]
    for order in itertools.permutations(rules):
        found, _ = in_fp32(Net().eval(), nc.Policy("p").with_rules(*order), X)
        assert found == {"": {2}, "b": {2}}


def test_what_is_allowed_of_one_call_is_not_allowed_of_another():
    """Two logarithms of zero are taken; the rule allows the first, so the second is the only finding."""

    class Logs(torch.nn.Module):
        def forward(self, x):
            return torch.log(x), torch.log(x)

    zero = torch.tensor([0.0, 1.0])
    rules = nc.Policy.parse('[[rule]]\nop = "aten.log"\ncall = 1\nallow_nonfinite = true')
    with nc.watch(at="op") as w, nc.autocast("cpu", policy=rules):
        for out in Logs()(zero):
            (out * 1.0).sum()
    assert [finding.id.number for finding in w.findings] == [2]
