"""A part of the equality table in every test run; `make conformance` makes the whole."""

import importlib.util
import sys
import warnings
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def load(name):
    spec = importlib.util.spec_from_file_location(f"conformance_{name}", HERE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


graphs = load("graphs")
models = graphs.models


SLOW = [pytest.mark.slow]
LOADED = (models.gpt, models.llama, models.vit, models.resnet, models.unet, models.minilm)
QUICK = ((models.gpt, "custom"), (models.resnet, "native"))
PAIRS = [
    # a decoder and a convolutional model, each with one policy; all others in `make conformance`
    pytest.param(loaded, policy, id=f"{loaded.__name__}-{policy}", marks=[] if (loaded, policy) in QUICK else SLOW)
    for loaded in LOADED
    for policy in ("custom", "native")
]


@pytest.mark.parametrize(("loaded", "policy"), PAIRS)
def test_eager_compiled_and_exported_agree(loaded, policy):
    """Outputs, gradients, buffers: dtypes and bits."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        row = graphs.check(loaded, torch.bfloat16, graphs.POLICIES[policy], inductor=False)
    assert row["compiled"] == [] and row["exported"] == [] and row["fallbacks"] == []
    assert row["graphs"] == 1 and row["casts"] > 0 and not row["refused in eager"]


def test_the_comparison_sees_a_difference():
    """Shown a run that differs in one bit, and one that differs in a dtype."""
    layer = torch.nn.Linear(2, 2)
    x = torch.randn(1, 2)
    one, two, three = (graphs.Run(layer, call) for call in (
        lambda: layer(x).detach(), lambda: layer(x).detach() + 1e-6, lambda: layer(x).detach().double()))  # fmt: skip
    assert one.differences(one) == []
    assert len(one.differences(two)) == 1 and len(one.differences(three)) == 1
