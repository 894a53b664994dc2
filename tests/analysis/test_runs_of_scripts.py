"""TorchScript modules and functions, captured and compared: in which formats they ran is told, and nothing is left."""

import copy

import pytest
import torch
from torch import nn

import narrowcast as nc

FP32 = nc.Policy("fp32", extends=())


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def x():
    return torch.randn(4, 16)


class Remembers(nn.Module):
    """Keeps a tensor that it sets, one that it writes to, a list and a number."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.state, self.total, self.past, self.calls = torch.zeros(4, 16), torch.zeros(4, 16), [torch.zeros(1)], 0

    def forward(self, x):
        self.state = torch.tanh(self.linear(x) + self.state)
        self.total.add_(self.state)
        self.past = [self.state]
        self.calls += 1
        return self.state + self.total + self.past[0] * self.calls


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Remembers()

    def forward(self, x):
        return self.inner(x)


def frozen():
    return torch.jit.freeze(torch.jit.script(Outer()).eval())


MAKE = {
    "module": lambda: torch.jit.script(Remembers()),
    "nested": lambda: torch.jit.script(Outer()),
    "frozen": frozen,
    "inside": lambda: nn.Sequential(torch.jit.script(Remembers())),
    "explicit": lambda: nc.script(torch.jit.script(Remembers()), under="bf16"),
}


@pytest.mark.parametrize("kind", MAKE)
def test_a_script_that_remembers_begins_each_run_as_it_was(kind, x):
    """Tensors, lists and counters that a script writes are restored, so a later call gives what the first gave."""
    script = MAKE[kind]()
    first = copy.deepcopy(script)(x)
    dtype = None if kind == "explicit" else "bf16"
    for model in (script, lambda x: script(x)):
        assert nc.compare(model, (x,), under=dtype).verdict in ("round-off", "exact", "not compared")
    nc.capture(script, (x,))
    assert torch.equal(script(x), first)


def test_without_a_region_a_script_is_cast_nowhere(x):
    """Compared in fp32, it equals itself and the module that it was made from exactly, in either order."""
    linear = nn.Linear(16, 4)
    script = torch.jit.script(linear)
    for model, reference in ((script, "fp32"), (script, linear), (linear, script)):
        found = nc.compare(model, (x,), reference=reference)
        assert found.verdict == "exact" and not found.outputs[0].relative_error, found


def test_a_converted_script_is_compared_with_its_original_in_fp32(x):
    """The error of bf16 shows at the output, and call by call if the reference is converted without rules."""
    script = torch.jit.script(nn.Linear(16, 4))
    converted = nc.script(script, under="bf16")
    found = nc.compare(converted, (x,), reference=script)
    assert found.verdict == "round-off" and found.outputs[0].relative_error > 1e-4, found
    by_call = nc.compare(converted, (x,), reference=nc.script(script, under=FP32))
    assert [row.computes for row in by_call.rows] == ["bf16"] and not by_call.unmatched, by_call


def test_a_script_function_is_in_fp32_in_the_reference(x):
    """Only a region casts it: the comparison shows the error of bf16, and a plain capture has fp32 calls alone."""

    @torch.jit.script
    def product(x: torch.Tensor):
        return torch.mm(x, x.t())

    found = nc.compare(product, (x,), under="bf16")
    assert found.verdict == "round-off" and found.outputs[0].relative_error > 1e-4, found
    assert not {call.computes for call in nc.capture(product, (x,)).calls} - {"fp32"}


@pytest.mark.parametrize("reference", ["fp32", "fp64"])
def test_gradients_of_a_script_in_a_model_are_compared(reference, x):
    """The scripted layer's parameters go by their names in the model, and afterwards it has no gradient."""
    script = torch.jit.script(nn.Linear(16, 8))
    model = nn.Sequential(script, nn.Linear(8, 4))
    found = nc.compare(model, (x,), under="bf16", reference=reference, backward=True)
    assert [g.parameter for g in found.gradients] == ["0.weight", "0.bias", "1.weight", "1.bias"], found
    assert script.weight.grad is None and script.weight.dtype is torch.float32


