"""What looking leaves alone: operands that share memory, variables of the functions that call, models not yet made."""

import gc
import math
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import narrowcast as nc
from narrowcast.errors import RunError


class Doubled(nn.Module):
    """A layer, and a step that writes to what it reads."""

    def __init__(self, step):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.step = nn.Linear(16, 16), step

    def forward(self, x):
        y = self.layer(x)
        return self.step(y if self.step is not exponent_of_itself else y.detach())


def squared_in_place(y):
    return y.mul_(y)


def added_to_itself(y):
    y += y
    return y


def exponent_of_itself(y):
    return torch.exp(y, out=y)


def halves_added(y):
    y[:, :8].add_(y[:, 8:])
    return y


@pytest.mark.parametrize("step", [squared_in_place, added_to_itself, exponent_of_itself, halves_added])
def test_a_kernel_is_judged_on_what_it_read_though_it_wrote_there(step):
    """The same tensor twice, or as `out`, or two parts of one memory."""
    found = nc.compare(Doubled(step), torch.randn(8, 16), under="bf16")
    assert found.verdict == "round-off" and not found.faults, str(found)


def test_a_finding_shows_what_was_read_and_no_rule_about_what_is_written():
    """3e4 squared overflows; the tensor is in fp16, and no rule casts it."""
    x = torch.full((4,), 3e4, dtype=torch.float16)
    with nc.watch() as watched, nc.autocast("cpu", torch.float16):
        x.mul_(x)
    first = watched.first
    assert first.made_by == "format" and first.rules == () and "returns a new tensor" in first.advice
    assert {name: facts.high for name, facts in first.inputs} == {"self": 3e4, "other": 3e4}


class Big:
    """An object that has nothing to do with a model."""


def compared(model, x):
    nc.compare(model, x, under="bf16")


def watched_checkpoint(model, x):
    with nc.watch(), nc.autocast("cpu", torch.bfloat16):
        checkpoint(model, x.requires_grad_(), use_reentrant=False).sum().backward()


def raising(model, x):
    model[0].bfloat16()
    with pytest.raises(RuntimeError), nc.watch(), nc.autocast("cpu", torch.bfloat16):
        torch.zeros(3, 4).index_copy_(0, torch.arange(3), model[0](x))


@pytest.mark.parametrize("look", [compared, watched_checkpoint, raising])
def test_a_variable_of_the_caller_dies_when_it_is_deleted(look):
    """Until Python 3.13 a frame keeps all its variables once somebody asks for one of them."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(3, 4)
    big = Big()
    alive = weakref.ref(big)
    look(model, x)
    del big
    gc.collect()
    assert alive() is None


def test_what_a_caller_keeps_of_its_variables_is_left_to_it():
    """`locals()` is the same dict as the frame's."""
    kept = locals()
    model = nn.Linear(4, 4)
    kept["own"] = 1
    nc.compare(model, torch.randn(3, 4), under="bf16")
    assert kept["own"] == 1


def test_calls_of_an_exported_program_have_the_formats_in_which_a_region_computes_them():
    """Its kernels cast, and it has no casts of its own."""
    x = torch.randn(6, 16)
    program = torch.export.export(nn.Sequential(nn.Linear(16, 8), nn.Tanh()), (x,)).module()
    run = nc.capture(program, x, under="bf16")
    assert {call.id.op: call.computes for call in run.calls} == dict.fromkeys(
        ("aten.linear.default", "aten.tanh.default"), "bf16"
    )
    assert nc.compare(program, x, under="bf16").verdict == "round-off"


class Masked(nn.Module):
    """Attention of which one row is masked as a whole, and its NaN replaced by zero."""

    def __init__(self, is_replaced=True):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.is_replaced = nn.Linear(16, 48), is_replaced

    def forward(self, x, mask):
        q, k, v = self.layer(x).chunk(3, -1)
        weights = (q @ k.mT / 4).masked_fill(~mask[:, None], -math.inf).softmax(-1)
        return (torch.nan_to_num(weights, 0.0) if self.is_replaced else weights) @ v.to(weights.dtype)


@pytest.mark.parametrize(("is_replaced", "verdict"), [(True, "finite"), (False, "not finite")])
def test_a_row_that_is_masked_as_a_whole_is_no_fault_where_its_nan_is_replaced(is_replaced, verdict):
    """In the backward the formula of nan_to_num asks where the values are finite; the mask replaces them again."""
    mask = torch.rand(3, 8) > 0.4
    mask[1] = False
    with nc.watch() as watched:
        with nc.autocast("cpu", torch.bfloat16):
            y = Masked(is_replaced)(torch.randn(3, 8, 16), mask)
        y.float().square().mean().backward()
    assert watched.verdict == verdict, str(watched)


@pytest.mark.parametrize("is_function", [False, True])
@pytest.mark.parametrize("look", [nc.compare, nc.explain, nc.repair, nc.capture])
def test_a_model_that_is_not_initialized_is_refused_with_what_to_do(look, is_function):
    """Whatever runs it several times would change it: LazyLinear has no shape yet."""
    model, x = nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 2)), torch.randn(3, 4)
    with pytest.raises(RunError, match=r"2 parameters are not initialized yet: 0\.weight") as refused:
        look((lambda x: model(x)) if is_function else model, x, under="bf16")
    assert "model(*inputs)" in refused.value.advice
    model(x)
    look(model, x, under="bf16")


class Answering(nn.Module):
    """A class that answers for whatever it does not have, and compares as a tensor."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x):
        return self.layer(x)

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return lambda *args, **kwargs: None

    def __eq__(self, other):
        return torch.ones(2)

    __hash__ = nn.Module.__hash__


@pytest.mark.parametrize("look", [nc.explain, nc.repair, nc.capture])
def test_a_class_that_answers_for_what_it_lacks_is_looked_at_as_others(look):
    """It cannot be copied, as its copy is what its answer gives, and no compiler made it."""
    model, x = Answering(), torch.randn(3, 4)
    assert look(model, x, under="bf16").verdict in ("round-off", "explained", "nothing to repair", "captured", "finite")


def nested(depth):
    """Return a layer in so many containers."""
    model = nn.Linear(4, 4)
    for _ in range(depth):
        model = nn.Sequential(model)
    return model


def is_captured(depth):
    """Return whether Python's stack has room for a captured run of such a model."""
    try:
        nc.capture(nested(depth), torch.randn(2, 4), under="bf16")
    except RecursionError:
        return False
    return True


def test_models_are_repaired_as_deep_as_they_are_captured():
    """Names of modules are asked for where the stack is not deep yet; searching takes no room of the model's."""
    deepest = next(depth for depth in range(140, 20, -2) if is_captured(depth))
    assert nc.repair(nested(deepest - 2), torch.randn(2, 4), under="bf16").verdict == "nothing to repair"
