"""Rules of the user that match nothing are named, with the nearest name: in regions, recordings and explanations."""

import contextlib
import typing
import warnings

import pytest
import torch
from torch import nn

import narrowcast as nc

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.Linear(4, 4)

    def forward(self, x):
        return self.attention(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList([Layer(), Layer()])})

    def forward(self, x):
        for layer in self.encoder["layer"]:
            x = layer(x)
        return x


X = torch.randn(2, 4)


def policy_of(**conditions):
    conditions.setdefault("op", "aten.linear")
    return nc.Policy.native().with_rules(nc.Rule(action="full", **conditions), name="mine")


def eager(policy):
    with nc.autocast("cpu", torch.bfloat16, policy=policy):
        Model()(X)


FRONT_ENDS = {
    "eager": eager,
    "compile": lambda policy: nc.compile(Model(), under=policy, backend="aot_eager")(X),
}


def said(call):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
    return [str(w.message) for w in found if w.category is nc.errors.RegionWarning]


@pytest.mark.parametrize("front_end", ["eager", "compile"])
def test_a_region_names_a_module_that_is_not_there(front_end):
    """Once, with the nearest name; nothing where the rule holds."""
    policy = policy_of(module="encoder.layers.*")
    (text,) = said(lambda: FRONT_ENDS[front_end](policy))
    assert "no call was made in module \"encoder.layers.*\" (did you mean 'encoder.layer.*'?)" in text
    assert not said(lambda: FRONT_ENDS[front_end](policy))
    assert not said(lambda: FRONT_ENDS[front_end](policy_of(module="encoder.layer.*")))


def test_a_class_that_is_not_there():
    """The same of classes; and of rules about the calls of modules."""
    (text,) = said(lambda: eager(policy_of(module_class="Layers")))
    assert "did you mean 'Layer'?" in text
    (text,) = said(lambda: eager(policy_of(op="module.call", module="encoder.layers.0")))
    assert "did you mean" in text


def test_a_name_like_no_other_is_told_when_a_region_shows_nothing_new():
    """A second model may run in the next region of the policy."""
    policy = policy_of(module="decoder_of_another_model")
    assert not said(lambda: eager(policy))
    assert len(said(lambda: eager(policy))) == 1
    assert not said(lambda: eager(policy))


def test_recordings_list_every_rule_without_effect():
    """Also those about ops that never ran; none of the built-in ones."""
    policy = nc.Policy.safe().with_rules(
        nc.Rule("aten.linear", "full", module="encoder.layers.*"),
        nc.Rule("aten.gelu", "full"),
        nc.Rule("aten.linear", "lower", module="encoder.layer.0"),
        name="mine",
    )
    with nc.record() as ledger, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        eager(policy)
    found = [advice.what for advice in ledger.advice if advice.kind == "rule without effect"]
    assert len(found) == 2
    assert "did you mean 'encoder.layer.*'?" in found[0] and "no call of aten.gelu ran" in found[1]


@pytest.mark.filterwarnings("ignore::narrowcast.errors.RegionWarning")
def test_explanations_list_built_in_rules_only_where_they_hold():
    """Of a built-in policy those that matched; of the user's all."""
    rows = nc.explain(Model(), (X,), under="safe").rules
    assert all(row.calls for row in rows)
    rows = nc.explain(Model(), (X,), under=policy_of(module="nowhere")).rules
    assert [row.calls for row in rows] == [0]


