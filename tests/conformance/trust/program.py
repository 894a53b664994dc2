"""What a program of the corpus is, and what it does in a region, forward, backward and in a step of training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

PROGRAMS: dict[str, Program] = {}


@dataclass(frozen=True, slots=True)
class Made:
    """A model with inputs. loss: of its output. twin: the same function, written otherwise, with the same weights.

    decode: runs the model on the same inputs a token at a time, with a cache.
    """

    model: nn.Module
    args: tuple[Any, ...]
    loss: Callable[[Any], torch.Tensor] | None = None
    twin: nn.Module | None = None
    decode: Callable[..., Any] | None = None

    def loss_of(self, out: Any) -> torch.Tensor:
        """Its own, or a mean of squares."""
        if self.loss is not None:
            return self.loss(out)
        loss = getattr(out, "loss", None)
        if loss is not None:
            return torch.as_tensor(loss)
        tensors = [t for t in tensors_of(out) if t.is_floating_point() and t.requires_grad]
        return tensors[0] if tensors[0].ndim == 0 else tensors[0].float().square().mean()


@dataclass(frozen=True, slots=True)
class Program:
    """One of the corpus. trains: whether it has a backward worth looking at."""

    name: str
    family: str
    make: Callable[[], Made]
    trains: bool = True


def program(family: str, trains: bool = True) -> Callable[[Callable[[], Made]], Callable[[], Made]]:
    """Puts a function that makes a program into the table, under its own name."""

    def enter(make: Callable[[], Made]) -> Callable[[], Made]:
        PROGRAMS[make.__name__] = Program(make.__name__, family, make, trains)
        return make

    return enter


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in a model's output, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from tensors_of(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from tensors_of(one)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from tensors_of(getattr(value, name))


class Fn(nn.Module):
    """A function with the modules that it uses."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)
