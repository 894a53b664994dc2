"""Copies of weights, in fp32 and in low formats, that a loop writes back, replaces, or forgets to give gradients."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import narrowcast as nc


def region() -> Any:
    return torch.autocast("cpu", torch.bfloat16)


class Loop:
    """A model of sixteen numbers in and four out, in fp32 or bf16."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).to(dtype)
        self.weights = list(self.net.parameters())
        self.masters = [w.detach().float().clone() for w in self.weights]
        self.x, self.y = torch.randn(8, 16).to(dtype), torch.arange(8) % 4
        self.optimizer = torch.optim.AdamW(self.weights if dtype is torch.float32 else self.masters, lr=1e-4)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def backward(self) -> None:
        cross_entropy(self.net(self.x).float(), self.y).backward()
        for master, weight in zip(self.masters, self.weights, strict=True):
            master.grad, weight.grad = weight.grad.float(), None  # type: ignore[union-attr]

    def train(self) -> None:
        with region():
            loss = cross_entropy(self.net(self.x), self.y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


@torch.no_grad()
def copied_back_together(loop: Loop) -> None:
    torch._foreach_copy_(loop.weights, loop.masters)


def given_other_memory(loop: Loop) -> None:
    for weight, master in zip(loop.weights, loop.masters, strict=True):
        weight.data = master.bfloat16()


def loaded_in_place_of_the_old(loop: Loop) -> None:
    names = [name for name, _ in loop.net.named_parameters()]
    loop.net.load_state_dict(dict(zip(names, (m.bfloat16() for m in loop.masters), strict=True)), assign=True)
    loop.weights = list(loop.net.parameters())


@pytest.mark.parametrize("write", [copied_back_together, given_other_memory, loaded_in_place_of_the_old])
def test_masters_in_fp32_lose_nothing_however_they_are_written_back(write: Callable[[Loop], None]) -> None:
    """In one call for all, as other memory, or as other parameters."""
    loop = Loop(torch.bfloat16)

    def step() -> None:
        loop.backward()
        loop.optimizer.step()
        write(loop)

    found = nc.check_training(step)
    assert found.findings == (), str(found)


def test_an_average_in_fp32_may_be_copied_to_a_model_in_bf16() -> None:
    """It is the copy that is rounded, and nothing is added to that."""
    loop, average = Loop(), copy.deepcopy(Loop().net)
    shown = copy.deepcopy(average).bfloat16()

    def step() -> None:
        loop.train()
        with torch.no_grad():
            torch._foreach_lerp_(list(average.parameters()), loop.weights, 0.01)
            torch._foreach_copy_(list(shown.parameters()), list(average.parameters()))

    found = nc.check_training(step)
    assert found.findings == (), str(found)


def test_a_parameter_that_a_graph_leads_to_is_a_leaf_again() -> None:
    """An average without no_grad: torch records it, and the program runs."""
    loop, average = Loop(), copy.deepcopy(Loop().net).requires_grad_(False)

    def step() -> None:
        loop.train()
        torch._foreach_lerp_(list(average.parameters()), loop.weights, 0.01)

    before = [p.clone() for p in average.parameters()]
    nc.check_training(step)
    after = list(average.parameters())
    assert all(map(torch.equal, before, after))
    assert all(p.is_leaf and not p.requires_grad for p in after)


def test_a_net_that_is_in_fp32_in_training_is_so_in_an_evaluation() -> None:
    """Only of one that is trained in a region an evaluation without it is another."""
    loop, weigher = Loop(), nn.Sequential(nn.Linear(1, 8), nn.Sigmoid(), nn.Linear(8, 1))
    loop.optimizer.add_param_group({"params": list(weigher.parameters())})

    def step(evaluated: nn.Module, x: torch.Tensor) -> None:
        with region():
            losses = cross_entropy(loop.net(loop.x), loop.y, reduction="none")
        with nc.autocast("cpu", enabled=False):
            weights = weigher(losses.detach().float()[:, None])[:, 0]
        loop.optimizer.zero_grad()
        (weights * losses).mean().backward()
        loop.optimizer.step()
        with torch.no_grad():
            evaluated(x)

    kinds = [nc.check_training(step, args).kinds for args in ((weigher, torch.ones(4, 1)), (loop.net, loop.x))]
    assert "evaluation without the region" in kinds[1] and "evaluation without the region" not in kinds[0]


def detached(loop: Loop) -> torch.Tensor:
    with region():
        loss = cross_entropy(loop.net(loop.x), loop.y)
    return torch.tensor(loss.item(), requires_grad=True)


def attached(loop: Loop) -> torch.Tensor:
    with region():
        return cross_entropy(loop.net(loop.x), loop.y)


@pytest.mark.parametrize(("loss", "kinds"), [(detached, ("weights that never move",)), (attached, ())])
def test_a_loss_that_depends_on_no_weight_is_found(loss: Callable[[Loop], torch.Tensor], kinds: Any) -> None:
    """It is made of a number: its backward reaches nothing else."""
    loop = Loop()

    def step() -> None:
        loop.optimizer.zero_grad()
        loss(loop).backward()
        loop.optimizer.step()

    assert nc.check_training(step).kinds == kinds


@pytest.mark.parametrize(("scale", "kinds"), [(False, ("a loss that is not scaled",)), (True, ())])
def test_gradients_of_autograd_grad_that_a_scaler_divides_are_of_a_scaled_loss(scale: bool, kinds: Any) -> None:
    """They are put into `.grad` by hand, by no backward of a leaf."""
    loop = Loop()

    def step() -> None:
        with torch.autocast("cpu", torch.float16):
            loss = cross_entropy(loop.net(loop.x), loop.y)
        gradients = torch.autograd.grad(loop.scaler.scale(loss) if scale else loss, loop.weights)
        for weight, gradient in zip(loop.weights, gradients, strict=True):
            weight.grad = gradient
        loop.scaler.step(loop.optimizer)
        loop.scaler.update()

    loop.scaler.scale(torch.zeros(1))  # its scale is there before
    assert nc.check_training(step).kinds == kinds


@pytest.mark.parametrize(("factor", "kinds"), [(math.inf, ("every step is skipped",)), (1.0, ())])
def test_losses_that_are_never_finite_and_skipped_by_hand_are_found(factor: float, kinds: Any) -> None:
    """No backward runs, and no optimizer steps."""
    loop = Loop()

    def step() -> None:
        with region():
            loss = cross_entropy(loop.net(loop.x), loop.y) * factor
        if not torch.isfinite(loss):
            return
        loop.optimizer.zero_grad()
        loss.backward()
        loop.optimizer.step()

    assert nc.check_training(step).kinds == kinds


@pytest.mark.parametrize("factor", [0.5, 1.0])
def test_a_scale_of_the_loop_s_own_may_fall_for_a_while(factor: float) -> None:
    """More steps are run while losses are finite and gradients are not; a scale that never falls is told."""
    loop = Loop()
    scale = torch.tensor(2.0**30)

    def step() -> None:
        loop.optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = cross_entropy(loop.net(loop.x), loop.y)
        (loss * scale).backward()
        if all(p.grad.isfinite().all() for p in loop.weights):
            for p in loop.weights:
                p.grad /= scale
            loop.optimizer.step()
        else:
            scale.mul_(factor)

    assert nc.check_training(step).kinds == (() if factor < 1 else ("every step is skipped",))


def test_weights_that_lie_in_one_memory_are_cast_once_each() -> None:
    """As after vector_to_parameters, whose weights are views of a vector; rounded, it is told by its line."""
    loop = Loop()
    vector_to_parameters(parameters_to_vector(loop.weights), loop.weights)

    def step(rounded: bool) -> None:
        loop.train()
        if rounded:
            vector_to_parameters(parameters_to_vector(loop.weights).bfloat16().float(), loop.weights)

    assert nc.check_training(step, (False,)).findings == ()
    (finding,) = nc.check_training(step, (True,), steps=3).findings
    assert finding.kind == "weights rounded between steps" and finding.file == __file__ and finding.line


def test_what_costs_time_alone_comes_after_what_is_wrong() -> None:
    """Each micro-batch casts the weights again, and the sum of many parts of losses is in bf16."""
    loop = Loop()

    def step() -> None:
        total = torch.zeros((), dtype=torch.bfloat16)
        loop.optimizer.zero_grad()
        for _ in range(8):
            with region():
                loss = cross_entropy(loop.net(loop.x), loop.y)
            loss.backward()
            for part in (loss.detach() / 100).bfloat16().expand(100):
                total += part
        loop.optimizer.step()

    assert nc.check_training(step).kinds == ("a sum in a low format", "weights cast again")
