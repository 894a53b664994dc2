"""What a trial runs is a copy of the model, of which the model keeps nothing and from which it gets nothing."""

import copy
import threading
from collections import OrderedDict

import torch
from torch import nn

from narrowcast.observation.trial.isolation import isolated


class CopiesItself(nn.Module):
    """A module whose class says how it is copied."""

    def __init__(self) -> None:
        super().__init__()
        self.copies = 0

    def __deepcopy__(self, memo: dict[int, object]) -> "CopiesItself":
        other = CopiesItself()
        other.copies = self.copies + 1
        return other


class Whole(nn.Module):
    """Every way in which one attribute may depend on another."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(3, 3)
        self.other = nn.Linear(3, 3)
        self.other.weight = self.one.weight
        self.again = self.one
        self.listed = [self.one, {"inside": self.other}]
        self.empty = {}
        self.same_empty = self.empty
        self.by_name = OrderedDict(first=self.empty)
        self.own = CopiesItself()
        self.recurrent = nn.GRU(3, 3)
        self.cache = torch.zeros(3)
        self.register_buffer("count", torch.zeros(()), persistent=False)
        self.root = [self]
        self.one.register_forward_hook(self.hook)

    def hook(self, module: nn.Module, args: object, output: torch.Tensor) -> None:
        """Write what only the copy may see."""
        self.cache += 1
        self.count += 1
        self.empty["seen"] = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.recurrent(self.other(self.one(x)))[0]


def test_a_copy_has_the_shape_of_a_deep_copy():
    """Modules, tensors and holders that are one in the model are one in its copy; classes that copy themselves do."""
    model, x = Whole(), torch.ones(2, 3)
    with isolated(model, (x,), {}, False) as run:
        own = run.model
        assert own is not model and own.root[0] is own and own.again is own.one and own.listed[0] is own.one
        assert own.listed[1]["inside"] is own.other and own.other.weight is own.one.weight is model.one.weight
        assert own.empty is own.same_empty is own.by_name["first"] is not model.empty
        assert own.own.copies == 1
        assert own._non_persistent_buffers_set == {"count"} and own._modules.keys() == model._modules.keys()
        expected = copy.deepcopy(model)(x)
        assert torch.equal(run(), expected)
        assert own.count == 1 and own.cache.sum() == 3 and own.empty["seen"] is own.one
    assert model.count == 0 and model.cache.sum() == 0 and not model.empty


def test_what_has_no_copy_is_shared():
    """A lock that a module holds is the model's own in the copy, everything else is not."""
    model = Whole()
    model.lock = threading.Lock()
    with isolated(model, (torch.ones(2, 3),), {}, False) as run:
        run()
        assert run.model is not model and run.model.lock is model.lock and run.model.one is not model.one
    assert model.count == 0
