"""Rules of the user that match nothing are named, with the nearest name: in regions, recordings and explanations."""

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
