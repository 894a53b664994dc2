"""Noise that moves values by up to one unit in the last place, to see how far round-off may go."""

from __future__ import annotations

import torch

from narrowcast.observation.trial.finiteness import is_finite
from narrowcast.observation.trial.output_errors import MASKED, is_masked

_LENGTH = 262_139
"""A prime, so that rows of a tensor do not line up with it; a strip of it in fp32 stays in a core's cache."""


class Noise:
    """Uniform numbers of a seed, from -1 to 1, or to 0 if they only shrink values: one strip, which tensors read one
    after the other, over and over.

    To draw again for each element takes longer than most of the calls that it is for.
    """

    def __init__(self, seed: int, shrinks: bool = False) -> None:
        self._strip = 2 * torch.rand(_LENGTH, generator=torch.Generator().manual_seed(seed), device="cpu") - 1
        if shrinks:
            self._strip = -self._strip.abs()
        self._factors: dict[tuple[torch.device, torch.dtype, float], torch.Tensor] = {}
        self._at = 0

    def moved(self, tensor: torch.Tensor, unit: float, least: float = 0.0) -> torch.Tensor:
        """Return a copy, each value times 1 + unit * noise, and least * noise added to those that are not zero.

        tensor: floating, strided; unit: a format's epsilon; least: its smallest value. What the tensor's own format
        cannot hold then stays as it was, and so does what masks are filled with.
        """
        key = (tensor.device, tensor.dtype, unit)
        factors = self._factors.get(key)
        if factors is None:
            strip = self._strip.double() if tensor.dtype is torch.float64 else self._strip
            factors = self._factors[key] = (1 + unit * strip).to(tensor)
        noisy = tensor.detach().clone()  # dense, in whatever order of dimensions
        flat, done = noisy.as_strided((noisy.numel(),), (1,)), 0
        while done < flat.numel():
            part = flat[done : done + _LENGTH - self._at]
            part.mul_(factors[self._at : self._at + part.numel()])
            done, self._at = done + part.numel(), (self._at + part.numel()) % _LENGTH
        if least:
            noisy += torch.where(noisy == 0, 0.0, least * (2 * torch.rand_like(noisy, dtype=torch.float32) - 1))
        if not is_finite(noisy) or bool((tensor <= MASKED).any()):
            x = tensor.detach().double()
            noisy = torch.where(is_masked(x) | torch.isinf(noisy), tensor.detach(), noisy)
        return noisy
