"""Masks of -1e9 become infinite in fp16, which is the same to a softmax: nobody tells of them."""

import pytest
import torch
from torch import nn

import narrowcast as nc

LENGTH = 9
SEEN = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
MASKS = {
    "a number where it is not seen": lambda s: torch.where(SEEN, s, torch.tensor(-1e9)),
    "a number that is cast": lambda s: torch.where(SEEN, s, torch.tensor(-1e9).to(s.dtype)),
    "added": lambda s: s + (1 - SEEN.to(s.dtype)) * -1e9,
    "subtracted": lambda s: s * SEEN - 1e9 * (1 - SEEN.to(s.dtype)),
    "a power of two": lambda s: s - (~SEEN).to(s.dtype) * 2.0**30,
    "scaled with the scores": lambda s: (s * 3 - (~SEEN).to(s.dtype) * 1e9) / 3,
}


class Attention(nn.Module):
    def __init__(self, mask):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))
        self.mask = mask

    def forward(self, x):
        v = self.v(x)
        return self.mask(self.q(x) @ self.k(x).mT / 4).softmax(-1).type_as(v) @ v


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_a_mask_beyond_fp16_is_the_same_to_a_softmax(mask):
    """The watch has no finding, the comparison is round-off, and headroom counts every call as fitting fp16."""
    model, x = Attention(mask), torch.randn(2, LENGTH, 16)
    with nc.watch() as found, nc.autocast("cpu", "fp16"):
        model(x)
    assert found.first is None, str(found.first)
    assert nc.compare(model, (x,), under="fp16", isolate=0).verdict == "round-off"
    assert not nc.capture(model, (x,)).headroom().calls("fp16")


def test_a_row_in_which_nothing_is_seen_is_told():
    """Infinities alone make NaN of a softmax."""
    model = Attention(lambda s: s + torch.full((LENGTH, LENGTH), -1e9).to(s.dtype))
    with nc.watch() as found, nc.autocast("cpu", "fp16"):
        model(torch.randn(2, LENGTH, 16))
    assert found.first is not None and "NaN" in found.first.sentence


def test_scores_that_overflow_are_told():
    """They are not one number, and not that far out."""
    model = Attention(lambda s: s * 1e5)
    with nc.watch() as found, nc.autocast("cpu", "fp16"):
        model(torch.randn(2, LENGTH, 16))
    assert found.first is not None and found.first.id.op == "aten.mul.Tensor"


@pytest.mark.parametrize("sizes", [[1e3, 1.0, 2.0], [1e3, 1e3, 2.0], [2e3] * 3, [1e4, 1.0, 2.0], [1633.0]], ids=str)
def test_a_result_that_overflows_is_no_mask(sizes):
    """A square that fp32 holds and fp16 does not: one element, two alike, all of them, a number with one digit."""
    identity = nn.Linear(len(sizes), len(sizes), bias=False)
    nn.init.eye_(identity.weight)
    found = nc.compare(lambda x: identity(x).square(), (torch.tensor(sizes),), under="fp16", isolate=0)
    assert found.verdict == "not finite" and found.outputs[0].relative_error == float("inf"), str(found)


@pytest.mark.parametrize("run", [nc.compare, nc.capture, lambda model, inputs, under: in_region(model, inputs)])
@pytest.mark.parametrize("said", ["non-finite", "failed to converge"])
def test_the_error_of_a_decomposition_of_what_is_not_finite_sends_to_watch(run, said):
    """Torch says that it was given NaN, or of infinity alone that it does not converge, and not by which call."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(8, 8)

    def model(x):
        large = layer(x) * 1e5
        large = large if said == "non-finite" else large.abs()
        return torch.linalg.svd((large.T @ large).float())[1]

    with pytest.raises(RuntimeError, match=said) as raised:
        run(model, (torch.randn(4, 8),), under="fp16")
    (note,) = raised.value.__notes__
    assert "nc.watch()" in note and f"test_masks_beyond_fp16.py:{model.__code__.co_firstlineno + 3}" in note


def in_region(model, inputs):
    """Run a model in a region in fp16."""
    with nc.autocast("cpu", torch.float16):
        return model(*inputs)