def test_a_script_runs_in_fp64_with_what_it_remembers_and_what_does_not_is_said(x):
    """Its state returns to fp32 afterwards; a frozen script cannot be converted, and the error gives its line."""
    script = torch.jit.script(Remembers())
    found = nc.compare(script, (x,), under="bf16", reference="fp64")
    assert found.outputs[0].reference.startswith("fp64") and found.verdict == "round-off", found
    assert script.state.dtype is torch.float32
    with pytest.raises(nc.errors.RunError, match=r"does not run in fp64: a script raised at 'return F.linear"):
        nc.compare(torch.jit.freeze(torch.jit.script(nn.Linear(16, 4)).eval()), (x,), under="bf16", reference="fp64")


def test_where_torchscript_casts_itself_it_is_said_how_to_see_its_calls(x):
    """The report suggests `nc.script` and still fits 25 lines."""

    class Attending(nn.Module):
        def forward(self, x: torch.Tensor):
            return torch.nn.functional.scaled_dot_product_attention(x[None], x[None], x[None])

    found = nc.compare(torch.jit.script(Attending()), (x,), under="bf16")
    text = str(found)
    makes_the_same_calls = not found.unmatched  # since torch 2.14
    assert ("nc.script(script, under=...)" in " ".join(text.split())) is not makes_the_same_calls, text
    assert len(text.splitlines()) <= 25, text


@pytest.mark.parametrize("look", [nc.capture, nc.record, nc.watch], ids=["capture", "record", "watch"])
def test_a_trace_that_counts_its_batches_is_observed_in_each_call(look):
    """From the second call on TorchScript's optimizer compares constants, which modes are given as numbers."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    x = torch.randn(4, 3, 8, 8)
    traced = torch.jit.trace(copy.deepcopy(model), x, check_trace=False)
    for _ in range(3):
        expected = model(x)
        with look():
            assert torch.equal(traced(x), expected)
    assert traced.state_dict()["1.num_batches_tracked"] == 4  # once when it was traced


class Counts(nn.Module):
    """A buffer that a forward writes to without gradients, which a trace does not record."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)
        self.register_buffer("mean", torch.ones(4))

    def forward(self, x):
        y = self.layer(x)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(y.float().mean(0), alpha=0.1)
        return y * 2


@pytest.mark.parametrize("trace", [lambda m, x: nc.trace(m, (x,), under="bf16"), lambda m, x: torch.jit.trace(m, (x,))])
def test_a_buffer_that_a_trace_writes_to_is_as_it_was(trace):
    """Its value, and that it requires no gradient: of the model, whose buffer it is, and of the trace."""
    model, x = Counts(), torch.randn(3, 4)
    traced = trace(model, x)
    before = model.mean.clone()
    for looks in (nc.compare, nc.capture, lambda *given: nc.compare(*given, reference=model)):
        looks(traced, (x,))
        nc.compare(model, (x,), under="bf16")
        assert torch.equal(model.mean, before) and not model.mean.requires_grad


class Attention(nn.Module):
    def __init__(self, scale):
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.mix, self.scale = nn.Linear(8, 24), nn.Conv1d(8, 8, 3, padding=1), scale

    def forward(self, x: torch.Tensor):
        q, k, v = self.qkv(x).chunk(3, -1)
        weights = torch.softmax(torch.matmul(q, k.transpose(-1, -2)) * self.scale, -1)
        return self.mix(torch.matmul(weights, v).transpose(1, 2))


def test_calls_of_a_script_are_compared_with_those_that_eager_code_has_for_them():
    """Linear and addmm, matmul and bmm, conv1d and convolution, one after the other."""
    x = torch.randn(2, 6, 8)
    sound = nc.compare(nc.script(Attention(0.35), under="bf16"), (x,), reference=Attention(0.35))
    assert sound.verdict == "round-off" and not sound.unmatched and len(sound.rows) == 6, sound
    wrong = nc.compare(nc.script(Attention(0.7), under="bf16"), (x,), reference=Attention(0.35))
    assert "its argument other is 0.7, 0.35 in the reference" in " ".join(str(wrong).split()), wrong