class TestTransforms:
    """torch.func takes composite ops apart before a region sees them."""

    @staticmethod
    def warned(function):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            function()
        return [str(one.message) for one in caught if "does not hold inside of torch.func" in str(one.message)]

    @staticmethod
    def region(policy):
        return nc.autocast("cpu", torch.bfloat16, policy=policy)

    TRANSFORMS: typing.ClassVar = {
        "vmap": lambda f, x: torch.vmap(f)(x),
        "grad": lambda f, x: torch.func.grad(lambda t: f(t).float().sum())(x),
        "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
        "functionalize": lambda f, x: torch.func.functionalize(f)(x),
    }

    @pytest.mark.parametrize("name", TRANSFORMS)
    @pytest.mark.parametrize("is_inside", [False, True])
    def test_a_rule_about_a_composite_op_is_said_not_to_hold(self, name, is_inside):
        """It was dropped without a word; the region is around the transform, or inside of it."""
        layer, x = torch.nn.Linear(8, 8), torch.randn(3, 4, 8)
        policy = nc.Policy.native().with_rules(nc.Rule("aten.linear", "full"))

        def inside(t):
            with self.region(policy):
                return layer(t)

        def run():
            with contextlib.nullcontext() if is_inside else self.region(policy):
                self.TRANSFORMS[name](inside if is_inside else layer, x)

        said = self.warned(run)
        assert said and "the rule aten.linear: full" in said[0], said

    @pytest.mark.parametrize("policy", ["native", "safe", "gelu"])
    def test_other_rules_and_those_of_this_library_are_not(self, policy):
        """A rule about an op with kernels of its own holds there."""
        layer, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()), torch.randn(3, 4, 8)
        rule = nc.Rule("aten.gelu", "full")
        chosen = nc.Policy.native().with_rules(rule) if policy == "gelu" else policy

        def run():
            with self.region(chosen):
                results.append(torch.vmap(layer)(x))

        results = []
        assert not self.warned(run) and len(results) == 1


class Holder(nn.Module):
    """Calls a part, and a layer of its own."""

    def __init__(self, part):
        super().__init__()
        self.first, self.part = nn.Linear(4, 4), part

    def forward(self, x):
        return self.part(self.first(x))


class TestPartsThatAreScripts:
    """What a part of a model was is gone where it is a script or trace already."""

    PARTS: typing.ClassVar = {
        "nc.script": nc.script,
        "nc.trace": lambda model: nc.trace(model, (X,)),
        "torch.jit.trace": lambda model: torch.jit.trace(model, X),
    }

    @staticmethod
    def warned(target, policy):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            nc.script(target, under=policy)
        return [str(one.message) for one in caught if "is a script or trace already" in str(one.message)]

    @pytest.mark.parametrize("name", PARTS)
    @pytest.mark.parametrize("about", [{"module": "part.*"}, {"module": "part.0"}, {"module_class": "Linear"}])
    def test_a_rule_about_a_module_inside_is_said_not_to_hold(self, name, about):
        """It was dropped without a word."""
        part = self.PARTS[name](nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
        (text,) = self.warned(Holder(part), policy_of(**about))
        assert "part is a script" in text and "(part.0)" in text and "the module that it was made of" in text

    @pytest.mark.parametrize("name", PARTS)
    def test_nothing_is_said_of_a_rule_about_the_part_or_beside_it(self, name):
        """These hold."""
        part = self.PARTS[name](nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
        assert not self.warned(Holder(part), policy_of(module="part"))
        assert not self.warned(Holder(part), policy_of(module="first"))

    def test_a_script_that_is_cast_again(self):
        """A rule about what it was made of; what torch scripted says it, and the rule holds."""
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        assert len(self.warned(nc.script(model), policy_of(module="0"))) == 1
        assert not self.warned(torch.jit.script(model), policy_of(module="0"))
        assert nc.script(torch.jit.script(model), under=policy_of(module="0"))(X).dtype is torch.float32


class Crossed(nn.Module):
    """Multiplies what an op makes by calls inside of it."""

    def forward(self, x):
        return torch.mm(torch.kron(x, x), x.new_ones(4, 4)), x * 2


def test_a_trace_names_a_rule_that_it_drops_inside_of_an_op():
    """It recorded formats that the op does not give then, and raised when it ran."""
    policy = nc.Policy.native().with_rules([nc.Rule("aten.mul", "to(fp16)")])
    x = torch.randn(2, 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trace = nc.trace(Crossed(), (x,), under=policy)
    told = [str(one.message) for one in caught if "does not hold in it" in str(one.message)]
    assert len(told) == 1 and "aten.mul.Tensor" in told[0] and "aten.mul: to(fp16)" in told[0]
    product, twice = trace(x)
    assert twice.dtype is torch.float16  # where it is an op of its own it holds
    with nc.autocast("cpu", torch.bfloat16):
        assert torch.equal(product, Crossed()(x)[0])
