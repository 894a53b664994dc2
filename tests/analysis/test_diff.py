"""Two runs that are not alike: who computes in other formats, who makes a difference, and what only carries it on."""

import copy
import importlib.util
import math
import string
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

import narrowcast as nc

_spec = importlib.util.spec_from_file_location("models", Path(__file__).parents[1] / "conformance/models.py")
models = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(models)

WIDTH, HEADS, LAYERS, LENGTH = 32, 4, 2, 24


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        q, k, v = (p(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.gate, self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        y = self.norm2(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Trainer(nn.Module):
    """A GPT as one writes it to train it."""

    def __init__(self, vocabulary):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocabulary, bias=False)

    def forward(self, ids):
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class CachedAttention(nn.Module):
    """Fused projections, a cache, attention written out."""

    def __init__(self):
        super().__init__()
        self.qkv_proj, self.o_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = (WIDTH // HEADS) ** 0.5

    def forward(self, x, cache):
        parts = self.qkv_proj(x).split(WIDTH, -1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        if cache:
            k, v = torch.cat([cache["k"], k], 2), torch.cat([cache["v"], v], 2)
        cache.update(k=k, v=v)
        scores = torch.matmul(q, k.transpose(-1, -2)) / self.scale
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        y = torch.matmul(scores.masked_fill(~seen, -torch.inf).softmax(-1), v)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_norm, self.post_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.self_attn = CachedAttention()
        self.gate_up, self.down_proj = nn.Linear(WIDTH, 128), nn.Linear(64, WIDTH)

    def forward(self, x, cache):
        x = x + self.self_attn(self.input_norm(x), cache)
        gate, up = self.gate_up(self.post_norm(x)).chunk(2, -1)
        return x + self.down_proj(functional.silu(gate) * up)


class Engine(nn.Module):
    """The same function as one writes it to serve it."""

    def __init__(self, vocabulary):
        super().__init__()
        self.embed, self.positions = nn.Embedding(vocabulary, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.final_norm, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocabulary, bias=False)

    def forward(self, ids, caches, start=0):
        x = self.embed(ids) + self.positions(torch.arange(start, start + ids.shape[1]))
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, cache)
        x = self.final_norm(x)
        return self.lm_head(x.to(self.lm_head.weight.dtype)).float()


def served(trainer):
    """An engine with the weights of a trainer."""
    engine = Engine(trainer.tokens.num_embeddings)
    state, made = trainer.state_dict(), {}
    names = {"tokens": "embed", "places": "positions", "norm": "final_norm", "head": "lm_head", "norm1": "input_norm",
             "norm2": "post_norm", "attention.out": "self_attn.o_proj", "down": "down_proj"}  # fmt: skip
    for name, value in state.items():
        path, _, leaf = name.rpartition(".")
        block, _, part = path.removeprefix("blocks.").partition(".") if path.startswith("blocks.") else ("", "", path)
        prefix = f"layers.{block}." if block else ""
        if part in names:
            made[f"{prefix}{names[part]}.{leaf}"] = value
        elif part in ("attention.q", "gate"):
            others = ("attention.k", "attention.v") if part == "attention.q" else ("up",)
            parts = [value, *(state[f"blocks.{block}.{other}.{leaf}"] for other in others)]
            made[f"{prefix}{'self_attn.qkv_proj' if others[-1] != 'up' else 'gate_up'}.{leaf}"] = torch.cat(parts)
    engine.load_state_dict(made)
    return engine.eval()


@pytest.fixture(scope="module")
def text():
    """Text that ships with Python, as numbers."""
    words = " ".join(filter(None, (getattr(str, n).__doc__ for n in dir(str)))) + string.printable
    letters = sorted(set(words))
    return torch.tensor([letters.index(c) for c in words]), len(letters)


@pytest.fixture(scope="module")
def trainer(text):
    numbers, vocabulary = text
    torch.manual_seed(0)
    model = Trainer(vocabulary)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(30):
        starts = torch.randint(0, len(numbers) - LENGTH, (8,))
        ids = torch.stack([numbers[s : s + LENGTH] for s in starts])
        optimizer.zero_grad()
        functional.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()
    return model.eval()


@pytest.fixture(scope="module")
def ids(text):
    return text[0][100 : 100 + LENGTH][None]


@torch.no_grad()
def trained(trainer, ids):
    return nc.capture(trainer, (ids,), tokens=ids)


@torch.no_grad()
def generated(engine, ids, prompt=16):
    """The prompt at once, then token by token, as an engine does it; the tokens are given."""
    with nc.capture() as run:
        caches = [{} for _ in range(LAYERS)]
        logits = [engine(ids[:, :prompt], caches)]
        logits += [engine(ids[:, n : n + 1], caches, n) for n in range(prompt, LENGTH)]
        values = torch.cat(logits, 1)[:, :-1].double().log_softmax(-1)
    run.keep_tokens(ids[:, 1:], values.gather(-1, ids[:, 1:, None]))
    return run


class TestTrainerAndEngine:
    """Other modules, fused projections, a cache, another attention: one function."""

    def test_equal_weights_are_alike_and_each_call_is_compared_or_listed(self, trainer, ids):
        """A trainer and an engine with fused projections differ by round-off, and fused calls pair with their parts."""
        a, b = trained(trainer, ids), generated(served(trainer), ids)
        found = nc.diff(a, b)
        assert found.verdict == "round-off" and not found.formats and not found.producers, str(found)
        assert found.tokens.count == LENGTH - 1 and found.tokens.largest < 1e-4
        listed = {name for row in found.rows for name in row.a} | {one.id for one in found.unaligned if one.run == "a"}
        assert listed == {call.id for call in a.calls}
        pairs = {" + ".join(name.module_path for name in row.a): row.b[0].module_path for row in found.rows}
        assert pairs["blocks.1.attention.q + blocks.1.attention.k + blocks.1.attention.v"].endswith(
            "1.self_attn.qkv_proj"
        )
        assert pairs["blocks.0.gate + blocks.0.up"] == "layers.0.gate_up"
        attention = next(row for row in found.rows if row.a[0].op.startswith("aten.scaled_dot_product"))
        assert attention.b[0].op == "aten.bmm.default" and attention.measured_by == "sketches"

    def test_a_wrong_epsilon_and_a_bf16_head_are_named_and_nothing_else(self, trainer, ids):
        """The report gives both values of `eps`, fits 25 lines, and names the same call with the runs exchanged."""
        engine = served(trainer)
        engine.layers[1].input_norm.eps = 1e-2
        engine.lm_head.bfloat16()
        a, b = trained(trainer, ids), generated(engine, ids)
        found = nc.diff(a, b)
        assert len(str(found).splitlines()) <= 25 and max(map(len, str(found).splitlines())) <= 80
        assert [str(row.b[0]) for row in found.formats] == ["lm_head aten.mm.default #1"]
        assert [str(row.b[0]) for row in found.producers] == ["layers.1.input_norm aten.native_layer_norm.default #1"]
        assert found.first_value.given == (("eps", "1e-05", "0.01"),) and found.tokens.rms > 1e-3
        again = nc.diff(b, a)
        assert [str(row.a[0]) for row in again.producers] == [str(row.b[0]) for row in found.producers]

    def test_an_engine_in_bf16_differs_in_format_alone(self, trainer, ids):
        """Every compared call computes in another format, the embedding first, and log-probabilities stay close."""
        engine = served(trainer).bfloat16()
        found = nc.diff(trained(trainer, ids), generated(engine, ids))
        others = [row for row in found.rows if row.measured_by and not row.differs_in_format]
        assert found.verdict == "formats differ" and len(others) <= 1 and len(found.formats) > 20, str(found)
        assert found.first_format.a[0].module_path == "tokens" and found.tokens.rms < 0.1

    @pytest.mark.parametrize(
        ("fault", "call", "given"),
        [
            (lambda e: e.layers[0].self_attn.qkv_proj.weight.data[40].add_(1), "layers.0.self_attn.qkv_proj", "weight"),
            (lambda e: e.layers[1].gate_up.weight.data[:64].mul_(1.1), "layers.1.gate_up", "weight"),
            (lambda e: setattr(e.layers[1].self_attn, "scale", 2.0), "layers.1.self_attn", ""),
        ],
        ids=["a row of k", "the gate", "the scale of attention"],
    )
    def test_a_fault_inside_what_is_fused_or_written_out_is_named(self, trainer, ids, fault, call, given):
        """One call is blamed, along with its weight where that was changed: a row of keys, the gate, or the scale. It
        may have no partner: attention that one program writes out.
        """
        engine = served(trainer)
        fault(engine)
        found = nc.diff(trained(trainer, ids), generated(engine, ids))
        alone = {one.id.module_path for one in found.alone if one.run == "b"}
        assert [row.b[0].module_path for row in found.producers] == [call] or (alone == {call} and not given), str(
            found
        )
        assert not given or [name for name, _, _ in found.first_value.given] == [given]

    def test_a_batch_in_another_layout_is_compared_row_by_row(self, trainer, text):
        """Four sequences at once agree with two at a time, except for the one layer whose weight was scaled."""
        ids = text[0][: 4 * LENGTH].reshape(4, LENGTH)
        engine = served(trainer)
        engine.layers[0].down_proj.weight.data *= 1.01
        with torch.no_grad(), nc.capture() as run:
            for part in (ids[:2], ids[2:]):
                engine(part, [{} for _ in range(LAYERS)])
        found = nc.diff(trained(trainer, ids), run)
        assert [str(row.b[0]) for row in found.producers] == ["layers.0.down_proj aten.addmm.default #1"], str(found)
        assert found.first_value.given[0][0] == "weight"

    def test_the_mapping_is_written_mended_and_read_back(self, trainer, ids, tmp_path):
        """A saved mapping gives the same pairs, an edited line excludes a module, and an error names its line."""
        a, b = trained(trainer, ids), generated(served(trainer), ids)
        found = nc.diff(a, b)
        found.mapping.save(tmp_path / "pairs.txt")
        again = nc.diff(a, b, mapping=tmp_path / "pairs.txt")
        assert [(row.a, row.b) for row in again.rows] == [(row.a, row.b) for row in found.rows]
        assert {row.aligned_by for row in again.rows} == {"mapping"}
        mended = (
            (tmp_path / "pairs.txt").read_text().replace("blocks.*.norm2 = layers.*.post_norm", "blocks.*.norm2 = -")
        )
        (tmp_path / "pairs.txt").write_text(mended)
        without = nc.diff(a, b, mapping=tmp_path / "pairs.txt")
        left = {str(one.id): one.why for one in without.unaligned if one.run == "a"}
        assert list(left) == [f"blocks.{n}.norm2 aten.native_layer_norm.default #1" for n in range(LAYERS)]
        assert all(f"{tmp_path / 'pairs.txt'}:" in why for why in left.values())
        (tmp_path / "pairs.txt").write_text("head = lm_head\nblocks.7.norm1 = layers.0.input_norm\n")
        with pytest.raises(nc.errors.RunError, match=r"run a has no calls in blocks.7.norm1") as refused:
            nc.diff(a, b, mapping=tmp_path / "pairs.txt")
        assert f"{tmp_path / 'pairs.txt'}:2" in str(refused.value)

    def test_whole_tensors_are_compared_where_both_runs_kept_them(self, trainer, ids, tmp_path):
        """If the files were overwritten since, sketches are compared instead, and a note says so."""
        runs = []
        for name, factor in (("a", 1.0), ("b", 1.001)):
            with torch.no_grad(), nc.capture(tensors=tmp_path / name) as run:
                functional.linear(ids.float(), factor * torch.ones(3, LENGTH))
            run.save(tmp_path / f"{name}.json")
            runs.append(tmp_path / f"{name}.json")
        found = nc.diff(*runs)
        assert found.rows[-1].measured_by == "tensors" and found.rows[-1].difference == pytest.approx(1e-3, rel=1e-2)
        for file in (tmp_path / "b").iterdir():
            file.write_bytes(b"\x80\x04cos\nsystem\n(S'false'\ntR.")
        again = nc.diff(*runs)
        assert again.rows[-1].measured_by == "sketches" and "are not those of the run" in again.notes[-1]


class TestTokens:
    """Log-probabilities that runs keep."""

    def test_are_those_of_the_logits(self, trainer, ids):
        """A run's log-probabilities equal the negated cross-entropy of each next token in fp64."""
        run = trained(trainer, ids)
        with torch.no_grad():
            wanted = -functional.cross_entropy(trainer(ids)[0, :-1].double(), ids[0, 1:], reduction="none")
        assert run.tokens == ids[0, 1:].tolist()
        torch.testing.assert_close(torch.tensor(run.log_probabilities, dtype=torch.double), wanted)

    def test_of_other_shapes_are_refused(self, trainer, ids):
        """Tokens that do not match the logits, exceed the vocabulary, or come without a model raise a RunError."""
        with pytest.raises(nc.errors.RunError, match="no logits of each token"):
            nc.capture(trainer, (ids,), tokens=ids[:, 1:])
        with pytest.raises(nc.errors.RunError, match="outside of a vocabulary"):
            nc.capture(trainer, (ids,), tokens=ids + 1000)
        with pytest.raises(nc.errors.RunError, match="without a model"):
            nc.capture(tokens=ids)


class TestOneModel:
    """Two ways to run it."""

    def test_eager_and_compiled_are_equal_and_policies_differ_in_format_alone(self):
        """Native bf16 is alike under `nc.compile`; against fp32, formats first differ in a query projection."""
        model, args, kwargs = models.minilm()
        kwargs = {name: tensor[:2, :16] for name, tensor in kwargs.items()}
        with torch.no_grad():
            policies = nc.diff(*(nc.capture(model, (args, kwargs), under=dtype) for dtype in (None, "bf16")))
            del model.encoder.layer[1:]
            native = nc.capture(model, (args, kwargs), under="bf16")
            compiled = nc.capture(nc.compile(model, under="bf16", backend="aot_eager"), (args, kwargs))
        torch._dynamo.reset()
        equal = nc.diff(native, compiled)
        assert equal.verdict == "alike" and len(equal.rows) > 15, str(equal)
        assert policies.verdict == "formats differ" and not policies.producers, str(policies)
        assert policies.first_format.a[0].module_path == "encoder.layer.0.attention.self.query"
        assert ("policy.name", "-", "native") in policies.environment

    def test_a_backward_on_one_side_is_listed(self, trainer, ids):
        """Backward calls without a counterpart are listed with the reason; with both backwards, gradients are equal."""
        a, b = nc.capture(trainer, (ids,), backward=True), nc.capture(trainer, (ids,))
        found = nc.diff(a, b)
        assert found.verdict == "alike" and {one.why for one in found.unaligned} == {"the other run has no backward"}
        assert {one.id.direction for one in found.unaligned} == {"backward"}
        both = nc.diff(a, nc.capture(trainer, (ids,), backward=True))
        assert len(both.gradients) == len(list(trainer.parameters())) and not both.unaligned
        assert max(row.difference for row in both.gradients) == 0

    def test_a_fault_inside_the_band_of_bf16_is_found_where_nothing_differs_before(self, trainer, ids):
        """A factor of 1.05 is within bf16's band, so the multiplication that only one run makes is named instead."""
        other = copy.deepcopy(trainer)
        other.blocks[1].down.register_forward_hook(lambda module, args, output: output * 1.05)
        found = nc.diff(*(nc.capture(model, (ids,), under="bf16") for model in (trainer, other)))
        assert not found.producers and [str(one.id) for one in found.alone] == ["blocks.1.down aten.mul.Tensor #1"]
        assert found.verdict == "values differ" and "blocks.1.down aten.mul.Tensor #1 of b" in " ".join(
            str(found).split()
        )

    def test_a_nan_on_one_side_is_a_difference(self, trainer, ids):
        """One NaN in a weight makes the difference infinite, first at the layer that holds it."""
        other = copy.deepcopy(trainer)
        other.blocks[0].up.weight.data[3, 3] = torch.nan
        found = nc.diff(nc.capture(trainer, (ids,)), nc.capture(other, (ids,)))
        assert found.first_value.a[0].module_path == "blocks.0.up" and found.first_value.difference == math.inf


RANK = """
import sys
from datetime import timedelta
import torch
import torch.distributed as distributed
from torch import nn
import narrowcast as nc

LIMIT = timedelta(seconds=120)


def run_rank(rank, folder):
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2, timeout=LIMIT)
    try:
        for which, epsilon in (("right", 1e-5), ("summed", 1e-5), ("wrong", 1e-2 if rank else 1e-5)):
            model, x = made()
            model[2].eps = epsilon
            with nc.capture() as run:
                model(x[4 * rank : 4 * rank + 4]).square().mean().backward()
                for parameter in model.parameters():
                    distributed.all_reduce(parameter.grad)
                    parameter.grad /= 2 if which != "summed" else 1
            run.save(f"{folder}/{which}-{rank}.json")
    finally:
        distributed.destroy_process_group()


def made():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 16)), torch.randn(8, 5, 32)


if __name__ == "__main__":
    run_rank(1, sys.argv[1])
"""


def test_one_process_against_two(tmp_path, monkeypatch):
    """The batch is divided: results are put together, gradients are averaged, or not; one rank's epsilon is wrong."""
    (tmp_path / "rank.py").write_text(RANK)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    other = subprocess.Popen(
        [sys.executable, str(tmp_path / "rank.py"), str(tmp_path)], stderr=subprocess.PIPE, text=True
    )
    here = {"__name__": "here"}
    exec(RANK, here)
    model, x = here["made"]()
    with nc.capture() as alone:
        model(x).square().mean().backward()
    try:
        here["run_rank"](0, tmp_path)
        said = other.communicate(timeout=120)[1]
    finally:
        other.kill()
    assert other.returncode == 0, said
    right, summed, wrong = (
        nc.diff(alone, [tmp_path / f"{which}-{rank}.json" for rank in range(2)])
        for which in ("right", "summed", "wrong")
    )
    compared = {row.b[0].module_path for row in right.rows if row.verdict in ("equal", "round-off")}
    assert compared >= {"0", "1", "2", "3"} and right.verdict == "round-off", str(right)
    assert summed.verdict == "values differ" and not summed.producers
    assert any("every gradient of b is 2 times that of a" in note for note in summed.notes), str(summed)
    assert len(right.gradients) == 6 and max(row.difference for row in right.gradients) < 1e-5
    assert [row.a[0].module_path for row in wrong.producers] == ["2"], str(wrong)
    assert any("ranks in other numbers" in note for note in right.notes)
