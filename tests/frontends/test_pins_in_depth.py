"""Pins and rules about modules where other things meet them: compiled blocks, recomputation, nesting, scripts."""

import dataclasses
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import narrowcast as nc
from narrowcast.errors import PinError, ScriptError
from narrowcast.testing import assert_close_to

BF, HF, FP, DP = torch.bfloat16, torch.float16, torch.float32, torch.float64
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("fresh_dynamo")]
X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))


class Same(nn.Module):
    """Gives what it takes."""

    def forward(self, x):
        return x * 1


class Around(nn.Module):
    """Calls one."""

    def __init__(self):
        super().__init__()
        self.a = Same()

    def forward(self, x):
        return self.a(x)


class Blocks(nn.Module):
    """Like blocks in a list, compiled one by one or together."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Around(), Around(), Around()])

    def forward(self, x):
        return [block(x).dtype for block in self.blocks]


def policy(*rules):
    """Native with these rules."""
    return nc.Policy.native().with_rules(rules)


def same(a, b):
    """Equal in dtype and bits."""
    return a.dtype is b.dtype and torch.equal(a, b)


@pytest.mark.parametrize("compiler", [torch.compile, nc.compile])
@pytest.mark.parametrize("pinned", ["a", "a.a", "class", "base"])
def test_compiled_code_notices_every_pin(compiler, pinned):
    """Set and undone after it was compiled; and what has nothing to do with the pin of a module is kept."""
    nc.unpin(nc.pin(Same(), "bf16"))  # the first of a process makes Dynamo forget all
    model, other, graphs = Around(), Around(), []
    model.a = Around()

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    apart = torch.compile(lambda x: other(x) + 1, backend=count)
    apart(X)
    compiled = compiler(model, backend="eager")
    target = {"class": Around, "base": Same}.get(pinned) or model.get_submodule(pinned)
    for format in (HF, BF):
        assert compiled(X).dtype is FP
        nc.pin(target, format)
        try:
            assert compiled(X).dtype is model(X).dtype is format
        finally:
            nc.unpin(target)
        assert compiled(X).dtype is FP
    apart(X)
    assert len(graphs) == (1 if target in list(model.modules()) else 2)


def test_compiled_code_is_not_shared_between_policies_about_modules():
    """They change no op; the identity that Dynamo guards on is written all the same."""
    model = nn.Sequential(Same())
    compiled = torch.compile(model, backend="aot_eager")
    for text, dtype in (("fp16", HF), ("fp64", DP), ("bf16", BF)):
        chosen = policy(nc.Rule("module.call", f"to({text})", module_class="*Same"))
        with nc.autocast("cpu", policy=chosen):
            assert compiled(X).dtype is dtype
        assert nc.compile(model, under=nc.autocast("cpu", policy=chosen), backend="aot_eager")(X).dtype is dtype
        assert compiled(X).dtype is FP


@pytest.mark.parametrize("regional", [False, True])
def test_compiled_blocks_that_are_alike_have_their_own_pins_and_paths(regional):
    """Dynamo shares code between them; it is guarded on the pin, and where paths matter on the module."""
    model = Blocks()
    nc.pin(model.blocks[1].a, out="fp16")
    nc.pin(model.blocks[2].a, out="fp64")
    if regional:
        for block in model.blocks:
            block.compile(backend="aot_eager")
    assert model(X) == [FP, HF, DP]
    model = Blocks()
    chosen = policy(nc.Rule("module.call", "to(fp16)", module="blocks.1.a", argument="result"))
    with nc.autocast("cpu", policy=chosen):
        expected = model(X)
        if regional:
            for block in model.blocks:
                block.compile(backend="aot_eager")
        assert model(X) == expected == [FP, HF, FP]


@pytest.mark.parametrize("reentrant", [True, False])
def test_rules_hold_in_recomputations(reentrant):
    """torch.utils.checkpoint knows nothing of them."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.linear = nn.Linear(64, 64)

        def forward(self, x):
            return torch.softmax(self.linear(x) * 20, -1)

    def gradient(call):
        model = Layer()
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1), requires_grad=True)
        with nc.autocast("cpu", policy=policy(nc.Rule("module.call", "to(fp32)", module_class="*Layer"))):
            y = call(model, x)
        (y * torch.arange(64.0)).sum().backward()
        return x.grad

    expected = gradient(lambda model, x: model(x))
    assert torch.equal(gradient(lambda model, x: checkpoint(model, x, use_reentrant=reentrant)), expected)


