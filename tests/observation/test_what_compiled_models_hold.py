"""A compiled model runs itself in a comparison: what it holds beside modules begins each run as it was."""

import random
from collections import deque

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import narrowcast as nc

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Holding(nn.Module):
    """Draws an order, averages in an array, keeps a queue, and trains a layer by an optimizer of its own."""

    def __init__(self, trains):
        super().__init__()
        self.layer, self.inner = nn.Linear(8, 8), nn.Linear(8, 8)
        self.order, self.average, self.queue = random.Random(4), np.zeros(2), deque([torch.ones(4, 8)], maxlen=3)
        self.optimizer, self.trains = torch.optim.SGD(self.inner.parameters(), 0.05, momentum=0.9), trains

    def forward(self, x):
        h = self.layer(x)
        if self.trains:
            with torch.enable_grad():
                self.optimizer.zero_grad()
                F.mse_loss(self.inner(h.detach()).float(), x).backward()
                self.optimizer.step()
            self.optimizer.zero_grad()
            return self.inner(h)
        rows = list(range(len(x)))
        self.order.shuffle(rows)
        self.average *= 0.9
        self.average += 0.1
        self.queue.append(h.detach())
        return h + self.layer(x[rows]) + float(self.average[0]) + torch.cat(list(self.queue)).mean(0)

    def held(self):
        momenta = [state["momentum_buffer"].tolist() for state in self.optimizer.state.values()]
        return self.order.getstate(), self.average.tolist(), len(self.queue), momenta, self.inner.weight.tolist()


@pytest.mark.parametrize("trains", [False, True])
def test_runs_of_a_comparison_are_alike_and_leave_it_as_it_was(trains):
    """Two runs of the reference would differ, and the user's training go on with other momenta."""
    torch.manual_seed(0)
    model, x = Holding(trains), torch.randn(4, 8)
    model(x)
    before = model.held()
    compiled = nc.compile(model, under="bf16", backend="aot_eager", backward="same_as_forward")
    found = nc.compare(compiled, (x,))
    assert found.verdict == "round-off", str(found)
    assert model.held() == before
