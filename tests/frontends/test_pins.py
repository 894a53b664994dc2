"""Modules, classes and functions in formats of their own: pins, regions on modules, and rules about `module.call`."""

import copy
import io
from collections import namedtuple

import pytest
import torch

import narrowcast as nc
from narrowcast.errors import PinError, PolicyError, RefusedError, RegionError, ScriptError

BF, HF, FP, DP = torch.bfloat16, torch.float16, torch.float32, torch.float64
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


class RoIPool(torch.nn.Module):
    """From elsewhere, in a forum post: it must run in fp32, and nobody may touch its `rois`."""

    def forward(self, x, rois, scale: float = 1.0):
        note(x, rois)
        return torch.einsum("bchw,nk->nc", x, rois) * scale


class Detector(torch.nn.Module):
    """A backbone, the pooling, a head."""

    def __init__(self):
        super().__init__()
        self.backbone = torch.nn.Conv2d(3, 4, 3)
        self.pool = RoIPool()
        self.head = torch.nn.Linear(4, 2)

    def forward(self, x, rois):
        return self.head(self.pool(self.backbone(x), rois=rois))


seen = []


class ScriptPool(torch.nn.Module):
    """The same, without what TorchScript cannot read."""

    def forward(self, x, rois, scale: float = 1.0):
        return torch.einsum("bchw,nk->nc", x, rois) * scale


ScriptPool.__name__ = ScriptPool.__qualname__ = "RoIPool"


def scriptable(model):
    """A copy whose pooling is a ScriptPool, pinned like the original."""
    made = copy.deepcopy(model)
    made.pool = ScriptPool()
    pin = model.pool._narrowcast_pin
    if pin is not None:
        made.pool._narrowcast_pin = pin
    return made


def note(*tensors):
    """Remember what came, where Python runs."""
    if not torch.compiler.is_compiling():
        seen.append((*(t.dtype for t in tensors), torch.is_autocast_enabled("cpu")))


torch.manual_seed(0)
IMAGE, ROIS = torch.randn(1, 3, 8, 8), torch.randn(5, 4)


@pytest.fixture(autouse=True)
def nothing_seen():
    """Each test sees its own calls."""
    seen.clear()


def same(a, b):
    """Equal in dtype and bits."""
    return a.dtype is b.dtype and torch.equal(a, b)


def detector():
    """The same weights every time."""
    torch.manual_seed(1)
    return Detector()


def by_hand(model):
    """What the forum post wants, written into the model."""
    x = model.backbone(IMAGE)
    with torch.autocast("cpu", enabled=False):
        pooled = torch.einsum("bchw,nk->nc", x.float(), ROIS)
    return model.head(pooled.to(x.dtype))


RULES = """
extends = "native"

[[rule]]
op = "module.call"
class = "RoIPool"
action = "to(fp32)"

[[rule]]
op = "module.call"
class = "RoIPool"
argument = "rois"
action = "follow"

[[rule]]
op = "module.call"
module = "pool"
argument = "result"
action = "follow"
"""


@pytest.mark.parametrize("way", ["pin", "pinned class", "rules"])
def test_the_pooling_runs_in_fp32_and_its_rois_are_left_alone(way, fresh_dynamo):
    """Whether the module is pinned, its class, or a policy says it; in eager code, compiled, exported and traced."""
    model, policy = detector(), nc.Policy.native()
    if way == "pin":
        assert nc.pin(model.pool, "fp32", keep=("rois",), out="input") is model.pool
    elif way == "pinned class":
        assert nc.pin(RoIPool, FP, keep="rois", out="input") is RoIPool
    else:
        policy = nc.Policy.parse(RULES)
    try:
        with nc.autocast("cpu", policy=policy):
            expected, found = by_hand(model), model(IMAGE, ROIS)
        assert seen == [(FP, FP, False)] and same(found, expected)
        settings = {"under": policy}
        assert same(nc.compile(model, backend="aot_eager", fullgraph=True, **settings)(IMAGE, ROIS), expected)
        assert same(nc.trace(model, (IMAGE, ROIS), **settings)(IMAGE, ROIS), expected)
        assert same(nc.script(scriptable(model), **settings)(IMAGE, ROIS), expected)
        exported = nc.export(model, (IMAGE, ROIS), under=policy)
        assert same(exported.module()(IMAGE, ROIS), expected)
        plain = torch.compile(model, backend="aot_eager", fullgraph=True)
        with nc.autocast("cpu", policy=policy):
            assert same(plain(IMAGE, ROIS), expected)
    finally:
        if way == "pinned class":
            nc.unpin(RoIPool)