def test_the_innermost_region_of_a_device_type_rules():
    """Rules of an outer one hold in a region of another device type, and not where it is off or has another policy."""
    chosen = policy(nc.Rule("module.call", "to(fp16)", module_class="*Same"))
    with nc.autocast("cpu", policy=chosen):
        assert Same()(X).dtype is HF
        for inner in (nc.autocast("cpu", enabled=False), nc.autocast("cpu"), torch.autocast("cpu")):
            with inner:
                assert Same()(X).dtype is FP
        with nc.autocast("xpu"):
            assert Same()(X).dtype is HF
        assert nc.pin(Around(), "fp32")(X).dtype is FP  # autocasting is off in it, and so are rules


def test_exports_have_the_paths_of_eager_code():
    """Strict or not: what torch.export puts around the model adds nothing."""
    chosen = policy(nc.Rule("module.call", "to(fp64)", module="a"))
    for strict in (False, True):
        assert nc.export(Around(), (X,), under=chosen, strict=strict).module()(X).dtype is DP
    wrapped = nn.Module()
    wrapped.inner = torch.compile(Around(), backend="aot_eager")
    wrapped.forward = lambda x: wrapped.inner(x)
    with nc.autocast("cpu", policy=policy(nc.Rule("module.call", "to(fp64)", module="inner.a"))):
        assert wrapped(X).dtype is DP


def test_only_means_only():
    """Arguments without a name of their own, too."""

    class Open(nn.Module):
        def forward(self, x, *more, **options):
            return [x.dtype, *(t.dtype for t in more), *(t.dtype for t in options.values())]

    low = X.bfloat16()
    assert nc.pin(Open(), "fp32", only="x")(low, low, other=low) == [FP, BF, BF]
    assert nc.pin(Open(), "fp32", only=("x", "other"))(low, low, other=low) == [FP, BF, FP]


def test_what_a_module_writes_to_its_arguments_is_not_lost():
    """Where nothing is cast, the containers are the caller's own."""

    class Collects(nn.Module):
        def forward(self, x, found, cache):
            found.append(x)
            cache["x"] = x
            return x

    found, cache = [], {}
    nc.pin(Collects(), "fp32")(X.bfloat16(), found, cache)
    assert found[0].dtype is FP and cache["x"] is found[0]


@dataclasses.dataclass(frozen=True)
class Output:
    """As libraries write them now."""

    logits: torch.Tensor
    hidden: torch.Tensor


def test_parts_of_frozen_dataclasses():
    """They are replaced, not written to."""

    class Gives(nn.Module):
        def forward(self, x):
            return Output(x, x + 1)

    with nc.autocast("cpu", policy=policy(nc.Rule("module.call", "to(fp16)", argument="result.logits"))):
        found = Gives()(X)
    assert (type(found), found.logits.dtype, found.hidden.dtype) == (Output, HF, FP)


def test_a_forward_that_is_replaced_on_one_module():
    """Its arguments have its names; and nothing holds on to the module."""

    class Pair(nn.Module):
        def forward(self, x, rois):
            return x.dtype, rois.dtype

    low = X.bfloat16()
    nc.pin(Pair, "fp32", keep="rois")
    try:
        plain, other = Pair(), Pair()
        other.forward = lambda rois, x: (rois.dtype, x.dtype)
        assert plain(low, low) == (FP, BF) and other(low, low) == (BF, FP)
        gone = weakref.ref(other)
        del other
        gc.collect()
        assert gone() is None
    finally:
        nc.unpin(Pair)


