"""What a program of the corpus is, the table of them, and what a trial says."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

DEVICE = os.environ.get("TRUST_DEVICE", "cpu")
"""What everything runs on: torch's default device, so that programs which name none run there."""
if "TRUST_DEVICE" in os.environ:
    torch.set_default_device(DEVICE)

PROGRAMS: dict[str, Program] = {}
RIGHT, FALSE_ALARM, MISSED, PLACE, ADVICE = "right", "false alarm", "missed", "wrong place", "wrong advice"
HARMED, NOT_JUDGED = "harmed", "not judged"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Said(NamedTuple):
    """The word of a trial, and why."""

    word: str
    why: str = ""


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
        """Its own; or what the model gives, if that is one number; or means of squares."""
        if self.loss is not None:
            return self.loss(out)
        parts = [t for t in tensors_of(out) if t.requires_grad]
        return parts[0] if len(parts) == 1 and not parts[0].ndim else sum(t.float().square().mean() for t in parts)


@dataclass(frozen=True, slots=True)
class Program:
    """One of the corpus. trains: whether it has a backward worth looking at."""

    name: str
    family: str
    make: Callable[[], Made]
    trains: bool = True


def program(family: str, trains: bool = True) -> Callable[[Callable[[], Made]], Callable[[], Made]]:
    """Puts a function that makes a program into the table, under its own name."""

    def entered(make: Callable[[], Made]) -> Callable[[], Made]:
        enter(make.__name__, family, make, trains)
        return make

    return entered


def enter(name: str, family: str, make: Callable[[], Made], trains: bool = True) -> None:
    """Under a name that no other has."""
    assert name not in PROGRAMS, name
    PROGRAMS[name] = Program(name, family, make, trains)


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
    """A function with the modules and parameters that it uses."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)
