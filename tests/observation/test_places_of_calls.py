"""Paths that are put together from modules' calls are those that the Python stack gives."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from narrowcast.core.ledger.identity import BACKWARD
from narrowcast.core.policy import Site
from narrowcast.observation.observer.observer import Observer
from narrowcast.runtime.sites.python_stack import find_site


class BothWays(Observer):
    """Keeps the place that each call was given beside the one on the stack."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[Site, Site]] = []

    before: Any


_SOURCE = """
def before(self, call):
    if call.id.direction != BACKWARD:  # which has the place of its forward
        self.found.append((call.site, find_site(with_names=False)))
"""
_names: dict[str, Any] = {"BACKWARD": BACKWARD, "find_site": find_site}
exec(compile(_SOURCE, "<no file of the user's>", "exec"), _names)
BothWays.before = _names["before"]


class Shared(nn.Module):
    """One module under two names, a method of a part, a list, a module in none."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.again = self.first
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(2))
        self.part = nn.Sequential(nn.LayerNorm(4))
        self.hidden = [nn.Linear(4, 4)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.again(self.first(x)) * 2.0
        for block in self.blocks:
            x = block(x).exp()
        return self.hidden[0](self.part.forward(x)).sum()


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Shared()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return y * 3.0


class Opening(nn.Module):
    """Opens the observer in the middle of its own call."""

    def __init__(self, around: Callable[[], Any]) -> None:
        super().__init__()
        self.inner, self.around = Shared(), around

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + 1.0
        with self.around():
            return self.inner(x) - 1.0  # type: ignore[no-any-return]


class Raising(Shared):
    """A part raises, and the model goes on."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with contextlib.suppress(RuntimeError):
            self.first(torch.ones(3, 3))
        return super().forward(x)


@pytest.mark.parametrize(
    "make",
    [
        Shared, Raising, Checkpointed, lambda: nn.Sequential(Shared()),
        lambda: torch.fx.symbolic_trace(nn.Sequential(*(nn.Linear(4, 4) for _ in range(16)))),
        *([] if torch.accelerator.is_available() else  # where it moves the modules there
          [lambda: nn.DataParallel(Shared()), lambda: nn.DataParallel(nn.DataParallel(Checkpointed()))]),
    ],
)  # fmt: skip
def test_places_are_those_on_the_stack(make: Callable[[], nn.Module]) -> None:
    """Shared modules, checkpoints, DataParallel and parts that raise leave each call's module path and line correct."""
    model, observer = make(), BothWays()
    for module in model.modules():
        if isinstance(module, nn.DataParallel):  # it would scatter what is here over the GPUs of the machine
            module.device_ids = []
    with observer.observing():
        model(torch.ones(2, 4, requires_grad=True)).sum().backward()
        torch.ones(2).exp()
    assert len(observer.found) > 12
    assert [given for given, _ in observer.found] == [read for _, read in observer.found]
    assert {given.line > 0 for given, _ in observer.found} == {True} or isinstance(model, torch.fx.GraphModule)


def test_a_block_that_opens_inside_a_call_knows_the_modules_around_it() -> None:
    """The outer modules were called before observation began, and their names are in the path all the same."""
    observer = BothWays()
    outer = nn.Sequential(Opening(observer.observing))
    outer(torch.ones(2, 4))
    assert [given for given, _ in observer.found] == [read for _, read in observer.found]
    assert "0.inner.blocks.1.0" in {given.module_path for given, _ in observer.found}
