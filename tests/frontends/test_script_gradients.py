"""Weights in scripts that are cast where no gradient is recorded, and where one is: a cast belongs to its grad mode."""

import pytest
import torch
from torch import Tensor, nn

import narrowcast as nc

pytestmark = pytest.mark.filterwarnings("ignore")
BF16 = torch.bfloat16


class Base(nn.Module):
    """A weight that is cast, and one that is not."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.w, self.v = nn.Parameter(torch.randn(4, 4) / 2), nn.Parameter(torch.randn(4))


class FirstWithout(Base):
    def forward(self, x: Tensor, flag: bool, n: int):
        with torch.no_grad():
            a = torch.mm(x, self.w)
        return a + torch.mm(x, self.w) + self.v


class FirstWith(Base):
    def forward(self, x: Tensor, flag: bool, n: int):
        a = torch.mm(x, self.w)
        with torch.no_grad():
            b = torch.mm(x, self.w)
        return a + b + self.v


class InALoop(Base):
    def forward(self, x: Tensor, flag: bool, n: int):
        for _ in range(n):
            with torch.no_grad():
                a = torch.mm(x, self.w)
            x = torch.mm(x, self.w) + a + self.v
        return x


class LoopWithout(Base):
    def forward(self, x: Tensor, flag: bool, n: int):
        with torch.no_grad():
            for _ in range(n):
                x = torch.mm(x, self.w)
        return torch.mm(x, self.w) + self.v


class Chosen(Base):
    def forward(self, x: Tensor, flag: bool, n: int):
        torch.set_grad_enabled(flag)
        a = torch.mm(x, self.w)
        torch.set_grad_enabled(True)
        return a + torch.mm(x, self.w) + self.v


class ChosenInABranch(Base):
    def forward(self, x: Tensor, flag: bool, n: int):
        if flag:
            torch.set_grad_enabled(False)
        a = torch.mm(x, self.w)
        torch.set_grad_enabled(True)
        return a + torch.mm(x, self.w) + self.v


class ChosenInALoop(Base):
    def forward(self, x: Tensor, flag: bool, n: int):
        a = x
        for i in range(n):
            a = torch.mm(x, self.w)
            torch.set_grad_enabled(i == n - 2)
        torch.set_grad_enabled(True)
        return a + torch.mm(x, self.w) + self.v


class WithInside(Base):
    def forward(self, x: Tensor, flag: bool, n: int):
        with torch.no_grad():
            a = torch.mm(x, self.w)
            torch.set_grad_enabled(True)
            b = torch.mm(x, self.w)
            torch.set_grad_enabled(False)
            c = torch.mm(x, self.w)
        return a + b + c + self.v


PROGRAMS = [FirstWithout, FirstWith, InALoop, LoopWithout, Chosen, ChosenInABranch, ChosenInALoop, WithInside]


def run(call, module, flag, n):
    """The result, and the gradients of the weights and of what comes in."""
    torch.manual_seed(1)
    x = torch.randn(3, 4, requires_grad=True)
    y = call(x, flag, n)
    y.float().square().sum().backward()
    found = [y, x.grad, *(p.grad for p in module.parameters())]
    module.zero_grad()
    return found


@pytest.mark.parametrize("kind", PROGRAMS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("form", ["script", "convert", "called in a region"])
@pytest.mark.parametrize("cached", [True, False], ids=["cached", "uncached"])
def test_a_weight_keeps_its_gradient(kind, form, cached):
    """Wherever it is cast first. A weight's gradients may add up in another order where the mode is not known."""
    module = kind()
    region = nc.autocast("cpu", BF16, cache_enabled=cached)
    if form == "called in a region":
        made = nc.script(module)
    else:
        plain = module if form == "script" else torch.jit.script(module)
        made = nc.script(plain, under=region)

    def inside(call):
        def called(*args):
            with region:
                return call(*args)

        return called

    for flag in (True, False):
        expected = run(inside(module), module, flag, 3)
        found = run(inside(made) if form == "called in a region" else made, made, flag, 3)
        for name, a, b in zip(("y", "x", *dict(module.named_parameters())), expected, found, strict=True):
            assert (a is None) == (b is None), name
            if a is None:
                continue
            assert a.dtype is b.dtype, name
            exact = name != "w" or not cached or kind not in (Chosen, ChosenInABranch, ChosenInALoop)
            assert torch.equal(a, b) if exact else torch.allclose(a, b, rtol=2**-6, atol=2**-6), (name, a, b)


class LeavesEarly(Base):
    def forward(self, x: Tensor, flag: bool, n: int):
        with torch.no_grad():
            a = torch.mm(x, self.w)
            for i in range(n):
                if i == 1:
                    break
                a = torch.mm(a, self.w)
        with torch.no_grad():
            if flag:
                return torch.mm(x, self.w) + self.v, a
        return torch.mm(x, self.w) + self.v, a


@pytest.mark.parametrize("form", ["script", "called in a region"])
def test_what_leaves_a_part_without_gradients_early(form):
    """`return` and `break` inside `with torch.no_grad()`: the mode is as before after it."""
    module = LeavesEarly()
    made = nc.script(module, under=BF16) if form == "script" else nc.script(module)
    x = torch.randn(3, 4)
    for flag in (True, False):
        with nc.autocast("cpu", BF16):
            expected = module(x, flag, 3)
            found = made(x, flag, 3)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert [t.requires_grad for t in found] == [t.requires_grad for t in expected] == [not flag, False]
        assert torch.is_grad_enabled()


def test_a_context_manager_that_cannot_be_left_early_is_named():
    """With the line, and what to write."""

    def leaving(x: Tensor, flag: bool):
        with torch.profiler.record_function("part"):
            if flag:
                return x
        return x + 1

    with pytest.raises(nc.errors.ScriptError, match=r"(?s)record_function.*Return behind the with") as raised:
        nc.script(leaving)
    assert raised.value.where[0].line == leaving.__code__.co_firstlineno + 1