def test_what_must_not_be_pinned():
    """Every module there is, a generator, an argument that is called result."""

    class Steps(nn.Module):
        def forward(self, x):
            yield x

    class Named(nn.Module):
        def forward(self, x, result):
            return x, result

    with pytest.raises(PinError, match="every module there is"):
        nc.pin(nn.Module, "fp32")
    with pytest.raises(PinError, match="is a generator"):
        nc.pin(Steps(), "fp32")
    with pytest.raises(PinError, match="means what is returned"):
        nc.pin(Named(), "fp32", keep="result")
    found = nc.pin(Named(), "fp32")(X.bfloat16(), X.bfloat16())
    assert [t.dtype for t in found] == [FP, FP]


def test_scripts_can_be_pinned():
    """By the arguments of their schema."""
    scripted = nc.pin(torch.jit.script(Around()), "fp64", out="input")
    assert scripted(X).dtype is FP and nc.unpin(scripted)(X).dtype is FP
    kept = nc.pin(torch.jit.script(Around()), "fp64", keep="x")
    assert kept(X).dtype is FP


def test_compiling_with_dynamic_shapes_around_a_pin():
    """A capture that fails in the middle of a region leaves none open."""

    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.norm = nn.Linear(4, 8), nn.LayerNorm(8)

        def forward(self, x):
            return self.norm(self.linear(x))

    model = Normed()
    nc.pin(model.norm, "fp32")
    with nc.autocast("cpu"):
        expected = model(X)
    compiled = nc.compile(model, under=nc.autocast("cpu", policy="native"), backend="aot_eager", dynamic=True)
    assert same(compiled(X), expected)


# -- scripts -----------------------------------------------------------------------------------------------------------


class TakesMask(nn.Module):
    """A mask that may be missing."""

    def forward(self, x, mask: torch.Tensor | None = None):
        return x if mask is None else x + mask


class CallsMasked(nn.Module):
    """With one that nobody knows."""

    def __init__(self):
        super().__init__()
        self.inner = TakesMask()

    def forward(self, x, mask: torch.Tensor | None = None):
        return self.inner(x, mask)


@nc.pin("fp64")
@nc.pin("fp32", out="fp16")
def pinned_twice(x):
    """In a script their order would be lost."""
    return x * 1


@nc.autocast("cpu", dtype=HF)
@nc.pin("fp32")
def pinned_in_a_region(x):
    """Likewise."""
    return torch.mm(x, x.t())


class PinnedMethod(nn.Module):
    """TorchScript reads below the decorator."""

    @nc.pin(format="fp16", only="x")
    def forward(self, x):
        return x * 1


def test_scripts_know_rules_about_single_arguments():
    """Without any about the call as a whole."""
    chosen = policy(nc.Rule("module.call", "to(fp16)", module_class="*Same", argument="x"))
    with nc.autocast("cpu", policy=chosen):
        expected = Around()(X)
    assert same(nc.script(Around(), under=nc.autocast("cpu", policy=chosen))(X), expected) and expected.dtype is HF


def test_scripts_combine_a_pin_with_rules():
    """The pin says what is cast, the rule what is given back."""
    model = Around()
    nc.pin(model.a, "fp32")
    chosen = policy(nc.Rule("module.call", "to(fp64)", module="a", argument="result"))
    with nc.autocast("cpu", policy=chosen):
        expected = model(X)
    assert same(nc.script(model, under=nc.autocast("cpu", policy=chosen))(X), expected) and expected.dtype is DP


