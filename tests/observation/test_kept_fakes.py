"""What a program keeps of a run on fake tensors is removed: its caches hold real tensors afterwards."""

import functools
from collections import OrderedDict

import pytest
import torch
from torch import nn

import narrowcast as nc

NAMES, PAIRS, ROWS, ORDERED, TABLE = {}, {}, [], OrderedDict(), None


def table(n):
    return torch.arange(n).float()


def in_a_global(n):
    global TABLE
    if TABLE is None:
        TABLE = table(n)
    return TABLE


def in_a_dict(n):
    if n not in NAMES:
        NAMES[n] = table(n)
    return NAMES[n]


def in_a_tuple(n):
    PAIRS.setdefault("row", (table(n), n))
    return PAIRS["row"][0]


def in_a_list(n):
    if not ROWS:
        ROWS.append(table(n))
    return ROWS[0]


def in_an_ordered_dict(n):
    return ORDERED.setdefault(n, {}).setdefault("deep", table(n))


def in_a_default(n, kept={}):  # noqa: B006
    return kept.setdefault(n, table(n))


def _closing():
    kept = []

    def of(n):
        if not kept:
            kept.append(table(n))
        return kept[0]

    return of


in_a_closure = _closing()
in_an_lru_cache = functools.lru_cache(4)(table)
in_nested_results = functools.cache(lambda n: {"rows": [table(n)]})


class Keeper:
    """An object beside the model, and a class with a table of its own."""

    rows = None
    named: dict = {}  # noqa: RUF012

    def __init__(self):
        self.own = None

    def __call__(self, n):
        if self.own is None:
            self.own = table(n)
        return self.own

    @classmethod
    def of_class(cls, n):
        if cls.rows is None:
            cls.rows = table(n)
        return cls.rows + cls.named.setdefault(n, table(n))

    @staticmethod
    @functools.cache
    def cached(n):
        return table(n)


KEEPER = Keeper()
KEEPERS = {
    "global": in_a_global, "dict": in_a_dict, "tuple": in_a_tuple, "list": in_a_list, "ordered": in_an_ordered_dict,
    "default": in_a_default, "closure": in_a_closure, "lru_cache": in_an_lru_cache, "object": KEEPER,
    "nested results": lambda n: in_nested_results(n)["rows"][0], "class": Keeper.of_class, "method": Keeper.cached,
}  # fmt: skip


class Model(nn.Module):
    """A layer beside a table that is computed once."""

    def __init__(self, keep):
        super().__init__()
        self.layer, self.keep = nn.Linear(8, 8), keep

    def forward(self, x):
        return self.layer(x) + self.keep(x.shape[-1])


@pytest.mark.parametrize("name", KEEPERS)
def test_a_table_that_a_program_computes_once_stays_real(name):
    """Explained first, on fake tensors; then run: the result is a plain tensor, and what a fresh table gives."""
    model, x = Model(KEEPERS[name]), torch.randn(2, 8)
    assert "fake" in nc.explain(model, (x,)).ran_on
    result = model(x)
    expected = model.layer(x) + table(8) * (2 if name == "class" else 1)
    assert type(result) is torch.Tensor and torch.equal(result, expected)
    nc.explain(model, (x,))  # now it is kept, and stays
    assert type(model(x)) is torch.Tensor


def test_a_function_s_own_table_stays_real():
    """A function in place of a model."""

    def call(x, kept=[]):  # noqa: B006
        if not kept:
            kept.append(table(8))
        return x @ torch.ones(8, 8) + kept[0]

    x = torch.randn(2, 8)
    nc.explain(call, (x,))
    assert type(call(x)) is torch.Tensor
