"""What is easily written by mistake, and would do nothing: an error says what to write."""

import importlib.util
import os
import re
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import narrowcast as nc

GOLDEN = Path(__file__).parents[1] / "golden/script-misuses.txt"
_spec = importlib.util.spec_from_file_location("script_misuses", Path(__file__).with_name("script_misuses.py"))
misuses = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(misuses)


@pytest.mark.parametrize("target", ["encoder", None, 3, [torch.nn.Linear(2, 2)]])
def test_what_is_no_target_of_a_pin(target):
    """A name, None or a list beside a format; as a decorator a pin still takes the format alone."""
    with pytest.raises(nc.errors.PinError, match="Give a Module, a class of Modules, or a function"):
        nc.pin(target, "bf16")
    assert nc.pin("bf16")(torch.nn.Linear(2, 2))(torch.ones(2)).dtype is torch.bfloat16
    assert nc.pin(format=torch.bfloat16)(torch.nn.Linear(2, 2))(torch.ones(2)).dtype is torch.bfloat16
    with pytest.raises(nc.errors.NarrowcastError, match="encoder"):
        nc.pin("encoder")


@pytest.mark.parametrize(
    ("op", "name"),
    [(F.gelu, "aten.gelu"), (torch.ops.aten.mm.default, "aten.mm.default"), (torch.softmax, "aten.softmax")],
    ids=["function", "overload", "method"],
)
def test_a_rule_names_its_op(op, name):
    """A function or an op object in its place: the name is in the error."""
    with pytest.raises(nc.errors.PolicyError, match=rf'Rule\("{name}", "full"\)'):
        nc.Rule(op, "full")


def by_hand(x):
    region = nc.autocast("cpu", torch.bfloat16)
    region.__enter__()
    y = torch.mm(x, x)
    region.__exit__(None, None, None)
    return y


def with_statement(x):
    with nc.autocast("cpu", torch.bfloat16):
        y = torch.mm(x, x)
    return y


@pytest.mark.filterwarnings("ignore")
def test_regions_that_a_script_would_ignore():
    """Entered by hand, or compiled by torch.jit.script: not fp32 without a word."""
    x = torch.randn(3, 3)
    assert nc.script(with_statement)(x).dtype is torch.bfloat16
    with pytest.raises(nc.errors.ScriptError, match=r"test_misuse.py:\d+(?s:.*)Use a with statement: with torch"):
        nc.script(by_hand)
    with pytest.raises(torch.jit.Error, match=r"narrowcast.autocast does nothing here.*narrowcast.script"):
        torch.jit.script(with_statement)(x)


def answer(text, path):
    """What `nc.script` says of a program."""
    path.write_text(misuses.HEADER + text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    try:
        nc.script(module.program)
    except Exception as error:
        said = "\n\n".join([str(error).strip(), *getattr(error, "__notes__", ())])
        said = said.replace(f"{path.parent}/", "").replace(f"{Path(__file__).parent}/", "")
        said = re.sub(r"(test_misuse.py):\d+", r"\1", re.sub(" at 0x[0-9a-f]+", "", said))
        return f"{type(error).__name__}: {said}"
    return "no error"


def as_kept(answers):
    """The text of the golden file."""
    return "\n\n".join(f"== {name}\n{said}" for name, said in answers.items()) + "\n"


TORCHS_OWN = {"an autograd function in a region"}
"""What torch itself refuses from 2.14 on, before a region is read."""


@pytest.mark.filterwarnings("ignore")
def test_every_misuse_of_a_region_in_a_script_has_an_answer(tmp_path):
    """With the line and what to write: kept as it was read by a person. NARROWCAST_GOLDEN=write writes it again."""
    found = {name: answer(text, tmp_path / f"misuse_{n}.py") for n, (name, text) in enumerate(misuses.MISUSES.items())}
    text = as_kept(found)
    if os.environ.get("NARROWCAST_GOLDEN") == "write":
        GOLDEN.write_text(text)
    for name, said in found.items():
        assert re.search(r'Error(?s:.*)(misuse_\d+.py(:|", line)|test_misuse.py)', said), (name, said)
    kept = dict(part.split("\n", 1) for part in GOLDEN.read_text().removesuffix("\n").split("== ")[1:])
    kept = {name: said.removesuffix("\n\n") for name, said in kept.items()}
    for name in TORCHS_OWN & found.keys():
        if re.search("is currently not supported in Torchscript|cannot be used in a type expression", found[name]):
            found[name] = kept[name]
    assert as_kept(found) == GOLDEN.read_text()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("freeze", [False, True])
def test_scripts_are_no_code_to_capture(freeze):
    """Not torch's own error: what to give, and what does the same for a script."""
    script = torch.jit.script(torch.nn.Linear(4, 4).eval())
    script = torch.jit.freeze(script) if freeze else script
    x = torch.randn(2, 4)
    calls = (
        lambda: nc.compile(script, under="bf16"),
        lambda: nc.export(script, (x,), under="bf16"),
        lambda: nc.explain(script, (x,), under="bf16", front_end="compile"),
        lambda: nc.explain(script, (x,), under="bf16", front_end="export"),
    )
    for call in calls:
        with pytest.raises(nc.errors.CaptureError, match=r"no Python code.*\n.*narrowcast.script"):
            call()
    assert nc.script(script, under="bf16")(x).dtype is torch.bfloat16


def test_a_script_that_was_optimized_for_inference():
    """Its weights are no tensors any more; the way round is in the error, and works."""
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU()).eval()
    x = torch.randn(2, 3, 5, 5)
    with pytest.raises(nc.errors.ScriptError, match=r"optimize the result: torch.jit.optimize_for_inference"):
        nc.script(torch.jit.optimize_for_inference(torch.jit.script(model)), under="bf16")
    frozen = torch.jit.freeze(torch.jit.script(model))
    with nc.autocast("cpu", torch.bfloat16), torch.no_grad():
        expected = model(x)
    with torch.no_grad():
        found = torch.jit.optimize_for_inference(torch.jit.freeze(nc.script(frozen, under="bf16").eval()))(x)
    assert found.dtype is torch.bfloat16 and torch.allclose(found.float(), expected.float(), rtol=0.02, atol=0.02)
