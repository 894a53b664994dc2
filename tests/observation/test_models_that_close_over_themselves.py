"""Models whose hooks, patched forwards and other functions close over parts of them: a deep copy would call those."""

import functools
import types
import weakref

import pytest
import torch
from torch import nn

import narrowcast as nc
from narrowcast.observation.trial.own_parts import closes_over_itself

pytestmark = pytest.mark.filterwarnings("ignore::narrowcast.errors.RegionWarning")


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


class Hooked(nn.Module):
    """Collects what its layers give, by hooks that close over it."""

    def __init__(self):
        super().__init__()
        self.net, self.given = net(), []
        for layer in (self.net[0], self.net[2]):
            layer.register_forward_hook(lambda module, args, given: self.given.append(given))

    def forward(self, x):
        self.given.clear()
        self.net(x)
        return torch.cat(self.given, -1)


def patched():
    model = net()
    old, model.count = model.forward, 0

    def forward(x):
        model.count += 1
        return old(x * 2) / 2

    model.forward = forward
    return model


def with_a_list():
    """The hook closes over a list, which is an attribute as well."""
    model = net()
    given = model.given = []
    model[0].register_forward_hook(lambda module, args, result: given.append(result))
    old = types.MethodType(nn.Sequential.forward, model)
    model.forward = functools.partial(lambda model, x: old(x) + model.given.pop().sum(), model)
    return model


class Part(nn.Module):
    def __init__(self, whole):
        super().__init__()
        self.layer, self.whole = nn.Linear(6, 6), weakref.ref(whole)

    def forward(self, x):
        return self.layer(x) * self.whole().scale


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(6))
        self.part = Part(self)

    def forward(self, x):
        self.scale += 1
        return self.part(x)


class Probe:
    """Keeps what layers give, by a hook that closes over the object; the model holds that, and reads it."""

    def __init__(self, layer):
        self.given, self.calls = {}, 0

        def keep(module, args, result):
            self.given["first"] = result
            self.calls += 1

        layer.register_forward_hook(keep)


class Probed(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net()
        self.probe = Probe(self.net[0])

    def forward(self, x):
        return self.net(x) + self.probe.given["first"].float().square().mean()


MAKERS = [Hooked, patched, with_a_list, Whole, Probed]
X = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
VERBS = {
    "compare": lambda model: nc.compare(model, (X,), under="bf16", backward=True),
    "capture": lambda model: nc.capture(model, (X,), under="bf16"),
    "explain": lambda model: nc.explain(model, (X,), under="bf16"),
    "explain, run": lambda model: nc.explain(model, (X,), under="bf16", run=True),
    "repair": lambda model: nc.repair(model, (X,), under="bf16", budget=1e-6),
}


def state(model):
    held = {name: list(value) for module in model.modules() for name, value in vars(module).items() if name == "given"}
    probe = getattr(model, "probe", None)
    counts = getattr(model, "count", 0), probe and (probe.calls, list(probe.given))
    return held, counts, {name: b.clone() for name, b in model.named_buffers()}


def same(before, after):
    buffers = before[2].keys() == after[2].keys() and all(torch.equal(before[2][k], after[2][k]) for k in before[2])
    return before[:2] == after[:2] and buffers


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("make", MAKERS)
def test_it_runs_and_is_left_as_it_was(make, verb):
    """The model itself runs, so that its parts have their paths, and lists, counters and statistics are restored."""
    model = make()
    before = state(model)
    found = VERBS[verb](model)
    assert same(before, state(model))
    assert "<Linear>" not in found.to_text(every=True)


def test_rules_of_a_repair_hold_in_the_program():
    """What was run is the model, by the same paths."""
    model = patched().eval()
    x = X * 1e5
    expected = model(x)
    found = nc.repair(model, (x,), under="fp16")
    assert found.verdict == "repaired"
    with nc.autocast("cpu", torch.float16, policy=found.policy):
        assert torch.allclose(model(x).float(), expected, rtol=1e-2)


@pytest.mark.parametrize("run", [False, True])
def test_an_explanation_of_a_function_leaves_the_statistics_of_what_it_calls(run):
    """Batch norm counts its batches, also where runs are timed."""
    model = net().train()
    before = state(model)
    nc.explain(lambda x: model(x), (X,), under="bf16", run=run)
    assert same(before, state(model))


def test_a_model_is_copied_where_a_copy_calls_its_own_parts():
    """Methods, and partial functions of a model, follow the copy; functions of other things are everyone's."""
    other = net()
    copied = net()
    copied.forward = functools.partial(lambda model, x: nn.Sequential.forward(model, x), copied)
    copied[0].forward = types.MethodType(nn.Linear.forward, copied[0])
    copied[1].register_forward_hook(lambda module, args, given: given + other(X).sum())
    assert not closes_over_itself(copied)
    assert all(closes_over_itself(make()) for make in MAKERS)
    copied[1].register_forward_hook(lambda module, args, given, store=copied[2]: None)
    assert closes_over_itself(copied)
