"""Rules about ops that kernels of others call, of numbers, and of code that is in no file: one decision everywhere."""

import linecache

import pytest
import torch
from torch import nn

import narrowcast as nc

pytestmark = pytest.mark.filterwarnings("ignore")

CALLS = {
    "1 - x": "aten.sub",
    "x.logsumexp(0)": "aten.amax",
    "torch.logsumexp(x, 0) + 1": "aten.sub",
    "x.relu()": "aten.clamp_min",
    "torch.celu(x)": "aten.elu",
    "torch.dist(x, x + 1)": "aten.norm",
    "torch.rot90(x)": "aten.flip",
    "torch.ldexp(x, x)": "aten.pow",
    "torch.mvlgamma(x + 3, 2)": "aten.sum",
}
FORMS = {
    "export": lambda model, x, policy: nc.export(model, (x,), under=policy).module(),
    "compile": lambda model, x, policy: nc.compile(model, under=policy, backend="aot_eager", fullgraph=True),
    "script": lambda model, x, policy: nc.script(model, under=policy),
    "trace": lambda model, x, policy: nc.trace(model, (x,), under=policy),
}


def module_of(tmp_path, expression, name="calls"):
    """Return a model that computes this, written to a file, which TorchScript reads."""
    text = f"import torch\n\n\nclass Model(torch.nn.Module):\n    def forward(self, x):\n        return {expression}\n"
    file = tmp_path / f"{name}.py"
    file.write_text(text)
    names = {"__name__": name}
    exec(compile(text, str(file), "exec"), names)
    return names["Model"]()


@pytest.mark.parametrize("expression", CALLS)
def test_a_rule_is_about_calls_of_the_program_alone(expression, tmp_path, fresh_dynamo):
    """What the kernel of `logsumexp` calls is none of them: no graph has it, nor does it run so in a dispatch mode."""
    model, x = module_of(tmp_path, expression), torch.rand(4, 4, generator=torch.Generator().manual_seed(0)) + 0.1
    policy = nc.Policy.native().with_rules(nc.Rule(CALLS[expression], "to(fp16)"))
    expected = model(x)
    with nc.autocast("cpu", policy=policy):
        assert torch.equal(model(x), expected)
        with nc.record() as ledger:
            assert torch.equal(model(x), expected)
    assert not ledger.casts
    for form in ("export", "compile", "trace"):
        assert torch.equal(FORMS[form](model, x, policy)(x), expected), form


def test_a_rule_about_the_call_itself_reaches_gradients_and_transforms(tmp_path):
    """In a Function, a checkpoint and a transform calls are the program's."""
    x = torch.randn(4, 4, requires_grad=True)
    policy = nc.Policy.native().with_rules(nc.Rule("aten.sub", "to(fp16)"))

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a):
            return a - 0.5 * a

        @staticmethod
        def backward(ctx, g):
            return g - 0.5 * g

    with nc.autocast("cpu", policy=policy):
        assert Twice.apply(x).dtype is torch.float16
        assert torch.utils.checkpoint.checkpoint(lambda a: a - 1, x, use_reentrant=False).dtype is torch.float16
        assert torch.vmap(lambda a: a - 1)(x).dtype is torch.float16
        with torch.inference_mode():
            assert (x - 1).dtype is torch.float16


NUMBERS = {
    "0.37 * x": "aten.mul.Tensor",
    "x + 0.3": "aten.add.Tensor",
    "x - 0.3": "aten.sub.Tensor",
    "1 - x": "aten.rsub.Scalar",
    "x / 3.0": "aten.div.Tensor",
    "0.3 / x": "aten.mul.Tensor",
    "x // 0.3": "aten.floor_divide.default",
    "torch.div(x, 0.7, rounding_mode='floor')": "aten.div.Tensor_mode",
    "torch.where(x > 0, x, 0.3)": "aten.where.self",
    "x.clone().mul_(0.37) * (0.3 * x)": "aten.mul.Tensor",
    "(x + 0.1) * (x + x)": "aten.add.Tensor",
}


