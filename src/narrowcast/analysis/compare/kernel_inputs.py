"""A call's op with what it read, to be run in wide formats, changed, or on absolute values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from narrowcast.observation.statistics.arguments import others_as_text
from narrowcast.observation.trial.finiteness import is_floating
from narrowcast.observation.trial.rerun import Change, run_wide
from narrowcast.runtime.torch_bridge import OpFacts, tensors_in

Samples = list[torch.Tensor]


def shapes_of(*trees: Any) -> list[tuple[int, ...]]:
    """The shapes of the tensors in nested arguments."""
    return [tuple(t.shape) for t in tensors_in(*trees)]


@dataclass(frozen=True, slots=True)
class Inputs:
    """A call's op with what it read."""

    facts: OpFacts
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self, dtype: torch.dtype = torch.float64, change: Change | None = None) -> list[torch.Tensor] | None:
        """The floating results in a wide format, each tensor changed before."""
        found = run_wide(self.facts, self.args, self.kwargs, dtype, change)
        return None if found is None else [t for t in found if is_floating(t)]

    def on_absolute_values(self, more: float = 0.0) -> list[torch.Tensor] | None:
        """The op on the absolute values of all that it adds up, and so much more."""
        kwargs = {k: abs(v) if k in ("alpha", "beta") else v for k, v in self.kwargs.items()}
        return Inputs(self.facts, self.args, kwargs).run(change=lambda t: t.abs() + more if more else t.abs())

    def with_rounded_numbers(self, dtype: torch.dtype) -> Inputs | None:
        """The same with numbers, which tensors without a dimension are, too, in a low format, as some kernels read
        them; None where that changes none.
        """

        def rounded(value: Any) -> Any:
            if isinstance(value, float):
                return float(torch.tensor(value, dtype=dtype))
            return value.detach().to(dtype) if _is_number(value) else value

        args, kwargs = tuple(map(rounded, self.args)), {k: rounded(v) for k, v in self.kwargs.items()}
        pairs = zip((*self.args, *self.kwargs.values()), (*args, *kwargs.values()), strict=True)
        is_changed = any(_is_number(a) and float(a) != float(b) and math.isfinite(b) for a, b in pairs)
        return Inputs(self.facts, args, kwargs) if is_changed else None

    @property
    def is_transposed(self) -> bool:
        """Of a convolution: whether an argument says that it is transposed."""
        return ("transposed", "True") in others_as_text(self.facts, self.args, self.kwargs)

    def given(self, name: str) -> Any:
        """A tensor, by its argument's name."""
        position = next((slot.position for slot in self.facts.slots if slot.name == name), len(self.args))
        return self.args[position] if position < len(self.args) else self.kwargs.get(name)


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, torch.Tensor) and is_floating(value) and not value.dim())
