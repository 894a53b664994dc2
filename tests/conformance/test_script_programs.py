"""Random programs compute the same as Python in eager regions and as scripts: dtypes, bits, gradients."""

import os
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from narrowcast.frontends.eager.registered import install_visiting, remove_visiting
from narrowcast.observation.observer.mode import _native_ops

sys.path.insert(0, str(Path(__file__).parent))
from script_programs import functions, numbered
from script_runs import FRONT_ENDS, Runs, differences, judged
from sources import load

pytestmark = pytest.mark.filterwarnings("ignore")
EXAMPLES = int(os.environ.get("NARROWCAST_SCRIPTS", "15"))
SAME = "NARROWCAST_SCRIPTS" not in os.environ  # the same programs each time; others by hand


@pytest.fixture
def one_weight_cache():
    """Tests before this one may have left kernels of ours on some ops, whose weight cache is another than torch's."""
    install_visiting(_native_ops("cpu").values(), "cpu")
    yield
    remove_visiting("cpu")


@pytest.mark.usefixtures("one_weight_cache")
@settings(max_examples=EXAMPLES, derandomize=SAME, deadline=None, suppress_health_check=list(HealthCheck))
@given(functions())
def test_random_scripts_equal_eager(text):
    """By themselves and inside a region; a program that fails is shrunk to a small one."""
    left, _ = judged(Runs(load(text), text).wrong("script"), "script", text)
    assert not left, f"{left[:3]}\n{text}"


def test_a_numbered_program_is_the_same_each_time():
    """The sweep knows programs by their numbers."""
    assert numbered(7) == numbered(7) != numbered(8)


@pytest.mark.usefixtures("one_weight_cache")
@pytest.mark.parametrize("front_end", FRONT_ENDS[:5])  # the others take seconds, and are run by the same code
def test_a_front_end_that_leaves_the_region_out_is_found(front_end, monkeypatch):
    """A program that computes otherwise than the one that it is compared with."""
    text = PROGRAM.format(low="torch.bfloat16")
    module, other = load(text), load(PROGRAM.format(low="torch.float32"))
    runs = Runs(module, text)
    assert not runs.wrong(front_end)
    runs = Runs(module, text)
    runs.module = other
    assert judged(runs.wrong(front_end), front_end, text)[0]


PROGRAM = """
from typing import List

import torch
from torch import Tensor

LOW = torch.bfloat16
HELD, OUTERMOST = 1, 2


def program(x: Tensor, w: Tensor, b: Tensor, flag: bool, n: int) -> List[Tensor]:
    with torch.autocast("cpu", dtype={low}):
        return [torch.mm(x, w) + b]
"""


def test_the_comparison_sees_what_differs():
    """Another dtype, another bit, an error; of gradients by which part."""
    a, b = torch.ones(2), torch.ones(2, dtype=torch.bfloat16)
    for other in ([b], [a + 1e-6], "error", [a, a], [None]):
        assert differences([a], other, gradients=0) and differences([a], other, gradients=1), other
    assert differences("error", [a]) and not differences("error", [a], whole=False) and not differences([a], [a])
    assert differences([a, a], [a, a + 0.5], gradients=1) == [("gradient 0 differs", 0.5)]
