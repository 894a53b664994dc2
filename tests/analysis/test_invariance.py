"""`nc.check_invariance`: whether the numbers of one sample depend on its batch, its place, padding and caches."""

import copy

import pytest
import torch
from torch import nn

import narrowcast as nc
from narrowcast.errors import CheckError, RunError
from narrowcast.testing import assert_invariant


class ByShape(nn.Module):
    """A kernel that sums in another order where the batch is large: sound, and not the same bits."""

    def forward(self, x):
        parts = x.unbind(-1) if len(x) < 4 else x.flip(-1).unbind(-1)
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total


class Shares(nn.Module):
    def forward(self, x):
        return x / x.abs().amax()


def test_a_model_whose_samples_are_apart_is_invariant():
    """Elementwise ops, whatever the dimension of samples is."""
    for dim in (0, 1):
        found = nc.check_invariance(nn.ReLU(), torch.randn(3, 5), dim=dim)
        assert found.verdict == "invariant" and found and not found.varying, found
        assert len(found.variants) == 2 + 3 + 3


def test_a_kernel_that_depends_on_the_batch_is_told_from_a_fault():
    """With the first call whose bits change, and both shapes; not where the batch is small."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.ReLU(), ByShape())
    found = nc.check_invariance(model, torch.randn(1, 65))
    assert found.verdict == "batch shape" and found, found
    assert {v.verdict for v in found.variants if v.name.startswith("batch of 2")} == {"invariant"}
    varying = found.varying[0]
    assert varying.call.op == "aten.add.Tensor" and varying.call.module_path == "1"
    assert (
        varying.shapes == ("[1]", "[8]") and varying.place.startswith(__file__) and 0 < varying.error <= varying.bound
    )
    assert_invariant(model, torch.randn(1, 65))
    with pytest.raises(CheckError, match="Batch shape"):
        assert_invariant(model, torch.randn(1, 65), bits=True)


def test_what_samples_share_is_a_leak():
    """The largest of the batch, and statistics of a batch norm in training."""
    found = nc.check_invariance(Shares(), torch.randn(2, 6))
    assert found.verdict == "shared" and not found, found
    assert found.varying[0].call.op in ("aten.amax.default", "aten.div.Tensor") and found.varying[0].shared[0] > 0
    norm = nn.Sequential(nn.Conv1d(2, 4, 1), nn.BatchNorm1d(4))
    found = nc.check_invariance(norm, torch.randn(4, 2, 6), batches=(4,))
    assert {v.verdict for v in found.variants} == {"shared"} and "native_batch_norm" in found.variants[0].call.op, found
    assert nc.check_invariance(norm.eval(), torch.randn(4, 2, 6), batches=(4,))
    with pytest.raises(CheckError, match="depend on other samples"):
        assert_invariant(Shares(), torch.randn(2, 6))


def test_a_mask_of_the_inputs_and_what_has_no_samples_are_left_as_they_are():
    """Keyword arguments, booleans, and a table that all samples read."""

    class Model(nn.Module):
        def forward(self, x, mask, table):
            return (x @ table).masked_fill(mask, 0.0)

    inputs = {
        "x": torch.randn(2, 3),
        "mask": torch.tensor([[True, False, True, False]] * 2),
        "table": torch.randn(3, 4),
    }
    found = nc.check_invariance(Model(), inputs, batches=(2, 5))
    assert found and found.varying == [v for v in found.variants if v.verdict == "batch shape"], found


def test_the_model_is_left_as_it_is():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    before, mode = copy.deepcopy(model.state_dict()), model.training
    nc.check_invariance(model, torch.randn(2, 4))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert model.training is mode


class Words:
    """A protocol for a model that adds up its tokens, of a table, where a mask says so."""

    def length(self, inputs):
        return inputs["ids"].shape[1]

    def padded(self, inputs, before, after, fill):
        pad = lambda t, value: nn.functional.pad(t, (before, after), value=value)
        return {"ids": pad(inputs["ids"], fill), "mask": pad(inputs["mask"], 0)}

    def own(self, output, before, after):
        return output[:, before : output.shape[1] - after]

    def in_chunks(self, model, inputs, lengths):
        return None


class Sums(nn.Module):
    """is_masked: whether it heeds the mask."""

    def __init__(self, is_masked):
        super().__init__()
        self.table, self.is_masked = nn.Embedding(9, 4), is_masked

    def forward(self, ids, mask):
        x = self.table(ids)
        return (x * mask[..., None] if self.is_masked else x).cumsum(1)


@pytest.mark.parametrize("is_masked", [True, False])
def test_a_mask_that_is_not_heeded_is_found_by_padding(is_masked):
    """By a protocol of the user's; padding on the right changes nothing of a running sum."""
    torch.manual_seed(0)
    inputs = {"ids": torch.randint(1, 9, (1, 6)), "mask": torch.ones(1, 6)}
    found = nc.check_invariance(Sums(is_masked), inputs, decoding=Words(), batches=(2,))
    padded = {v.name: v.verdict for v in found.variants if v.name.startswith("padded")}
    assert len(padded) == 6 and {padded[name] for name in padded if "right" in name} == {"invariant"}
    left = {padded[name] for name in padded if "left" in name}
    assert left == ({"invariant"} if is_masked else {"cache or position"}), found