def test_what_is_kept_is_kept_whatever_it_is():
    """rois in fp16 stay fp16, positional or by name."""
    pool = nc.pin(RoIPool(), "fp32", keep=("rois",))
    for call in (lambda: pool(IMAGE.bfloat16(), ROIS.half()), lambda: pool(rois=ROIS.half(), x=IMAGE.bfloat16())):
        call()
        assert seen.pop()[:2] == (FP, HF)


def test_a_pin_holds_outside_of_regions_too():
    """A model that was converted whole has no region at all."""
    pool = nc.pin(RoIPool(), "fp32", keep=("rois",), out="input")
    assert pool(IMAGE.bfloat16(), ROIS).dtype is BF
    assert seen == [(FP, FP, False)]


def test_unpin_gives_back_what_was():
    """In compiled code, too."""
    model = detector()
    compiled = torch.compile(model, backend="aot_eager")
    with nc.autocast("cpu"):
        before = compiled(IMAGE, ROIS)
        nc.pin(model.pool, "fp32", keep=("rois",), out="fp16")
        pinned = model.pool(model.backbone(IMAGE), ROIS)
        assert pinned.dtype is HF
        assert nc.unpin(model.pool) is model.pool
        assert same(compiled(IMAGE, ROIS), before) and same(model(IMAGE, ROIS), before)


def test_compiled_code_sees_a_pin_that_is_set_later():
    """It was traced without."""
    pool = RoIPool()
    compiled = torch.compile(pool, backend="aot_eager")
    x = IMAGE.bfloat16()
    assert compiled(x, ROIS.bfloat16()).dtype is BF
    nc.pin(pool, "fp32")
    assert compiled(x, ROIS.bfloat16()).dtype is FP
    nc.unpin(pool)
    assert compiled(x, ROIS.bfloat16()).dtype is BF


def test_exactly_at_least_and_inside():
    """Exactly fp32 takes fp64 down, at least fp32 does not, inside gives back what came."""
    module = torch.nn.Identity()
    table = {
        "exactly": (nc.Rule("module.call", "to(fp32)"), {BF: FP, HF: FP, FP: FP, DP: FP}),
        "at least": (nc.Rule("module.call", "full"), {BF: FP, HF: FP, FP: FP, DP: DP}),
        "inside": (nc.Rule("module.call", "inside"), {BF: BF, HF: HF, FP: FP, DP: DP}),
        "low": (nc.Rule("module.call", "lower"), {BF: BF, HF: BF, FP: BF, DP: DP}),
        "as it comes": (nc.Rule("module.call", "follow"), {BF: BF, HF: HF, FP: FP, DP: DP}),
    }
    for rule, formats in table.values():
        with nc.autocast("cpu", policy=nc.Policy.native().with_rules(rule)):
            for came, dtype in formats.items():
                assert module(torch.ones(2, dtype=came)).dtype is dtype
            assert module(torch.ones(2, dtype=torch.int64)).dtype is torch.int64
    at_least = nc.pin(torch.nn.Identity(), "fp32", at_least=True)
    assert at_least(torch.ones(2, dtype=DP)).dtype is DP and at_least(torch.ones(2, dtype=BF)).dtype is FP


@pytest.mark.parametrize("device_type", ["cpu", "meta"])
def test_inputs_are_cast_on_every_device(device_type):
    """A pin does not ask which."""
    pool = nc.pin(torch.nn.Identity(), "fp32")
    assert pool(torch.ones(2, dtype=BF, device=device_type)).dtype is FP


Pair = namedtuple("Pair", "logits hidden")


class Several(torch.nn.Module):
    """Takes nested containers, gives a named tuple, a dict or a tuple."""

    def forward(self, inputs, *more, kind="named", **options):
        note(inputs["a"], inputs["b"][0], *more, *options.values())
        logits, hidden = inputs["a"] * 2, inputs["b"][0] + 1
        return {"named": Pair(logits, hidden), "dict": {"logits": logits, "hidden": hidden}, "tuple": (logits, hidden)}[
            kind
        ]


