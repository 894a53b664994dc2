"""Measures what is lost where the gradients of several backwards are added up in a low format."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from narrowcast.core.policy import Site
from narrowcast.observation.statistics.by_storage import ByStorage
from narrowcast.output.words import counted, number_text
from narrowcast.runtime.torch_bridge import FORMATS
from narrowcast.runtime.torch_surface.dispatch import quietly
from narrowcast.training.check.gradients import Found


@dataclass(slots=True, eq=False)
class _ExactGradient:
    """A gradient as it would be in fp32, of how many backwards, and the squares of what it is off and of itself."""

    exact: torch.Tensor
    count: int = 1
    off: float = 0.0
    size: float = 0.0


class Accumulated:
    """Adds up in fp32, too, what backwards add to gradients in a low format."""

    def __init__(self) -> None:
        self._sums: ByStorage[_ExactGradient] = ByStorage()
        self._met: tuple[torch.dtype, Site] | None = None
        self._worst: list[_ExactGradient] = []

    def meets(self, dtype: torch.dtype, site: Site) -> None:
        """Note that gradients are added up in a low format at a line."""
        self._met = self._met or (dtype, site)

    def adds(self, gradient: torch.Tensor, added: object, site: Site) -> None:
        """Note that a backward is about to add to a gradient."""
        self.meets(gradient.dtype, site)
        if not isinstance(added, torch.Tensor) or added.shape != gradient.shape:
            return
        with quietly():
            known = self._sums.setdefault(gradient, lambda: _ExactGradient(gradient.detach().float()))
            known.exact = known.exact + added.float()
            rounded = (gradient + added).float()
            known.count += 1
            known.off = float((rounded - known.exact).square().sum())
            known.size = float(known.exact.square().sum())

    def steps(self) -> None:
        """Note that an optimizer uses the gradients: what comes next is another sum."""
        self._worst += self._sums.living()
        self._sums = ByStorage()

    def found(self) -> Iterator[Found]:
        """Yield that gradients were added up in a low format since this was asked last, and how far that is off."""
        if self._met is None:
            return
        (dtype, site), sums = self._met, [*self._worst, *self._sums.living()]
        self._met, self._worst = None, []
        off, size = sum(one.off for one in sums), sum(one.size for one in sums)
        far = f", {number_text((off / size) ** 0.5)} off their sum in fp32 (relative, L2)" if size else ""
        of = counted(max(one.count for one in sums), "backward") if sums else "several backwards"
        yield (
            "gradients added up in a low format",
            f"the gradients of {of} are added up in {FORMATS[dtype]}{far}: what is less than half a unit of the sum is "
            "lost",
            "Add them up in fp32: keep the weights in fp32 (model.float()) and run the forward in a region; or "
            "total.add_(weight.grad.float()) with a total in fp32.",
            site,
        )
