"""Products of many shapes: every kernel keeps within the bound by which `compare` judges it. Which kernel a library
takes, whether it adds up parts in the low format, and when it adds a bias depend on the shapes and how they lie.
"""

from __future__ import annotations

import random

import torch
from context import Context
from torch import nn

import narrowcast as nc

SIZES = (1, 2, 3, 4, 5, 8, 13, 16, 20, 32, 64, 128, 512)
TERMS = (2, 3, 4, 6, 8, 9, 10, 12, 16, 20, 24, 28, 32, 40, 48, 64, 96, 128, 256, 512)
SEED, OF_ONE_RUN, RUNS = 2028, 100, 2


class Products(nn.Module):
    """A product, a product with a bias before it, and a linear layer, of each shape (rows, columns, terms)."""

    def __init__(self, shapes: list[tuple[int, int, int]], device: str) -> None:
        super().__init__()
        self.shapes = shapes
        self.device = device

    def forward(self, one: torch.Tensor) -> list[torch.Tensor]:
        at, made = random.Random(SEED), []
        for rows, columns, terms in self.shapes:
            left, right = self._matrix(at, rows, terms) * one, self._matrix(at, terms, columns) * one
            bias = 3 * torch.randn(columns, device=self.device)
            made += [left @ right, torch.addmm(bias, left, right), nn.functional.linear(left, right.t(), bias)]
        return made

    def _matrix(self, at: random.Random, rows: int, columns: int) -> torch.Tensor:
        if at.random() < 0.5:
            return torch.randn(rows, columns, device=self.device)
        return torch.randn(columns, rows, device=self.device).t()


def run(context: Context) -> None:
    """Compare products of random shapes in both low formats, with partial sums in the low format and without."""
    at = random.Random(SEED)
    settings = torch.backends.cuda.matmul
    for format in ("bf16", "fp16"):
        name = f"allow_{format}_reduced_precision_reduction"
        before = getattr(settings, name)
        for is_reduced in (True, False):
            setattr(settings, name, is_reduced)
            try:
                for _ in range(1 if context.small else RUNS):
                    count = 10 if context.small else OF_ONE_RUN
                    shapes = [(at.choice(SIZES), at.choice(SIZES), at.choice(TERMS)) for _ in range(count)]
                    _compare(context, f"{format}, partial sums in it: {is_reduced}", format, shapes)
            finally:
                setattr(settings, name, before)


def _compare(context: Context, name: str, format: str, shapes: list[tuple[int, int, int]]) -> None:
    with context.attempt(name), torch.no_grad():
        torch.manual_seed(SEED)
        model = Products(shapes, context.device)
        one = torch.ones((), device=context.device)
        found = nc.compare(model, (one,), under=format, isolate=0)
        context.check(name, "" if found.verdict in ("round-off", "exact") else found.to_text()[:1500])