def low(*shape):
    """A bf16 tensor."""
    return torch.ones(*shape, dtype=BF)


def test_containers_and_further_arguments_are_cast():
    """Element by element, under the name of the argument."""
    inputs = {"a": low(2), "b": [low(3), torch.ones(1, dtype=torch.int64)]}
    module = nc.pin(Several(), "fp32", keep=("extra",))
    module(inputs, low(1), low(2), extra=low(1), other=low(1))
    assert seen == [(FP, FP, FP, FP, BF, FP, False)]
    assert inputs["a"].dtype is BF  # the caller's own are left alone
    module = nc.pin(Several(), "fp32", only="more")
    module(inputs, low(1), low(2), extra=low(1), other=low(1))
    assert seen[1][:2] == (BF, BF) and seen[1][2:4] == (FP, FP)


def test_single_results_by_position_key_and_name():
    """The others stay as computed, and the container is of the same kind."""
    inputs = {"a": low(2), "b": [low(3)]}
    for kind, part in (("named", "logits"), ("dict", "logits"), ("tuple", "0"), ("named", "0")):
        rule = nc.Rule("module.call", "to(fp32)", argument=f"result.{part}")
        with nc.autocast("cpu", policy=nc.Policy.native().with_rules(rule)):
            found = Several()(inputs, kind=kind)
        first, second = found.values() if kind == "dict" else found
        assert (first.dtype, second.dtype) == (FP, BF)
        assert type(found) is {"named": Pair, "dict": dict, "tuple": tuple}[kind]
    missing = nc.Rule("module.call", "to(fp32)", argument="result.nothing")
    policy = nc.Policy.native().with_rules(missing)
    with nc.autocast("cpu", policy=policy), pytest.raises(RegionError, match="without that part"):
        Several()(inputs)


def test_hooks_and_state_dict_are_kept():
    """Hooks see what the module sees."""
    pool, calls = RoIPool(), []
    pool.register_forward_pre_hook(lambda module, args: calls.append(args[0].dtype))
    pool.register_forward_hook(lambda module, args, result: calls.append(result.dtype))
    keys = list(pool.state_dict())
    nc.pin(pool, "fp32", keep=("rois",), out="input")
    assert pool(IMAGE.bfloat16(), ROIS).dtype is BF
    assert calls == [FP, FP] and list(pool.state_dict()) == keys
    assert type(pool) is RoIPool and "_narrowcast_pin" not in dict(pool.named_buffers())


def test_pins_are_copied_and_pickled_with_their_module():
    """deepcopy, copy and torch.save; a copy can be unpinned by itself."""
    pool = nc.pin(RoIPool(), "fp32", keep=("rois",), out="input")
    stream = io.BytesIO()
    torch.save(pool, stream)
    stream.seek(0)
    for other in (copy.deepcopy(pool), copy.copy(pool), torch.load(stream, weights_only=False)):
        assert other(IMAGE.bfloat16(), ROIS).dtype is BF and seen.pop() == (FP, FP, False)
        nc.unpin(other)
        other(IMAGE.bfloat16(), ROIS.bfloat16())
        assert seen.pop()[:2] == (BF, BF)
    assert pool(IMAGE.bfloat16(), ROIS).dtype is BF and seen.pop() == (FP, FP, False)


def test_a_module_in_a_low_format():
    """Inputs are cast, and the region inside has that format, under the policy in force."""
    model = nc.pin(torch.nn.Linear(8, 8), "bf16", out="input")
    x = torch.randn(2, 8)
    found = model(x)
    with torch.autocast("cpu", dtype=BF):
        expected = torch.nn.functional.linear(x.bfloat16(), model.weight, model.bias)
    assert found.dtype is FP and torch.equal(found, expected.float())
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert same(compiled(x), found)
    policy = nc.Policy.native().with_rules(nc.Rule("aten.linear", "full"))
    with nc.autocast("cpu", policy=policy):
        assert torch.equal(model(x), torch.nn.functional.linear(x.bfloat16().float(), model.weight, model.bias))