def test_errors():
    """A model that draws, and inputs without such a dimension."""
    for draws in (lambda x: x + torch.rand(()), nn.Dropout(0.5)):
        with pytest.raises(RunError, match="two runs of the same sample differ"):
            nc.check_invariance(draws, torch.randn(2, 3))
    with pytest.raises(RunError, match="no input has a dimension 1"):
        nc.check_invariance(nn.ReLU(), torch.randn(3), dim=1)


def test_samples_that_only_round_together_share_nothing():
    """A product of all samples in another order: bits depend on the others, by rounding alone; in fp64, too."""

    class Together(nn.Module):
        def forward(self, x):
            total = x.sum()  # taken away again
            return (x + total * 1e-2) - total * 1e-2

    for dtype in (torch.float32, torch.float64):
        found = nc.check_invariance(Together(), torch.randn(2, 64, dtype=dtype))
        assert found.verdict in ("batch shape", "invariant") and found, found


def test_a_leak_through_lengths_is_found():
    """Integers of other samples that one reads."""

    class Shortened(nn.Module):
        def forward(self, x, lengths):
            return x[:, : int(lengths.max())].sum(1) * lengths.max()

    found = nc.check_invariance(Shortened(), (torch.randn(3, 9), torch.tensor([5, 9, 3])))
    assert found.verdict == "shared" and not found, found


@pytest.mark.parametrize("name", ["the largest", "how many", "the longest row"])
def test_a_leak_through_whole_numbers_is_found(name):
    """Of the other samples that were given: those of the sample in another order would not show it."""
    torch.manual_seed(0)
    table, ids = nn.Embedding(50, 8), torch.randint(1, 40, (4, 10), generator=torch.Generator().manual_seed(1))
    ids[0, 6:] = 0
    of = {
        "the largest": lambda ids: table(ids) * ids.max(),
        "how many": lambda ids: table(ids) / len(ids.unique()),
        "the longest row": lambda ids: table(ids[:, : int((ids > 0).sum(1).max())]).mean(1),
    }
    found = nc.check_invariance(of[name], ids)
    assert found.verdict == "shared" and not found, found


@pytest.mark.parametrize("wrong", [{"batches": 4}, {"batches": ()}, {"batches": (0,)}, {"decoding": 3}])
def test_sizes_and_words_that_are_none_are_refused(wrong):
    """Without a batch every model is invariant."""
    with pytest.raises(nc.errors.RunError, match=f"check_invariance\\({next(iter(wrong))}="):
        nc.check_invariance(torch.nn.Linear(8, 4).eval(), (torch.randn(4, 8),), **wrong)


def test_whole_numbers_of_several_kinds_keep_their_columns():
    """Those of one are no indices of the other's table."""

    class Tables(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.kinds = torch.nn.Embedding(100, 8), torch.nn.Embedding(3, 8)

        def forward(self, ids):
            return self.words(ids[..., 0]) + self.kinds(ids[..., 1])

    torch.manual_seed(0)
    ids = torch.stack([torch.randint(3, 100, (4, 6)), torch.randint(0, 3, (4, 6))], -1)
    assert nc.check_invariance(Tables(), (ids,)).verdict == "invariant"


def test_what_is_not_judged_gives_no_other_numbers():
    """Nothing of it was compared."""
    found = nc.check_invariance(lambda x: x * 2, (torch.arange(4),))
    assert "Not judged: nothing of the output was found to be the sample's" in str(found).replace("\n  ", " ")
