"""A subject: a model with an input to run it on, and what its user looks at."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from narrowcast.errors import NarrowcastError

Metric = Callable[..., Mapping[str, float] | float]


@dataclass(slots=True)
class Subject:
    """A model with an input to run it on.

    model:  a Module or any callable; called as `model(*args, **kwargs)`.
    metric: what the model's user looks at: called with the model (or with nothing, if it takes nothing), returns a
            number or numbers by name.
    """

    model: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    metric: Metric | None = None
    name: str = ""

    def __post_init__(self) -> None:
        if not callable(self.model):
            raise NarrowcastError(
                asked=f"a Subject whose model is a {type(self.model).__name__}", found="it cannot be called",
                advice="Give a Module or a function.",
            )  # fmt: skip
        self.args = tuple(self.args)
        self.kwargs = dict(self.kwargs or {})
        self.name = self.name or getattr(self.model, "__name__", type(self.model).__name__)

    def run(self) -> Any:
        """The model's output on the input."""
        return self.model(*self.args, **self.kwargs)

    def measure(self) -> dict[str, float]:
        """The metric's figures by name; empty without a metric."""
        if self.metric is None:
            return {}
        try:
            takes_model = len(inspect.signature(self.metric).parameters) > 0
        except (TypeError, ValueError):
            takes_model = False
        return figures_of(self.metric, self.metric(self.model) if takes_model else self.metric())


def figures_of(metric: Metric, value: Any) -> dict[str, float]:
    """The figures that a metric returned, by name."""
    if not isinstance(value, Mapping):
        name = getattr(metric, "__name__", "metric")
        return {"metric" if name == "<lambda>" else name: float(value)}
    numbers = {str(k): v for k, v in value.items() if isinstance(v, (int, float)) or torch.is_tensor(v)}
    return {k: float(v) for k, v in numbers.items()}