def test_regions_on_modules_and_classes():
    """`nc.autocast(...)` has one spelling for everything that is called."""
    region = nc.autocast("cpu", dtype=BF)

    @region
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)

        def forward(self, x):
            return self.linear(x)

    block, x = Block(), torch.randn(2, 4)
    assert isinstance(block, Block) and block.linear.weight.dtype is FP
    assert block(x).dtype is BF and copy.deepcopy(block)(x).dtype is BF
    assert torch.compile(block, backend="aot_eager", fullgraph=True)(x).dtype is BF
    nc.unpin(Block)
    assert block(x).dtype is FP
    assert nc.autocast("cpu", dtype=HF)(block) is block and block(x).dtype is HF
    stream = io.BytesIO()
    torch.save(nc.autocast("cpu", dtype=BF)(torch.nn.Linear(4, 4)), stream)
    stream.seek(0)
    assert torch.load(stream, weights_only=False)(x).dtype is BF
    assert nc.unpin(block)(x).dtype is FP


def test_functions_and_methods_are_pinned_by_decoration():
    """The same arguments; unpin gives the original."""

    @nc.pin(format="fp32", keep=("boxes",), out="input")
    def roi_align(x, boxes):
        note(x, boxes)
        return x.sum() + boxes.sum()

    class Pooler:
        @nc.pin("fp32", only="x")
        def pool(self, x, boxes):
            note(x, boxes)
            return x

    with nc.autocast("cpu"):
        assert roi_align(low(2), low(2)).dtype is BF
        assert Pooler().pool(low(2), low(2)).dtype is FP
    assert seen == [(FP, BF, False), (FP, BF, False)]
    assert torch.compile(roi_align, backend="aot_eager", fullgraph=True)(low(2), low(2)).dtype is BF
    original = nc.unpin(roi_align)
    original(low(1), low(1))
    assert seen[-1] == (BF, BF, False)


def test_exceptions_leave_nothing_behind():
    """Autocast is as it was, in a region and outside."""

    class Failing(torch.nn.Module):
        def forward(self, x):
            raise ValueError("no")

    module = nc.pin(Failing(), "fp32")
    with nc.autocast("cpu"):
        with pytest.raises(ValueError, match="no"):
            module(low(1))
        assert torch.is_autocast_enabled("cpu")
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is BF


def test_gradients_come_back_in_the_format_of_what_came():
    """Through the casts at both ends."""
    pool = nc.pin(RoIPool(), "fp32", keep=("rois",), out="input")
    x = IMAGE.bfloat16().requires_grad_()
    pool(x, ROIS).sum().backward()
    assert x.grad.dtype is BF


def test_a_pin_is_stronger_than_a_rule():
    """And rules have the precedence that rules have: layers, then how specific they are."""
    rules = (nc.Rule("module.call", "to(fp16)"), nc.Rule("module.call", "to(fp32)", module_class="Identity"))
    policy = nc.Policy.native().with_rules(*rules)
    module = torch.nn.Identity()
    with nc.autocast("cpu", policy=policy):
        assert module(low(1)).dtype is FP and torch.nn.Flatten()(low(1, 1)).dtype is HF
        nc.pin(module, "fp64")
        assert module(low(1)).dtype is DP
    with nc.autocast("cpu", policy=policy.with_rules(nc.Rule("module.call", "follow"))):
        assert torch.nn.Identity()(low(1)).dtype is BF


def test_rules_name_modules_by_path_class_and_caller():
    """A path names the module itself, not what is inside."""

    class Inner(torch.nn.Module):
        def forward(self, x):
            return x * 1

    class Outer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList([Inner(), Inner()])

        def forward(self, x):
            return [layer(x) for layer in self.layers]

    def under(**where):
        rule = nc.Rule("module.call", "to(fp32)", argument="result", **where)
        with nc.autocast("cpu", policy=nc.Policy.native().with_rules(rule)):
            return [t.dtype for t in Outer()(low(1))]

    assert under(module="layers.1") == [BF, FP]
    assert under(module="layers.*") == [FP, FP] == under(module_class="*Inner")
    assert under(module="layers") == [BF, BF] == under(module_class="Inner.forward")
    assert under(function="*.Outer.forward") == [FP, FP]
    assert under(function="nowhere") == [BF, BF]


def test_a_refused_call_says_where_and_why():
    """The rule's line, too."""
    policy = nc.Policy.parse(
        'extends = "native"\n[[rule]]\nop = "module.call"\nclass = "Identity"\naction = "refuse"\n'
    )
    with nc.autocast("cpu", policy=policy), pytest.raises(RefusedError, match="Identity") as caught:
        torch.nn.Identity()(low(1))
    assert "<string>:3" in str(caught.value)


