"""What a program keeps of a run on fake tensors is removed: its caches hold real tensors afterwards."""

import functools
from collections import OrderedDict

import pytest
import torch
from torch import nn

import narrowcast as nc

NAMES, PAIRS, ROWS, ORDERED, TABLE, ROWS_OF_ROWS, LISTS = {}, {}, [], OrderedDict(), None, [], {}


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


def in_a_list_of_lists(n):
    if not ROWS_OF_ROWS:
        ROWS_OF_ROWS.append([table(n)])
    return ROWS_OF_ROWS[0][0]


def in_a_list_in_a_dict(n):
    if n not in LISTS:
        LISTS[n] = [table(n)]
    return LISTS[n][0]


def in_an_object_of_its_own(keeper):
    return lambda n: keeper(n)


KEEPER = Keeper()
KEEPERS = {
    "global": in_a_global, "dict": in_a_dict, "tuple": in_a_tuple, "list": in_a_list, "ordered": in_an_ordered_dict,
    "default": in_a_default, "closure": in_a_closure, "lru_cache": in_an_lru_cache, "object": KEEPER,
    "list of lists": in_a_list_of_lists, "list in a dict": in_a_list_in_a_dict,
    "closed over": in_an_object_of_its_own(Keeper()), "bound method": Keeper().__call__,
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


@pytest.mark.parametrize("where", ["dict", "list", "parameter"])
def test_moments_that_a_step_makes_when_it_first_runs_are_no_fakes(where):
    """The steps that follow give what they give in a program that was not explained."""

    def program():
        torch.manual_seed(0)
        layer, moments = nn.Linear(6, 3), {"dict": {}, "list": []}
        x, y = torch.randn(8, 6), torch.arange(8) % 3

        def moment(number, parameter):
            new = [torch.zeros_like(parameter)]
            if where == "dict":
                return moments["dict"].setdefault(number, new)[0]
            if where == "list":
                moments["list"] += [new] * (len(moments["list"]) <= number)
                return moments["list"][number][0]
            if not hasattr(parameter, "moments"):
                parameter.moments = new
            return parameter.moments[0]

        def step():
            with nc.autocast("cpu", torch.bfloat16):
                loss = nn.functional.cross_entropy(layer(x).float(), y)
            layer.zero_grad()
            loss.backward()
            with torch.no_grad():
                for number, parameter in enumerate(layer.parameters()):
                    parameter.sub_(moment(number, parameter).lerp_(parameter.grad, 0.1))
            return loss.detach()

        return step

    step, other = program(), program()
    assert "fake" in nc.explain(step, ()).ran_on
    assert [float(step()) for _ in range(3)] == [float(other()) for _ in range(3)]


VERBS = {
    "explain": lambda step: nc.explain(step, (), run=True),
    "compare": lambda step: nc.compare(step, (), under="bf16", isolate=0),
    "capture": lambda step: nc.capture(step, ()),
    "check_training": nc.check_training,
}


@pytest.mark.parametrize("verb", VERBS)
def test_what_parameters_hold_is_as_before(verb):
    """A sum of gradients that a step keeps on its parameters."""

    def program():
        torch.manual_seed(0)
        layer, x = nn.Linear(6, 3), torch.randn(8, 6)
        for parameter in layer.parameters():
            parameter.total = torch.zeros_like(parameter)

        def step():
            layer.zero_grad()
            loss = layer(x).square().mean()
            loss.backward()
            with torch.no_grad():
                for parameter in layer.parameters():
                    parameter.total = parameter.total.lerp(parameter.grad, 0.1)
                    parameter.sub_(parameter.total)
            return loss.detach()

        return step

    step, other = program(), program()
    VERBS[verb](step)
    assert [float(step()) for _ in range(3)] == [float(other()) for _ in range(3)]
