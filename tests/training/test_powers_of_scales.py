"""`nc.check_training`: scaled gradients followed to where they go, and state of a loop's own that stands still."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import narrowcast as nc

sys.path.insert(0, str(Path(__file__).parents[1] / "conformance" / "trust"))

import loops_of_scales
import wrong_loops
from wrong_scales import WRONG_SCALES, Wrong

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.sweep(one_in=2)
@pytest.mark.parametrize(("wrong", "kind"), WRONG_SCALES.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_each_fault_is_named_alone_at_its_line(wrong: Wrong, kind: str) -> None:
    """What is wrong is the one finding, at its line, whatever else a scaled gradient has come to by then."""
    said = wrong_loops.judged(wrong, kind, "")
    assert said.word == "right", said


@pytest.mark.sweep(one_in=2)
@pytest.mark.parametrize("loop", loops_of_scales.LOOPS_OF_SCALES, ids=lambda loop: loop.name)
def test_nothing_is_said_where_a_scale_is_divided_or_cancels(loop: loops_of_scales.Loop) -> None:
    """Right loops that compute with scaled gradients in fp16 have no findings, and are looked at to their end."""
    torch.manual_seed(0)
    check = nc.check_training(loop.make(torch.float16))
    assert check, str(check)
    assert not any("not inspected" in note for note in check.notes), str(check)


def copied_back(is_copied: bool) -> Callable[[], None]:
    """A loop that trains copies in fp32 of weights in bf16."""
    loop = wrong_loops.Loop("", torch.bfloat16)
    masters = [p.detach().float().requires_grad_() for p in loop.weights]
    optimizer = torch.optim.SGD(masters, lr=0.1)

    def step() -> None:
        loop.net.zero_grad()
        torch.nn.functional.cross_entropy(loop.net(loop.x).float(), loop.y).backward()
        for master, p in zip(masters, loop.weights, strict=True):
            assert p.grad is not None
            master.grad = p.grad.float()
        optimizer.step()
        with torch.no_grad():
            for master, p in zip(masters, loop.weights, strict=True):
                if is_copied:
                    p.copy_(master)

    return step


def test_weights_that_never_get_what_their_copies_learn_are_found() -> None:
    """Copies in fp32 that an optimizer trains, and nobody copies back; where they are copied, nothing is wrong."""
    assert nc.check_training(copied_back(False)).kinds == ("weights that never move",)
    assert nc.check_training(copied_back(True)).kinds == ()


def test_a_hook_that_clips_scaled_gradients_is_found() -> None:
    """A hook on a weight runs in the backward, where its gradient is still scaled; one that halves it is right."""
    for change, kinds in ((lambda g: g.clamp(-10, 10), ("clip before unscale",)), (lambda g: g / 2, ())):
        loop = wrong_loops.Loop("")
        for p in loop.weights:
            p.register_hook(change)

        def step(loop: wrong_loops.Loop = loop) -> None:
            loop.optimizer.zero_grad()
            loop.scaler.scale(loop.loss(torch.float16)).backward()
            loop.end()

        assert nc.check_training(step).kinds == kinds


def test_an_optimizer_of_weights_that_were_replaced_is_found() -> None:
    """Weights put in the place of others after the optimizer was made never move; made afterwards, it moves them."""
    for is_late, kinds in ((True, ()), (False, ("weights that never move",))):
        net = torch.nn.Linear(16, 4)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        net.weight, net.bias = (torch.nn.Parameter(p.detach().bfloat16()) for p in (net.weight, net.bias))
        if is_late:
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def step(net: torch.nn.Module = net, optimizer: torch.optim.Optimizer = optimizer) -> None:
            net.zero_grad()
            net(torch.ones(2, 16, dtype=torch.bfloat16)).float().square().mean().backward()
            optimizer.step()

        assert nc.check_training(step).kinds == kinds


def test_an_average_that_is_given_other_memory_is_put_back() -> None:
    """An average of weights that no model's call and no optimizer shows, set through `.data`."""
    loop = wrong_loops.Loop("")
    average = torch.nn.Parameter(loop.weights[0].detach().clone())
    before = average.detach().clone()

    def step() -> None:
        loop.optimizer.zero_grad()
        loop.loss().backward()
        loop.optimizer.step()
        average.data = 0.9 * average.data + 0.1 * loop.weights[0].data

    nc.check_training(step)
    assert torch.equal(average, before)