def test_a_policy_file_may_list_classes_and_arguments():
    """One row for several."""
    text = RULES.replace(
        'class = "RoIPool"\nargument = "rois"', 'class = ["RoIPool", "Other"]\nargument = ["rois", "scale"]'
    )
    policy = nc.Policy.parse(text)
    assert len(policy.rules) == 6 and nc.Policy.parse(policy.to_toml()) == policy
    assert policy.lint() == ()


def test_what_cannot_be_pinned_is_an_error():
    """Each says what to do instead."""
    pool = RoIPool()
    with pytest.raises(PinError, match=r"no argument 'roi'.*did you mean 'rois'"):
        nc.pin(pool, "fp32", keep=("roi",))
    with pytest.raises(PinError, match="neither a format nor out"):
        nc.pin(pool)
    with pytest.raises(PinError, match="no format to cast the others to"):
        nc.pin(pool, keep=("rois",), out="fp32")
    with pytest.raises(PinError, match="at_least"):
        nc.pin(pool, "bf16", at_least=True)
    with pytest.raises(PinError, match="not a floating-point format"):
        nc.pin(pool, torch.int8)
    with pytest.raises(PinError, match="has no call to pin"):
        nc.pin(3.5, "fp32")
    with pytest.raises(PinError, match="runs in steps"):

        @nc.pin("fp32")
        def steps(x):
            yield x

    with pytest.raises(PinError, match="it is not pinned"):
        nc.unpin(pool)
    with pytest.raises(PinError, match="it is not pinned"):
        nc.unpin(len)
    nc.pin(pool, "fp32")
    with pytest.raises(PinError, match="pinned already"):
        nc.pin(pool, "bf16")
    with pytest.raises(PolicyError, match="a module has no such action"):
        nc.Rule("module.call", "promote")


def test_the_ledger_lists_what_a_boundary_casts():
    """With the module's path, the argument's name and the rule, and the gradient's cast."""
    model = detector()
    nc.pin(model.pool, "fp32", keep=("rois",), out="input")
    with nc.record() as ledger, nc.autocast("cpu"):
        model(IMAGE, ROIS).sum().backward()
    casts = [(c.argument, c.src, c.dst, c.module_path) for c in ledger.casts if c.op == "module.call.default"]
    assert casts[:2] == [("x", "bf16", "fp32", "pool"), ("result", "fp32", "bf16", "pool")]
    assert {c.direction for c in ledger.casts if c.op == "module.call.default"} == {"forward", "backward"}
    assert sum(t.calls for k, t in ledger.calls.items() if k.op == "module.call.default") == 1


@nc.pin(format="fp32", keep=("boxes",), out="input")
def pinned_sum(x, boxes):
    """A function that scripts call."""
    return x * 3 + boxes.sum()


def calls_pinned(x, boxes):
    """Calls it."""
    return pinned_sum(x, boxes) * 2


