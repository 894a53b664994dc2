"""Random programs compute the same as Python in eager regions and as scripts: dtypes, bits, gradients."""

import os
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings

import narrowcast as nc
from narrowcast.eager.record import _native_ops
from narrowcast.eager.registered import install_visiting, remove_visiting

sys.path.insert(0, str(Path(__file__).parent))
from script_programs import functions, rounding, uses_all
from sources import load

pytestmark = pytest.mark.filterwarnings("ignore")
EXAMPLES = int(os.environ.get("NARROWCAST_SCRIPTS", "60"))
SAME = "NARROWCAST_SCRIPTS" not in os.environ  # the same programs each time; `make conformance` tries new ones


def run(function, flag, n, around):
    """Outputs and gradients, or "error"."""
    torch.manual_seed(0)
    x, w, b = torch.randn(4, 4), torch.randn(4, 4) / 2, torch.randn(4)
    leaves = [t.requires_grad_() for t in (x, w, b)]
    try:
        with around():
            found = function(*leaves, flag, n)
        torch.stack([o.double().tanh().sum() for o in found]).sum().backward()
    except (RuntimeError, nc.errors.NarrowcastError) as error:
        return f"error: {error}"
    return [*found, *[leaf.grad for leaf in leaves]]


def differences(expected, found, rounded=0.0, whole=True):
    """What differs: an output's dtype or bits, a gradient by more than a part of it.

    whole: eager code has no errors in what nothing uses.
    """
    if isinstance(expected, str) or isinstance(found, str):
        alike = isinstance(expected, str) == isinstance(found, str) or (isinstance(expected, str) and not whole)
        return [] if alike else [(str(expected)[-300:], str(found)[-300:])]
    if len(expected) != len(found):
        return [f"{len(expected)} values in eager code, {len(found)}"]
    wrong = []
    for n, (a, b) in enumerate(zip(expected, found, strict=True)):
        if (a is None) != (b is None) or (a is not None and a.dtype is not b.dtype):
            wrong.append((n, a if a is None else a.dtype, b if b is None else b.dtype))
        elif a is not None:
            a, b = a.detach().nan_to_num(), b.detach().nan_to_num()
            close = n >= len(expected) - 3 and (a - b).norm() <= rounded * a.norm() + bool(rounded) * 1e-6
            if not close and not torch.equal(a, b):
                wrong.append((n, (a - b).abs().max().item()))
    return wrong


@pytest.fixture
def one_weight_cache():
    """Tests before this one may have left kernels of ours on some ops, whose weight cache is another than torch's."""
    install_visiting(_native_ops("cpu"), "cpu")
    yield
    remove_visiting("cpu")


@pytest.mark.usefixtures("one_weight_cache")
@settings(max_examples=EXAMPLES, derandomize=SAME, deadline=None, suppress_health_check=list(HealthCheck))
@given(functions())
def test_random_scripts_equal_eager(text):
    """By themselves and inside a region; a program that fails is shrunk to a small one."""
    module = load(text)
    scripted = nc.script(module.program)
    low = module.LOW
    for flag, n in ((True, 2), (False, 1)):
        for name, around in (
            ("alone", lambda: nc.autocast("cpu", enabled=False)),
            ("inside", lambda: nc.autocast("cpu", low)),
        ):
            if name == "alone":
                around = torch.enable_grad
            expected = run(module.program, flag, n, around)
            for _ in range(2):
                wrong = differences(expected, run(scripted, flag, n, around), rounding(text), uses_all(text))
                assert not wrong, f"flag={flag} n={n} {name}: {wrong}\n{text[text.index('def program') :]}"


def test_the_comparison_sees_what_differs():
    """Another dtype, another bit, an error."""
    a, b = torch.ones(2), torch.ones(2, dtype=torch.bfloat16)
    assert differences([a], [b]) and differences([a], [a + 1e-6]) and differences("error", [a])
    assert differences([a], "error", whole=False) and not differences("error", [a], whole=False)
    assert not differences([a], [a]) and differences([a], [a, a])
