"""A weight is cast once in a region of a script, however it comes: gradients are those of eager's weight cache."""

import io
from typing import List, Optional  # noqa: UP035

import pytest
import torch
from torch import Tensor, nn

import narrowcast as nc
from narrowcast.frontends.eager.registered import install_visiting, remove_visiting
from narrowcast.observation.observer.mode import _native_ops

pytestmark = pytest.mark.filterwarnings("ignore")


def product(x: Tensor):
    return torch.mm(x, x)


def out_of_a_list(x: Tensor, y: Tensor):
    with torch.autocast("cpu"):
        ms = [torch.mm(x, t) for t in [x, y]]
        return ms[0], ms[1]


def appended(x: Tensor, y: Tensor):
    with torch.autocast("cpu"):
        o = [x]
        for _i in range(3):
            o.append(o[-1] @ x)
        return o[-1], o[1] + y


def many(ts: List[Tensor]):  # noqa: UP006
    with torch.autocast("cpu"):
        found = torch.mm(ts[0], ts[1])
        for t in ts:
            found = torch.mm(found, t)
        return found


def a_list_as_argument(x: Tensor, y: Tensor):
    return many([x, y, x]), x + y


def out_of_a_dict(x: Tensor, y: Tensor):
    d = {"a": x, "b": y}
    with torch.autocast("cpu"):
        return torch.mm(d["a"], d["b"]), torch.mm(d["b"], x)


def chosen(x: Tensor, y: Tensor):
    with torch.autocast("cpu"):
        t = x if x.sum() > 1000 else y
        return torch.mm(t, y), torch.mm(x, t)


def carried(x: Tensor, y: Tensor):
    with torch.autocast("cpu"):
        z = x
        for _i in range(2):
            z = torch.mm(z, y) + torch.mm(y, x)
        return z, torch.mm(x, x)


def twice_in_a_loop(x: Tensor, y: Tensor):
    z, ts = x * 2, [x, y]
    with torch.autocast("cpu"):
        for t in ts:
            z = torch.mm(torch.mm(z, t) + 1, t)
        return z, y + 1


def in_full_precision_too(x: Tensor, y: Tensor):
    with torch.autocast("cpu"):
        ts = [x, y]
        return torch.mm(ts[0], ts[1]), torch.cdist(ts[0], ts[1])


def forked(x: Tensor, y: Tensor):
    with torch.autocast("cpu"):
        a, b = torch.jit.fork(product, x), torch.jit.fork(product, y)
        return torch.jit.wait(a), torch.jit.wait(b)


def converted(x: Tensor, y: Tensor):
    with torch.autocast("cpu"):
        return torch.mm(x, y) + torch.mm(x.float(), y), torch.mm(y.to(torch.float32), x)


def results_that_equal(x: Tensor, y: Tensor):
    with torch.autocast("cpu"):
        z, one = torch.dropout(x, 0.5, False), torch.flatten(y, 0, 0)
        for _i in range(2):
            z = torch.mm(z, one).float()
        a, b, c = x * 1, x + 0, x.t().t()  # no leaves, and no weights
        return z + torch.mm(a, y) + torch.mm(b, y) + torch.mm(c, y), torch.mm(x, y)


def beside_what_is_written(x: Tensor, y: Tensor):
    held = [x]
    z = torch.mm(x * 2, x) + torch.mm(y, held[0])
    other = (x * 3).clone().mul_(0.5)
    held = held + [other]  # noqa: RUF005
    return z, held[-1]


def one_of(x: Tensor, y: Optional[Tensor]):  # noqa: UP045
    if y is not None and y.dim() > 1:
        return torch.mm(x, y)
    return x


def narrowed(x: Tensor, y: Tensor):
    with torch.autocast("cpu"):
        z = torch.mm(y * 2, y)
        return one_of(z, y) + one_of(x * 2, x), one_of(z, None) + y


class OnWhenItRuns(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(16) / 2)

    def forward(self, x: Tensor, y: Tensor):
        z = x + 1
        with torch.autocast("cpu"):
            for _i in range(2):
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=x.dim() > 1):
                    z = torch.mm(torch.mm(z, self.weight), y)
                z = torch.mm(torch.mm(z * 2, y), self.weight) + 1
            return torch.mm(z, self.weight), y


def left_early(x: Tensor, y: Tensor):
    z = x + 1
    with torch.autocast("cpu"):
        for i in range(2):
            z = torch.mm(z * 2, y)
            if i == 3:
                return z, y
    return z, x


def made_earlier(x: Tensor, y: Tensor):
    z, first, second = x + 1, torch.autocast("cpu"), torch.autocast("cpu", enabled=False)
    for _i in range(2):
        with torch.autocast("cpu", cache_enabled=False), first if x.dim() > 1 else second:
            z = torch.mm(torch.mm(z, y), y) + 1
    return z, y


class Writing(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(16) / 2)

    def forward(self, x: Tensor, y: Tensor):
        z = (x * 2).clone().mul_(0.5)
        with torch.autocast("cpu"):
            for _i in range(2):
                z = torch.mm(z, self.weight).float()
                z = torch.mm(torch.sparse.mm(torch.eye(16).to_sparse(), y.detach()) + z, y)
        return z, x


class Holding:
    def __init__(self, weight: Tensor):
        self.weight = weight


