"""What a model keeps outside of itself (in a dict of its file or class, in a function's cache) is as before a trial."""

import functools
import typing

import pytest
import torch
from torch import nn

import narrowcast as nc

TABLES = {}
X = torch.randn(40, 16, generator=torch.Generator().manual_seed(0))


def table(count):
    return torch.arange(count).float()[:, None] @ torch.linspace(0.1, 1, 16)[None]


remembered = functools.lru_cache(table)


class InFile(nn.Module):
    """It keeps its table in a dict of this file."""

    def forward(self, x):
        if len(x) not in TABLES:
            TABLES[len(x)] = table(len(x))
        return x + TABLES[len(x)].sin()


class InClass(nn.Module):
    """In one of its class."""

    tables: typing.ClassVar[dict] = {}

    def forward(self, x):
        if len(x) not in self.tables:
            self.tables[len(x)] = table(len(x))
        return x + self.tables[len(x)].sin()


class InCache(nn.Module):
    """In the cache of a function."""

    def forward(self, x):
        return x + remembered(len(x)).sin()


class InMethod(nn.Module):
    """In that of a method."""

    @staticmethod
    @functools.lru_cache(maxsize=4)
    def made(count):
        return table(count)

    def forward(self, x):
        return x + self.made(len(x)).sin()


def forget():
    TABLES.clear()
    InClass.tables.clear()
    remembered.cache_clear()
    InMethod.made.cache_clear()


VERBS = {
    "compare": functools.partial(nc.compare, under="bf16"),
    "capture": functools.partial(nc.capture, under="bf16"),
    "explain": functools.partial(nc.explain, under="bf16", run=True),
    "repair": functools.partial(nc.repair, under="bf16"),
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("kind", [InFile, InClass, InCache, InMethod])
@pytest.mark.parametrize("is_function", [False, True], ids=["model", "function"])
def test_a_table_that_a_trial_makes_is_gone_after_it(verb, kind, is_function):
    """It was left in the format of the trial's last run, and the program went on with other bits."""
    model = kind()
    forget()
    expected = model(X)
    forget()
    VERBS[verb](functools.partial(model) if is_function else model, (X,))
    assert torch.equal(model(X), expected)
    forget()


@pytest.mark.parametrize("kind", [InFile, InClass, InCache, InMethod])
def test_each_run_of_a_comparison_makes_its_own_table(kind):
    """In the second run that of the first was found: the error of its low product was not seen."""
    forget()
    found = nc.compare(kind(), (X,), under="bf16")
    assert max(output.relative_error for output in found.outputs) > 1e-3, found
    forget()


def test_what_was_remembered_before_stays_where_a_trial_adds_nothing():
    """A cache that a trial only reads is left as it is."""
    forget()
    before = remembered(len(X))
    nc.compare(InCache(), (X,), under="bf16")
    assert remembered(len(X)) is before
    forget()
