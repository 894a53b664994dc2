"""A model of sixteen numbers in and four out, in any format, and a region; for tests of `nc.check_training`."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import narrowcast as nc
from narrowcast.reports.results.training import TrainingCheck

BF16, FP16 = torch.bfloat16, torch.float16


def region(dtype: torch.dtype = BF16) -> Any:
    return torch.autocast("cpu", dtype)


class Loop:
    """What a training script has."""

    def __init__(self, dtype: torch.dtype = torch.float32, lr: float = 1e-3) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4)).to(dtype)
        self.weights = list(self.net.parameters())
        self.average = copy.deepcopy(self.net)
        self.optimizer: Any = torch.optim.AdamW(self.weights, lr=lr)
        self.scaler: Any = torch.amp.GradScaler("cpu", init_scale=1024.0)
        self.x, self.y = torch.randn(8, 16, dtype=dtype), torch.arange(8) % 4

    def loss(self, rows: slice = slice(None), dtype: torch.dtype = BF16) -> torch.Tensor:
        with region(dtype):
            return cross_entropy(self.net(self.x[rows]), self.y[rows])

    def low_loss(self, rows: slice = slice(None)) -> torch.Tensor:
        """Of a model that was converted, without a region."""
        return cross_entropy(self.net(self.x[rows]).float(), self.y[rows])

    def train(self, loss: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def end(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()


def found_at(step: Callable[[Loop], Any], loop: Loop, kind: str) -> TrainingCheck:
    """The check of a step in which one thing is wrong, of this kind, at the line that says HERE."""
    check = nc.check_training(step, (loop,))
    wrong = [finding for finding in check.findings if finding.kind != "weights cast again"]
    assert [finding.kind for finding in wrong] == [kind], str(check)
    line = Path(wrong[0].file).read_text(encoding="utf-8").splitlines()[wrong[0].line - 1]
    assert line.endswith("# HERE"), str(check)
    return check


def is_right(step: Callable[[Loop], Any], loop: Loop) -> None:
    """Nothing is wrong with a step, and nobody failed to look."""
    check = nc.check_training(step, (loop,))
    assert check, str(check)
    assert not any("not inspected" in note for note in check.notes), str(check)
