"""Multiplications that a ledger counts, held against torch's own counter."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import narrowcast as nc

MODELS = {
    "products": (torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4)), (3, 8)),
    "convolutions": (
        torch.nn.Sequential(torch.nn.Conv2d(4, 6, 3, stride=2), torch.nn.ConvTranspose2d(6, 4, 3, stride=2)),
        (2, 4, 9, 9),
    ),
    "attention": (torch.nn.MultiheadAttention(8, 2, batch_first=True), (2, 5, 8)),
}


def called(model, x):
    return model(x, x, x, need_weights=False)[0] if isinstance(model, torch.nn.MultiheadAttention) else model(x)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("backward", [False, True])
def test_a_ledger_counts_what_torch_counts(name, backward):
    """Half as many: torch counts the additions, too. Attention alone: torch's counter knows cuda's kernels, not the
    cpu's, whose backward makes the scores again. Convolutions have no groups: it forgets them in the gradient of the
    weight.
    """
    model, shape = MODELS[name]
    if name == "attention":
        model = model.eval()
    x = torch.randn(shape, requires_grad=True)

    def run():
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            out = called(model, x)
            if backward:
                out.sum().backward()

    with nc.record() as ledger, nc.autocast("cpu", torch.bfloat16):
        run()
    with FlopCounterMode(display=False) as counter:
        run()
    found = sum(tally.multiplications for tally in ledger.calls.values())
    assert 2 * found == counter.get_total_flops() > 0


def test_a_graph_counts_what_its_eager_code_counts():
    """The same calls, as its program has their shapes."""
    model, shape = MODELS["convolutions"]
    x = torch.randn(shape)
    with torch.no_grad():
        eager = nc.explain(model, (x,), under="bf16").ledger
        graph = nc.explain(model, (x,), under="bf16", front_end="export").ledger
    counts = [sum(t.multiplications for t in ledger.calls.values()) for ledger in (eager, graph)]
    assert counts[0] == counts[1] > 0


def test_what_multiplies_and_is_not_counted_says_so():
    """A call of which nobody knows how much it multiplies has no number, and no sum."""
    with nc.record() as ledger:
        torch.ops.aten._trilinear(*(torch.randn(2, 2) for _ in range(3)), [], [], [], [0])
    assert None in [tally.multiplications for tally in ledger.calls.values()]
