"""What observes a program leaves ops of higher order their gradients: torch compiles the functions they are given."""

import contextlib
import warnings

import pytest
import torch
from torch import nn
from torch._higher_order_ops.map import map as mapped
from torch._higher_order_ops.scan import scan
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import narrowcast as nc
from narrowcast.observation.statistics import statistics

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def conditional(weight):
    return torch.cond(X.sum() > -100, lambda t: torch.sin(t @ weight), lambda t: torch.cos(t @ weight), (X,))


def scanned(weight):
    return scan(lambda carry, t: (torch.tanh(t @ weight + carry).float(), carry.clone()), torch.zeros(8), X)[0]


def of_each(weight):
    return mapped(lambda t, w: torch.relu(t @ w), X[None], weight)


OBSERVERS = {"record": nc.record, "watch": nc.watch, "capture": nc.capture}


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch._dynamo.reset()


def gradient(program, observer, is_low):
    torch._dynamo.reset()
    weight = nn.Parameter(torch.randn(8, 8, generator=torch.Generator().manual_seed(1)))
    region = nc.autocast("cpu", torch.bfloat16) if is_low else contextlib.nullcontext()
    with observer(), region:
        result = program(weight)
    result.float().square().sum().backward()
    return weight.grad


@pytest.mark.sweep(one_in=3)
@pytest.mark.parametrize("observer", OBSERVERS)
@pytest.mark.parametrize("program", [conditional, scanned, of_each], ids=lambda program: program.__name__)
@pytest.mark.parametrize("is_low", [False, True], ids=["fp32", "bf16"])
def test_functions_that_close_over_weights_give_them_the_same_gradients(program, observer, is_low):
    """Under a mode that Dynamo skips code for, torch loses them without a word, or raises."""
    expected = gradient(program, contextlib.nullcontext, is_low)
    found = gradient(program, OBSERVERS[observer], is_low)
    assert expected is not None and torch.equal(found, expected)


class Passing(TorchDispatchMode):
    """A mode of the user's, under which torch itself compiles nothing."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        return op(*args, **(kwargs or {}))


def test_code_that_the_user_compiled_runs_as_before_after_an_op_of_higher_order():
    """The flag for which Dynamo skips code is what it was: inside, after, and with a mode of the user's around."""
    weight, calls = nn.Parameter(torch.randn(8, 8)), list[int]()

    def backend(graph, _):
        calls.append(1)
        return graph.forward

    def run():  # other code each time: what was skipped once stays so
        exec("def function(t): return t.sin() @ t.mT", names := {})
        torch.compile(names["function"], backend=backend)(X)
        return len(calls)

    with nc.watch():
        conditional(weight)
        assert run() == 0  # it runs as eager code there
    with Passing():
        with nc.record():
            conditional(weight)
        assert run() == 0
    assert run() == 1


def test_no_fake_tensor_is_kept_that_was_made_while_a_graph_was():
    """Rows to inspect are kept by shape: a fake one was found by the next capture, which then inspected nothing."""
    device = torch.device("cpu")
    with FakeTensorMode():
        statistics._row_index((3, 61), device)
    kept = (*statistics._row_index((3, 61), device), statistics._row_numbers(3 * 61, device))
    assert not any(isinstance(tensor, FakeTensor) for tensor in kept)