def test_scripts_refuse_what_they_cannot_pin():
    """With the line."""
    model = CallsMasked()
    nc.pin(model.inner, "fp16")
    with pytest.raises(ScriptError, match="may be None"):
        nc.script(model)
    nc.unpin(model.inner)
    nc.pin(model.inner, "fp16", keep="mask")
    assert nc.script(model)(X).dtype is HF
    for function in (pinned_twice, pinned_in_a_region):
        with pytest.raises(ScriptError, match="another pin or a region") as caught:
            nc.script(function)
        assert "test_pins_in_depth.py" in str(caught.value)
    with pytest.raises(ScriptError, match="which is pinned"):
        nc.script(PinnedMethod())
    assert pinned_twice(X).dtype is HF and pinned_in_a_region(X).dtype is FP and PinnedMethod()(X).dtype is HF
    assert nc.unpin(nc.unpin(pinned_twice))(X).dtype is FP


def low_in_the_middle(kind="module"):
    """Return three layers, of which the second is pinned to a low format: itself, or its class."""
    torch.manual_seed(0)

    class Layer(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(8, 16), Layer(16, 16), nn.Linear(16, 2))
    nc.pin(model[1] if kind == "module" else Layer, "bf16", out="fp32")
    return model


@pytest.mark.parametrize("kind", ["module", "class"])
def test_a_low_pin_holds_where_a_policy_casts_nothing(kind):
    """Weights follow the inputs that the pin casts, as they do in no region, in every front end; and where we look."""
    model, x, nothing = low_in_the_middle(kind), torch.randn(4, 8), nc.Policy("nothing", extends=())
    expected = model(x)
    with nc.autocast("cpu", policy=nothing):
        same(model(x), expected)
    same(nc.compile(model, under=nothing, backend="aot_eager")(x), expected)
    same(nc.export(model, (x,), under=nothing).module()(x), expected)
    if kind == "module":
        same(nc.script(model, under=nothing)(x), expected)
    run = nc.capture(model, (x,))
    assert [call.computes for call in run.calls if not call.is_cast] == ["fp32", "bf16", "fp32"]
    same(model(x), expected)


@pytest.mark.parametrize("kind", ["module", "class"])
def test_a_reference_in_fp32_has_no_low_pin(kind):
    """It is fp32 throughout, and the pin's call is one that rounds; afterwards the pin is there again."""
    model, x = low_in_the_middle(kind), torch.randn(4, 8)
    found = nc.compare(model, (x,), under=nc.Policy("nothing", extends=()))
    row = next(row for row in found.rows if row.id.module_path == "1")
    assert (row.computes, row.reference, found.verdict) == ("bf16", "fp32", "round-off") and row.local, str(found)
    assert nc.explain(model, (x,), under="bf16", run=True).verdict == "round-off"
    assert float(assert_close_to(model, (x,), budget=0.1, under="bf16")[0].relative_error) > 0
    assert [c.computes for c in nc.capture(model, (x,)).calls if not c.is_cast] == ["fp32", "bf16", "fp32"]


class Twice(nn.Module):
    """Calls a part twice that hands its input on beside its result."""

    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return self.linear(x), x

    def __init__(self):
        super().__init__()
        self.before, self.part = nn.Linear(4, 4), Twice.Part()

    def forward(self, x):
        hidden = self.before(x)
        return *self.part(hidden), *self.part(hidden)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_two_results_that_are_cast_there_and_back_are_two_tensors(backend):
    """They were one in compiled code: what was written to one changed the other, and gradients added up elsewhere."""
    torch.manual_seed(0)
    model, chosen = Twice(), policy(nc.Rule("module.call", "inside", module="part"))

    def gradient(call):
        model.zero_grad()
        results = call(X)
        sum(result.float().sin().sum() for result in results).backward()
        return results, model.before.weight.grad.clone()

    def eager(x):
        with nc.autocast("cpu", policy=chosen):
            return model(x)

    (expected, first), (found, second) = gradient(eager), gradient(nc.compile(model, under=chosen, backend=backend))
    assert all(map(same, expected, found))
    if backend == "aot_eager":  # Inductor's sums have an order of their own
        assert same(first, second)
    assert len({result.untyped_storage().data_ptr() for result in found}) == 4