class Twice(torch.nn.Module):
    """Two results, and a submodule."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)

    def forward(self, x):
        y = self.inner(x)
        return y, y.sum()


class Outer(torch.nn.Module):
    """Calls it."""

    def __init__(self):
        super().__init__()
        self.twice = Twice()

    def forward(self, x):
        y, total = self.twice(x)
        return y * 2, total


class Lists(torch.nn.Module):
    """Returns a list."""

    def forward(self, x):
        return [x, x]


class OfLists(torch.nn.Module):
    """Calls it."""

    def __init__(self):
        super().__init__()
        self.lists = Lists()

    def forward(self, x):
        return self.lists(x)[0]


@pytest.mark.parametrize("dtype", [BF, HF, FP, DP])
def test_scripts_of_pinned_functions(dtype):
    """Called in a script, or scripted themselves; inside a region and outside."""
    x, boxes = torch.randn(3).to(dtype), torch.randn(2)
    for function in (pinned_sum, calls_pinned):
        scripted = nc.script(function)
        assert same(scripted(x, boxes), function(x, boxes))
        with nc.autocast("cpu"):
            assert same(scripted(x, boxes), function(x, boxes))


@pytest.mark.parametrize("part", ["", ".0", ".1"])
def test_scripts_of_pinned_modules(part):
    """In a low format, in a region of their own, with single results, and with gradients."""
    torch.manual_seed(0)
    x = torch.randn(2, 4)
    policy = nc.Policy.native().with_rules(
        nc.Rule("module.call", "to(fp16)", module="twice"),
        nc.Rule("module.call", "to(fp32)", module_class="Twice", argument=f"result{part}"),
    )
    model = Outer()
    settings = {"under": policy}
    with nc.autocast("cpu", policy=policy):
        expected = model(x)
    expected[0].float().sum().backward()
    gradient, model.twice.inner.weight.grad = model.twice.inner.weight.grad, None
    scripted = nc.script(model, **settings)
    found = scripted(x)
    assert all(map(same, found, expected))
    found[0].float().sum().backward()
    assert torch.equal(model.twice.inner.weight.grad, gradient)
    with pytest.warns((DeprecationWarning, FutureWarning)):
        plain = torch.jit.script(model)
    assert all(map(same, nc.script(plain, **settings)(x), expected))
    stream = io.BytesIO()
    torch.jit.save(scripted, stream)
    stream.seek(0)
    assert all(map(same, torch.jit.load(stream)(x), expected))


def test_scripts_of_modules_in_regions_of_their_own():
    """`nc.autocast(...)(module)` holds in scripts, around the module's own pins and rules."""
    torch.manual_seed(0)
    model, x = Outer(), torch.randn(2, 4)
    nc.autocast("cpu", dtype=HF)(model.twice)
    expected = model(x)
    assert expected[0].dtype is HF
    assert all(map(same, nc.script(model)(x), expected))
    with nc.autocast("cpu", dtype=BF):
        assert all(map(same, nc.script(model)(x), model(x)))


def test_scripts_say_what_they_cannot_cast():
    """Results in a list, with the line of the call."""
    policy = nc.Policy.native().with_rules(nc.Rule("module.call", "to(fp32)", module="lists", argument="result"))
    with pytest.raises(ScriptError, match="container") as caught:
        nc.script(OfLists(), under=nc.autocast("cpu", policy=policy))
    assert "test_pins.py" in str(caught.value) or caught.value.where == ()


class Scaled(torch.nn.Module):
    """Its pooling's result is what it gives: nothing casts that again."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.pool = torch.nn.Softplus()

    def forward(self, x):
        return self.pool(self.linear(x)) + 1


@pytest.mark.parametrize("front_end", ["compile", "export"])
def test_graphs_say_what_was_cast_at_boundaries(front_end, fresh_dynamo):
    """As eager code does, and by the same paths."""
    policy = nc.Policy.native().with_rules(
        nc.Rule("module.call", "full", module="pool", reason="must be exact"),
        nc.Rule("module.call", "to(fp16)", module="pool", argument="result"),
    )
    model, x = Scaled(), torch.randn(2, 4)
    ledgers = [nc.explain(model, (x,), under=policy, front_end=end).ledger for end in ("eager", front_end)]
    found = [[(c.argument, c.src, c.dst, c.module_path, c.action) for c in ledger.casts] for ledger in ledgers]
    assert found[0] == found[1] and ("x", "bf16", "fp32", "pool", "full") not in found[0]
    assert ("input", "bf16", "fp32", "pool", "full") in found[0]
    assert ("result", "fp32", "fp16", "pool", "to(fp16)") in found[0]
    with nc.autocast("cpu", policy=policy):
        expected = model(x)
    assert expected.dtype is HF
    assert same(nc.export(model, (x,), under=policy).module()(x), expected)
    assert nc.explain(model, (x,), under=policy, front_end=front_end).differences == ()


def test_a_module_whose_weights_are_low_says_what_a_pin_does_not_cast():
    """Torch's own error, with a note; none where weights are in fp32, or for another error."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)).bfloat16()
    nc.pin(model[1], "fp32")
    with pytest.raises(RuntimeError) as caught:
        model(torch.randn(2, 4).bfloat16())
    (note,) = caught.value.__notes__
    assert "weight is in bf16" in note and ".float()" in note
    model[1].float()
    assert model(torch.randn(2, 4).bfloat16()).dtype is torch.float32
    with pytest.raises(RuntimeError) as caught:
        model[1](torch.randn(2, 5))
    assert not getattr(caught.value, "__notes__", ())