@pytest.mark.sweep(one_in=2)
@pytest.mark.parametrize("form", ["script", "export", "compile"])
@pytest.mark.parametrize("expression", NUMBERS)
def test_a_script_names_calls_with_numbers_as_python_does(expression, form, tmp_path, fresh_dynamo):
    """TorchScript has overloads for numbers that Python never calls, and writes `1 - x` as two calls."""
    model, x = module_of(tmp_path, expression), torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    for where in ({}, {"call": 1}, {"call": 2}):
        policy = nc.Policy.native().with_rules(nc.Rule(NUMBERS[expression], "to(fp16)", **where))
        with nc.autocast("cpu", policy=policy):
            expected = model(x)
        found = FORMS[form](model, x, policy)(x)
        assert found.dtype is expected.dtype
        assert torch.equal(found, expected)
        assert where.get("call") == 2 or expected.dtype is torch.float16 or not torch.equal(expected, model(x))


def test_a_rule_about_sums_leaves_differences_from_a_number_alone(tmp_path):
    """`1 - x` is no sum, but a sum of what the user negates is one."""
    policy = nc.Policy.native().with_rules(nc.Rule("aten.add", "to(fp16)"))
    x = torch.randn(3)
    assert nc.script(module_of(tmp_path, "1 - x"), under=policy)(x).dtype is torch.float32
    assert nc.script(module_of(tmp_path, "-x + 1", "sums"), under=policy)(x).dtype is torch.float16


class Unread(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = nn.PReLU()

    def forward(self, x):
        self.part(x)
        return x @ x


def test_a_script_takes_a_rule_about_a_call_that_nothing_reads():
    """Its result is not cast back: there is none."""
    policy = nc.Policy.native().with_rules(nc.Rule("module.call", "inside", module="part"))
    model, x = Unread(), torch.randn(4, 4)
    with nc.autocast("cpu", policy=policy):
        assert torch.equal(nc.script(model, under=policy)(x), model(x))


CELL = """
import torch


def helper(x):
    return x @ x


class Model(torch.nn.Module):
    def forward(self, x):
        return helper(x) + (x @ x).float()
"""


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("file", ["/tmp/ipykernel_7/1234567890.py", "<ipython-input-1-abc>", "<python-input-3>"])
def test_rules_about_functions_hold_in_cells(file, form, monkeypatch, fresh_dynamo):
    """Notebooks and consoles keep the source of a cell in linecache, under a name that no file has."""
    monkeypatch.setitem(linecache.cache, file, (len(CELL), None, CELL.splitlines(True), file))
    names = {"__name__": "__main__"}
    exec(compile(CELL, file, "exec"), names)
    model, x = names["Model"](), torch.randn(4, 4)
    for function in ("*helper", "__main__.helper", "*Model.forward"):
        policy = nc.Policy.native().with_rules(nc.Rule("aten.matmul", "full", function=function))
        with nc.autocast("cpu", policy=policy), nc.record() as ledger:
            expected = model(x)
        assert {cast.file for cast in ledger.casts} == (set() if function == "*Model.forward" else {file})
        with nc.autocast("cpu", torch.bfloat16):
            assert not torch.equal(model(x), expected)
        assert torch.equal(FORMS[form](model, x, policy)(x), expected)


def test_a_file_that_is_written_again_has_its_new_functions(tmp_path, fresh_dynamo):
    """As after `importlib.reload`, or `%autoreload`."""
    file = tmp_path / "rewritten.py"
    for before in ("", "\n\n\n\ndef other(x):\n    return x\n\n\n"):
        text = f"{before}def helper(x):\n    return x @ x\n"
        file.write_text(text)
        linecache.checkcache(str(file))
        names = {"__name__": "rewritten"}
        exec(compile(text, str(file), "exec"), names)
        policy = nc.Policy.native().with_rules(nc.Rule("aten.matmul", "full", function="*helper"))
        compiled = nc.compile(names["helper"], under=policy, backend="aot_eager")
        assert compiled(torch.randn(4, 4)).dtype is torch.float32
