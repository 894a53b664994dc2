"""Rules about modules, classes and functions hold in scripts and graphs where they hold in eager code; places are the
user's.
"""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import narrowcast as nc

pytestmark = pytest.mark.filterwarnings("ignore")


def helper(x, w):
    return torch.mm(x, w), F.gelu(x)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.queries = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
        self.keys = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
        self.w = nn.Parameter(torch.randn(4, 4))

    def own(self, x):
        return torch.mm(x, self.w)

    def forward(self, x):
        found = []
        for query, key in zip(self.queries, self.keys):  # noqa: B905 (TorchScript has no strict)
            found += [query(x), key(x)]
        y, z = helper(x, self.w)
        return found + [y, z, self.own(x)]  # noqa: RUF005 (TorchScript has no such star)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleDict({"a": Attention(), "b": Attention()})
        self.head = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)))

    def forward(self, x):
        found = []
        for _, block in self.blocks.items():
            found += block(x)
        return found + [self.head(x)]  # noqa: RUF005


RULES = {
    "a member of a list": nc.Rule("aten.linear", "full", module="blocks.a.keys.1"),
    "a glob": nc.Rule("aten.linear", "full", module="blocks.*.queries.*"),
    "all inside": nc.Rule("aten.linear", "full", module="head"),
    "a class": nc.Rule("aten.mm", "full", module_class="Attention"),
    "a class by its whole name": nc.Rule("aten.mm", "full", module_class=f"{__name__}.Attention"),
    "a class of torch": nc.Rule("aten.linear", "full", module_class="torch.nn.modules.container.Sequential"),
    "a function": nc.Rule("aten.mm", "full", function="*.helper"),
    "a method": nc.Rule("aten.mm", "full", function="*Attention.own"),
    "the outermost": nc.Rule("aten.mm", "full", function="*Model.forward"),
    "nobody": nc.Rule("aten.mm", "full", function="help"),
}
MAKE = {
    "script": lambda model, x, policy: nc.script(model, under=policy),
    "script inside": lambda model, x, policy: nc.script(model),
    "convert": lambda model, x, policy: nc.script(torch.jit.script(model), under=policy),
    "trace": lambda model, x, policy: nc.trace(model, x, under=policy),
    "export": lambda model, x, policy: nc.export(model, (x,), under=policy).module(),
    "strict export": lambda model, x, policy: nc.export(model, (x,), under=policy, strict=True).module(),
    "compile": lambda model, x, policy: nc.compile(model, under=policy, backend="aot_eager"),
}
LONG = ("export", "strict export", "compile")


@pytest.mark.parametrize(
    ("rule", "make"),
    [
        pytest.param(
            rule, make, marks=[pytest.mark.slow] if make in LONG and (row + n) % 3 else [], id=f"{rule}-{make}"
        )
        for row, rule in enumerate(RULES)
        for n, make in enumerate(MAKE)
    ],
)
def test_rules_hold_where_they_say(rule, make):
    """Module paths whole, list members included; class names without TorchScript's numbers; functions by name."""
    torch.manual_seed(0)
    model, x = Model(), torch.randn(2, 4)
    policy = nc.Policy.native().with_rules(RULES[rule])
    with nc.autocast("cpu", policy=policy):
        expected = model(x)
    if make == "convert" and RULES[rule].function is not None:
        with pytest.warns(nc.errors.ScriptWarning, match="rules about functions"):
            made = MAKE[make](model, x, policy)
        if RULES[rule].function == "*.helper":
            return
    else:
        made = MAKE[make](model, x, policy)
    if make == "script inside":
        with nc.autocast("cpu", policy=policy):
            found = made(x)
    else:
        found = made(x)
    assert [y.dtype for y in found] == [y.dtype for y in expected]
    assert all(map(torch.equal, found, expected))
    mixed = {y.dtype for y in expected} == {torch.bfloat16, torch.float32}
    assert mixed or rule == "nobody", "the rule matters"


def test_places_are_the_users():
    """A submodule's call in the library has the line that calls it."""
    program = nc.script(Model(), under="bf16")._narrowcast_methods["forward"].explained(0, {}).before
    lines = Path(__file__).read_text().splitlines()
    sites = {step.op: step.site for step in program.steps.values() if step.computes}
    assert sites["aten.linear.default"].file == __file__
    assert "self.head(x)" in lines[sites["aten.linear.default"].line - 1]
    assert "F.gelu" in lines[sites["aten.gelu.default"].line - 1]
    assert sites["aten.gelu.default"].module_path == "blocks.b"


def test_nothing_is_left_of_the_marks(tmp_path):
    """Neither in graphs nor in files nor in helpers that are scripted by themselves."""
    scripted = nc.script(Model(), under="bf16")
    scripted.save(tmp_path / "m.pt")
    for part in (scripted, scripted.head, torch.jit.script(helper), torch.jit.load(tmp_path / "m.pt")):
        assert "narrowcast e" not in str(part.graph) and "TimePoint" not in str(part.graph)
