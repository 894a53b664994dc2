"""A case: a model with inputs to run it on, and how its user evaluates it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from narrowcast.errors import RunError
from narrowcast.runtime.torch_bridge.inputs import Inputs, call_arguments
from narrowcast.runtime.torch_surface.modules import compiled_of

Figures = Mapping[str, float] | float
Evaluate = Callable[[Any], Figures]
Metric = Callable[[Any], Figures]


@dataclass(frozen=True, slots=True, repr=False)
class Case:
    """A model with inputs to run it on. `explain`, `capture`, `compare`, `repair`, `export`, `trace` and functions of
    `narrowcast.testing` take a Case in the place of both.

    model:    a Module or any callable.
    inputs:   what it is called with: a tensor, a tuple of arguments, a mapping of keyword arguments, or
              `(tuple, mapping)` for both.
    evaluate: runs the model as its user does, `evaluate(model)`, and returns a number or numbers by name.
    name:     what reports call it; the model's own name by default.

    Raises RunError for a model that cannot be called, and for an `evaluate` that does not take the model alone.
    """

    model: Callable[..., Any]
    inputs: Inputs = ()
    evaluate: Evaluate | None = field(default=None, kw_only=True)
    name: str = field(default="", kw_only=True)

    def __post_init__(self) -> None:
        if not callable(self.model):
            raise RunError(
                f"Case({type(self.model).__name__})", "it cannot be called", advice="Give a Module or a function."
            )
        call_arguments("Case", self.inputs)
        if self.evaluate is not None:
            check_takes_one("Case(evaluate=...)", self.evaluate, "the model")

    def __repr__(self) -> str:
        args, kwargs = call_arguments("Case", self.inputs)
        shown = [*map(_shown, args), *(f"{name}={_shown(value)}" for name, value in kwargs.items())]
        evaluate = "" if self.evaluate is None else f", evaluate={getattr(self.evaluate, '__name__', self.evaluate)}"
        return f"Case({self.name or name_of(self.model)}: {', '.join(shown)}{evaluate})"


def unpacked(verb: str, model: Any, inputs: Inputs) -> tuple[Any, Inputs]:
    """Return a model and its inputs, which a Case in the model's place holds. Raise RunError for both."""
    if not isinstance(model, Case):
        return model, inputs
    if not (type(inputs) is tuple and not inputs):
        raise RunError(f"{verb}(case, inputs)", "a Case has its inputs", advice="Put them into the Case.")
    return model.model, model.inputs


def _shown(value: Any) -> str:
    """Return a short text: `float32 [2, 8]` of a tensor."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return type(value).__name__


def name_of(model: Any) -> str:
    """Return a function's name, or that of a module's class; of what was compiled that of the original."""
    inner = compiled_of(model)
    model = model if inner is None else inner
    return str(getattr(model, "__name__", None) or type(model).__name__)


def check_takes_one(asked: str, function: Callable[..., Any], what: str) -> None:
    """Raise RunError unless a function of the user's can be called with one argument."""
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        raise RunError(asked, f"it cannot be called with {what} alone: {error}",
                       advice=f"Give a function of {what}.") from error  # fmt: skip
    except ValueError:  # a builtin without a signature
        pass


def figures_of(asked: str, function: Callable[..., Any], value: Any) -> dict[str, float]:
    """Return the figures that a metric or an evaluation returned, by name. Raise RunError where it returned none."""
    if isinstance(value, Mapping):
        numbers = {str(k): v for k, v in value.items() if isinstance(v, int | float) or torch.is_tensor(v)}
        return {k: float(v) for k, v in numbers.items()}
    try:
        figure = float(value)
    except (TypeError, ValueError, RuntimeError):
        raise RunError(asked, f"it returned {type(value).__name__}",
                       advice="Return a number, or a mapping of numbers by name.") from None  # fmt: skip
    name = getattr(function, "__name__", "metric")
    return {"metric" if name == "<lambda>" else name: figure}
