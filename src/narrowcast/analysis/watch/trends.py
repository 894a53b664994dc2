"""Gradients over a run: what underflows, what grows, before it is not finite."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from narrowcast.core.ledger.identity import BACKWARD, CallId
from narrowcast.observation.observer.turns import names_of_parameters
from narrowcast.observation.statistics.by_storage import has_storage
from narrowcast.observation.trial.finiteness import read_together
from narrowcast.observation.trial.output_errors import as_real
from narrowcast.reports.results.findings import Finding
from narrowcast.reports.results.verdicts import TREND
from narrowcast.runtime.torch_bridge import FORMATS, values_of

_SMALL = 256
"""Gradients underflow whose root mean square is below this many of the smallest numbers: of larger ones few do."""
_LOOKS = 3
"""How many looks in a row a parameter must show a trend."""


class Trends:
    """Looks at gradients every N steps: their rms, largest magnitude and share of zeros, by parameter.

    underflow: a share of zeros above it, for a parameter whose gradients had fewer in the first look, and are so small
    that the formats of the backward may lose some. growth: this many times the largest magnitude of the first look. Of
    a sharded gradient this rank's part is looked at.
    """

    def __init__(self, every: int, underflow: float, growth: float) -> None:
        self._every, self._underflow, self._growth = every, underflow, growth
        self._first: dict[str, tuple[float, float, float]] = {}
        self._often: dict[tuple[str, str], int] = {}

    def look(
        self, optimizer: Any, step: int, roots: Iterable[torch.nn.Module], dtypes: Iterable[torch.dtype]
    ) -> tuple[dict[str, Any] | None, list[Finding]]:
        """The figures of this step, if it is one to look at, and what they show. dtypes: those of the backward."""
        if (step - 1) % self._every:
            return None, []
        names = names_of_parameters(roots)
        small = _SMALL * max((FORMATS[dtype].smallest for dtype in dtypes if dtype in FORMATS), default=0.0)
        rows: dict[str, dict[str, float]] = {}
        findings = []
        held = [(p, _values(p)) for group in optimizer.param_groups for p in group["params"]]
        known = [(p, values) for p, values in held if values is not None]
        figures = read_together([_figures(values) for _, values in known])
        for number, ((parameter, _), (largest, rms, zeros)) in enumerate(zip(known, figures, strict=True)):
            name = names.get(id(parameter), f"parameter {number}")
            rows[name] = {"largest": largest, "rms": rms, "zeros": zeros}
            first_largest, first_rms, first_zeros = self._first.setdefault(name, (largest, rms, zeros))
            is_small = (rms or first_rms) < small
            if self._shows(name, "underflow", is_small and zeros > self._underflow > first_zeros):
                sentence = f"{zeros:.0%} of the gradient of {name} are zero; {first_zeros:.0%} were at the first look"
                advice = "Scale the loss (GradScaler), or compute the gradients of these layers in bf16 or fp32."
                findings.append(_trend(name, "underflow", sentence, advice, step))
            if self._shows(name, "growth", 0 < first_largest * self._growth < largest):
                sentence = f"the largest gradient of {name} is {largest:.3g}, {first_largest:.3g} at the first look"
                findings.append(_trend(name, "growth", sentence, "Lower the learning rate, or clip gradients.", step))
        return {"step": step, "gradients": rows}, findings

    def _shows(self, name: str, what: str, is_so: bool) -> bool:
        """Whether it has shown for some looks in a row, said once."""
        key = (name, what)
        self._often[key] = self._often.get(key, 0) + 1 if is_so else 0
        return self._often[key] == _LOOKS


def _values(parameter: torch.Tensor) -> torch.Tensor | None:
    """What its gradient holds on this rank; None without one, and of a class whose values cannot be listed."""
    gradient = parameter.grad
    if gradient is None:
        return None
    values = values_of(gradient.coalesce() if gradient.is_sparse else gradient)
    return values if has_storage(values) else None


def _figures(values: torch.Tensor) -> torch.Tensor:
    x = as_real(values.detach()).float()
    if not x.numel():
        return torch.zeros(3, device=x.device)
    largest, range_ = x.abs().max(), torch.finfo(x.dtype)
    unit = largest.clamp(range_.tiny, range_.max)  # squares of what is below 1e-23 are zero
    return torch.stack([largest, unit * (x / unit).square().mean().sqrt(), (x == 0).float().mean()])


def _trend(name: str, what: str, sentence: str, advice: str, step: int) -> Finding:
    path, _, parameter = name.rpartition(".")
    identity = CallId(path, f"gradient.{parameter}", direction=BACKWARD)
    return Finding(identity, "", 0, what, TREND, "", sentence, advice, step=step)
