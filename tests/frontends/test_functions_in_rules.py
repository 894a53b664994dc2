"""Rules about functions, in every front end; and rules that hold nowhere, or cannot be kept."""

import warnings

import pytest
import torch
from torch import nn

import narrowcast as nc
from narrowcast.errors import RefusedError

applied = lambda layer, x: layer(x)


def chosen(layer, x):
    return (lambda y: layer(y))(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(5)])

    def forward(self, x):
        by_lambda = applied(self.layers[0], x)
        inside = chosen(self.layers[1], x)
        listed = tuple(layer(x) for layer in self.layers[2:4])
        return by_lambda, inside, *listed, self.layers[4](x)


FORMS = {
    "compile": lambda model, x, policy: nc.compile(model, under=policy, backend="aot_eager"),
    "export": lambda model, x, policy: nc.export(model, (x,), under=policy).module(),
    "trace": lambda model, x, policy: nc.trace(model, (x,), under=policy),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "function", ["*<lambda>", "*chosen*", "*chosen.<locals>.<lambda>", "*<genexpr>", "*Model.forward"]
)
def test_lambdas_and_generators_have_the_names_of_eager_code(function, form, fresh_dynamo):
    """Which `forward` around them has, as well."""
    policy = nc.Policy.native().with_rules(nc.Rule("aten.linear", "full", function=function))
    model, x = Model(), torch.randn(2, 4)
    with nc.autocast("cpu", policy=policy):
        expected = [y.dtype for y in model(x)]
    assert torch.float32 in expected
    assert [y.dtype for y in FORMS[form](model, x, policy)(x)] == expected


ONCE = {
    "script": lambda model, x, under: nc.script(model, under=under),
    "trace": lambda model, x, under: nc.trace(model, (x,), under=under),
    "export": lambda model, x, under: nc.export(model, (x,), under=under),
}


@pytest.mark.parametrize("form", ONCE)
@pytest.mark.parametrize("where", [{"module": "nope"}, {"module_class": "Nope"}, {"function": "*nope"}], ids=str)
def test_what_sees_all_calls_at_once_warns_of_rules_that_name_none(where, form):
    """Modules, classes and functions, once for a policy of a name; of those that are there nothing is said."""
    model, x, seen = nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4), []
    there = nc.Rule("aten.*", "full", module="0", module_class="Linear")
    for rules in ([there], [there, nc.Rule("aten.linear", "full", **where)]):
        policy = nc.Policy.native().with_rules(rules, name=f"{form} {where}")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ONCE[form](model, x, policy)
        seen.append(sum("matches nothing here" in str(w.message) for w in caught))
    assert seen == [0, 1]


def test_a_region_warns_of_a_function_that_it_never_met_once_it_shows_nothing_new():
    """It may be called later."""
    model, policy = Model(), nc.Policy.native().with_rules(nc.Rule("aten.linear", "full", function="*nope"))
    for number in range(3):
        with warnings.catch_warnings(record=True) as caught, nc.autocast("cpu", policy=policy):
            warnings.simplefilter("always")
            model(torch.randn(2, 4))
        with warnings.catch_warnings(record=True) as at_exit:
            warnings.simplefilter("always")
            with nc.autocast("cpu", policy=policy):
                model(torch.randn(2, 4))
        told = [w for w in (*caught, *at_exit) if "matches nothing here" in str(w.message)]
        assert len(told) == (number == 0)


def test_what_a_policy_refuses_is_refused_as_such_by_compiled_code(fresh_dynamo):
    """Dynamo meets it while it traces, and has an error of its own."""
    policy = nc.Policy.native().with_rules(nc.Rule("aten.softmax", "refuse", reason="logits only"))
    compiled = nc.compile(nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1)), under=policy, backend="aot_eager")
    with pytest.raises(RefusedError, match="logits only"):
        compiled(torch.randn(2, 4))


def test_a_rule_about_one_of_the_tensors_in_a_list_is_refused_in_a_script():
    """It was about all of them there."""

    class Split(nn.Module):
        def forward(self, x):
            first, second = x.split(2, 1)
            return first, second

    policy = nc.Policy.native().with_rules(nc.Rule("aten.split.Tensor", "to(fp64)", argument="result.1"))
    with pytest.raises(RefusedError, match="returns a list"):
        nc.script(Split(), under=policy)