def held_by_an_object(x: Tensor, y: Tensor):
    h = Holding(x)
    with torch.autocast("cpu"):
        z = torch.mm(h.weight, h.weight)
        h.weight = y
        return z + torch.mm(h.weight, y), torch.mm(x, h.weight)


class Setting(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.zeros(16, 16)

    def forward(self, x: Tensor, y: Tensor):
        self.weight = x
        with torch.autocast("cpu"):
            return torch.mm(self.weight, self.weight), torch.mm(self.weight, y) + torch.mm(x, y)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.weight = nn.Linear(16, 16), nn.Parameter(torch.randn(16, 16) / 4)

    def forward(self, x: Tensor, y: Tensor):
        with torch.autocast("cpu"):
            z = x
            for t in [self.weight, x, self.weight, y]:
                z = torch.mm(z, t) + self.linear(z) + torch.mm(z, self.weight)
            return z, x


class Listed(nn.Module):
    """Its weight comes out of a list first, and is used as it is after that."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16) / 4)

    def forward(self, x: Tensor, y: Tensor):
        with torch.autocast("cpu"):
            z = x
            for t in [y, self.weight]:
                z = torch.mm(z, t)
            return z, torch.mm(x, self.weight)


def run(function):
    """Outputs and gradients."""
    torch.manual_seed(1)
    leaves = [(torch.randn(16, 16) / 4).requires_grad_() for _ in range(2)]
    parameters = list(function.parameters()) if isinstance(function, nn.Module) else []
    found = function(*leaves)
    sum((t.float() * torch.linspace(0, 1, 16)).sum() for t in found).backward()
    gradients = [p.grad for p in (*leaves, *parameters)]
    for parameter in parameters:
        parameter.grad = None
    return [t.detach() for t in found] + gradients


@pytest.fixture
def one_weight_cache():
    """Tests before this one may have left kernels of ours on some ops, whose weight cache is another than torch's."""
    install_visiting(_native_ops("cpu").values(), "cpu")
    yield
    remove_visiting("cpu")


CASES = [
    out_of_a_list, appended, a_list_as_argument, out_of_a_dict, chosen, carried, twice_in_a_loop, in_full_precision_too,
    converted, forked, narrowed, OnWhenItRuns, left_early,
    made_earlier, Writing, results_that_equal, held_by_an_object, Setting, Model, Listed,
]  # fmt: skip


@pytest.mark.usefixtures("one_weight_cache")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_gradients_are_eager_s(case):
    """Bit for bit, with the leaves as arguments, called again, and after saving."""
    torch.manual_seed(0)
    program = case() if isinstance(case, type) else case
    expected = run(program)
    scripted = nc.script(program)
    buffer = io.BytesIO()
    torch.jit.save(scripted, buffer)
    buffer.seek(0)
    for ran in (scripted, scripted, torch.jit.load(buffer)):
        assert all(map(torch.equal, expected, run(ran)))


def test_the_gradients_tell_casts_apart():
    """A cast of its own for each use gives others."""

    def uncached(x, y):
        with torch.autocast("cpu", cache_enabled=False):
            return torch.mm(x, x), torch.mm(x, y)

    assert not all(map(torch.equal, run(out_of_a_list), run(uncached)))


@pytest.mark.usefixtures("one_weight_cache")
def test_a_write_to_one_element_of_a_list_is_none_to_another():
    """The weight beside it is cast once, in a region around the script."""
    expected, found = (run(nc.autocast("cpu")(f)) for f in (beside_what_is_written, nc.script(beside_what_is_written)))
    assert all(map(torch.equal, expected, found))


def test_a_tensor_that_a_list_got_is_written_through_it():
    """Its cast is made again, where a branch or a loop put it there, too."""

    def branch(x, n: int):
        held, y = [x * 1], x + 1
        with torch.no_grad(), torch.autocast("cpu"):
            z = torch.mm(y, y)
            if n > 0:
                held.append(y)
            held[-1].mul_(2)
            return z, torch.mm(y, y)

    def loop(x, n: int):
        held, y = [x * 1], x + 1
        with torch.no_grad(), torch.autocast("cpu"):
            z = torch.mm(y, y)
            for _i in range(n):
                held[0] = y
            held[-1].mul_(2)
            return z, torch.mm(y, y)

    for function in (branch, loop):
        expected, found = (f(torch.linspace(0, 1, 64).view(8, 8), 1) for f in (function, nc.script(function)))
        assert all(map(torch.equal, expected, found))


def test_what_needs_no_search_has_none():
    """A linear layer casts its weight and goes on."""
    assert "aten::__is__" not in str(nc.script(nn.Linear(4, 4), under="bf16").graph)


class Looped(torch.nn.Module):
    """Reads one weight several times: in a loop, and in either branch."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, x):
        count = 0
        while count < 3:
            x = self.layer(x)
            count += 1
        return self.layer(x) if bool(x.sum() > 0) else self.layer(x * 2)


@pytest.mark.parametrize("action", ["lower", "to(fp16)", "to(fp64)"])
def test_a_weight_is_cast_once_in_whatever_format_a_rule_names(action):
    """So that its gradients add up in that format, as in eager code."""
    policy, x, gradients = nc.Policy.native().with_rules(nc.Rule("aten.linear", action)), torch.randn(4, 8), []
    for make in (lambda model: nc.autocast("cpu", policy=policy)(model), lambda model: nc.script(model, under=policy)):
        model = Looped()
        make(model)(x).double().sum().backward()
        gradients.append(model.layer.weight.grad)
    assert torch.equal(*gradients)
