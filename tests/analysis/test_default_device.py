"""torch's default device is the user's: what we make for ourselves names its own."""

import ast
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._device import _device_constructors

import narrowcast as nc

SOURCES = sorted(Path(nc.__file__).parent.rglob("*.py"))
FACTORIES = {function.__name__ for function in _device_constructors()}


def test_every_new_tensor_names_its_device():
    """Or takes it with other options."""
    for file in SOURCES:
        calls = (node for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if isinstance(node, ast.Call))
        made = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr in FACTORIES
                and ast.unparse(call.func.value) == "torch"]  # fmt: skip
        unnamed = [call for call in made if not {"device", None} & {keyword.arg for keyword in call.keywords}]
        assert not unnamed, (file, [ast.unparse(call) for call in unnamed])


@pytest.fixture
def trained():
    """A model with inputs, and a step of its training."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))
    x, y = torch.randn(8, 16), torch.arange(8) % 4
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        optimizer.zero_grad()
        with nc.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return model, (x,), step


def said(model, args, step):
    """What every verb answers."""
    run = nc.capture(model, args, backward=True)
    with nc.watch() as watched:
        step()
    return (
        nc.compare(model, args, under=torch.float16, backward=True).verdict,
        nc.explain(model, args, under=torch.bfloat16, run=True).comparison.differences.verdict,
        nc.repair(model, args, under=torch.float16).verdict,
        nc.diff(run, nc.capture(model, args, under=torch.bfloat16, backward=True)).verdict,
        run.headroom().verdict, nc.check_training(step).verdict, watched.notes, len(watched.findings),
        nc.compile(model, under=nc.autocast("cpu", torch.bfloat16), backend="eager")(*args).dtype,
        nc.script(model, under=nc.autocast("cpu", torch.bfloat16))(*args).dtype,
    )  # fmt: skip


def test_another_default_device_changes_no_answer(trained):
    """The model is where it is; whoever trains on a GPU may have made that the default."""
    expected = said(*trained)
    with torch.device("meta"):
        assert said(*trained) == expected
