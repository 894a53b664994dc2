"""`nc.diff` of programs in one low format: faults that change the outputs by a few percent, beside sound ports."""

import inspect

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import narrowcast as nc


class Block(nn.Module):
    """Attention and a feed-forward network, normalised before each."""

    def __init__(self, width=32, heads=4):
        super().__init__()
        self.heads = heads
        self.norm, self.again = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        rows, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.again(x))))


class Decoder(nn.Module):
    def __init__(self, layers=3, width=32):
        super().__init__()
        self.embedding = nn.Embedding(50, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(layers)])
        self.head = nn.Linear(width, 50)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def decoder():
    torch.manual_seed(0)
    made = Decoder()
    for name, parameter in made.named_parameters():
        if "qkv" in name or "down" in name:
            nn.init.normal_(parameter, std=0.3)
    return made.eval()


def by_hand(of, tokens, fault=""):
    """The whole sequence at once, with weights taken out of the modules."""
    x = F.embedding(tokens, of.embedding.weight)
    rows, length, width = x.shape
    hidden = torch.ones(length, length, dtype=torch.bool).tril().logical_not()
    for number, block in enumerate(of.blocks):
        h = F.layer_norm(x, (width,), block.norm.weight, block.norm.bias)
        q, k, v = (h @ block.qkv.weight.T + block.qkv.bias).chunk(3, -1)
        q, k, v = (one.reshape(rows, length, block.heads, -1).transpose(1, 2) for one in (q, k, v))
        scale = 8**-0.5
        if fault == "scale" and number == 1:
            scale = 0.3
        scores = (q @ k.transpose(-1, -2)) * scale  # scale
        weights = scores.masked_fill(hidden, torch.finfo(scores.dtype).min).softmax(-1)
        mixed = (weights @ v).transpose(1, 2).reshape(rows, length, width)
        x = x + (mixed @ block.out.weight.T + block.out.bias)
        h = F.layer_norm(x, (width,), block.again.weight, block.again.bias)
        h = h @ block.up.weight.T + block.up.bias
        is_other = fault == "activation" and number == 1
        h = F.relu(h) if is_other else F.gelu(h)  # activation
        x = x + (h @ block.down.weight.T + block.down.bias)
    return x @ of.head.weight.T + of.head.bias


def step_by_step(of, tokens, prompt=6, fault=""):
    """A prompt, and then token after token, with a cache of keys and values."""
    cache = [[] for _ in of.blocks]
    results = []
    for first, last in [(0, prompt), *((n, n + 1) for n in range(prompt, tokens.shape[1]))]:
        x = of.embedding(tokens[:, first:last])
        rows, length, width = x.shape
        for block, kept in zip(of.blocks, cache, strict=True):
            q, k, v = block.qkv(block.norm(x)).view(rows, length, 3, block.heads, -1).permute(2, 0, 3, 1, 4)
            kept[:] = [torch.cat([a, b], 2) for a, b in zip(kept, (k, v), strict=True)] if kept else [k, v]
            mixed = F.scaled_dot_product_attention(q, *kept, is_causal=length > 1)
            x = x + block.out(mixed.transpose(1, 2).reshape(rows, length, width))
            added = block.down(F.gelu(block.up(block.again(x))))
            x = added + (x * 0.9 if fault == "residual" and block is of.blocks[1] else x)  # residual
        results.append(of.head(x))
    return torch.cat(results, 1)


def captured(program, of, *args, low=torch.bfloat16, **options):
    with torch.no_grad(), nc.capture() as run, nc.autocast("cpu", low):
        program(of, *args, **options)
    return run


def line_of(program, comment):
    lines, first = inspect.getsourcelines(program)
    return first + next(n for n, line in enumerate(lines) if line.rstrip().endswith(f"# {comment}"))


TOKENS = torch.arange(40).view(2, 20) * 7 % 50


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_a_factor_that_changes_the_outputs_by_a_few_percent(low):
    """Rounding alone leaves them several times nearer, and is no difference."""
    of = decoder()
    whole = captured(Decoder.__call__, of, TOKENS, low=low)
    sound = nc.diff(whole, captured(by_hand, of, TOKENS, low=low))
    assert sound.verdict in ("round-off", "formats differ") and not sound.front, str(sound)
    for fault in ("scale", "activation"):
        found = nc.diff(whole, captured(by_hand, of, TOKENS, low=low, fault=fault))
        assert found.verdict == "values differ" and found.output_difference < 0.2, str(found)
        first = next(one for one in found.front if one.run == "b")
        assert first.place.endswith(f":{line_of(by_hand, fault)}"), str(found)


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_a_cache_is_compared_with_the_whole_sequence(low):
    """What a prompt and tokens give one after the other is the whole sequence's; the fault is in both."""
    of = decoder()
    whole = captured(Decoder.__call__, of, TOKENS, low=low)
    assert nc.diff(whole, captured(step_by_step, of, TOKENS, low=low)).verdict == "round-off"
    found = nc.diff(whole, captured(step_by_step, of, TOKENS, low=low, fault="residual"))
    assert found.verdict == "values differ" and found.outputs_apart > 0.05, str(found)
    first = next(one for one in found.front if one.run == "b")
    assert first.place.endswith(f":{line_of(step_by_step, 'residual')}"), str(found)


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_errors_that_grow_where_numbers_cancel_are_no_difference(low):
    """What is taken from its mean is several times smaller: so many times larger is its error."""
    torch.manual_seed(0)
    first, second, last = nn.Linear(32, 64), nn.Linear(64, 64), nn.Linear(64, 16)

    def by_layers(_, x):
        h = second(torch.relu(first(x))) + 3
        return last(torch.relu(h - h.mean(-1, keepdim=True)))

    def by_products(_, x):
        h = torch.relu(x @ first.weight.T + first.bias) @ second.weight.T + (second.bias + 3)
        return torch.relu(h - h.mean(-1, keepdim=True)) @ last.weight.T + last.bias

    x = torch.randn(64, 32)
    found = nc.diff(captured(by_layers, None, x, low=low), captured(by_products, None, x, low=low))
    assert found.verdict in ("round-off", "formats differ") and found.output_difference > 0.0025, str(found)


def step(low, lr=0.1, steps=True, by_hand=False):
    """One training step, whose weights are moved by an optimizer, by hand, or not at all."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), torch.randn(32, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr)
    with nc.capture() as run:
        with nc.autocast("cpu", low or torch.bfloat16, enabled=low is not None):
            loss = model(x).square().mean()
        loss.backward()
        if by_hand:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= lr * parameter.grad
        elif steps:
            optimizer.step()
    return run


@pytest.mark.parametrize("low", [None, torch.bfloat16])
def test_a_step_that_one_program_never_makes(low):
    """Weights that one run moves, and the other, whose gradients nothing reads, leaves where they are."""
    for one, other, name in ((True, False, "b"), (False, True, "a")):
        found = nc.diff(step(low, steps=one), step(low, steps=other))
        assert found.verdict == "values differ" and len(found.untrained) == 4, str(found)
        assert found.todos[0].what.startswith(f"Inspect how {name} trains 0.weight"), str(found)
    assert nc.diff(step(low), step(low, by_hand=True)).verdict in ("alike", "round-off")
    assert nc.diff(step(low, steps=False), step(low, steps=False)).verdict == "alike"


def test_settings_are_said_first_in_low_formats_and_noted_where_they_show_nowhere():
    """What makes the difference need not be the setting, but that is exact where values are rounded."""
    for rate in (0.2, 0.12):
        found = nc.diff(step(torch.bfloat16), step(torch.bfloat16, lr=rate))
        assert found.todos[0].what == "Give both runs the same lr in SGD", str(found)
    still = nc.diff(step(torch.bfloat16, lr=1e-9), step(torch.bfloat16, lr=2e-9))
    noted = [note for note in still.notes if note.startswith("SGD is set otherwise")]
    assert still.verdict != "values differ" and len(noted) == 1 and "lr 1e-09 in a, 2e-09 in b" in noted[0], str(still)


def test_a_weight_that_is_folded_is_no_fault_after_one():
    """Batch norm is folded into a convolution of b, which is paired with the one before it: the pooling is first."""
    torch.manual_seed(0)
    first, second, norm = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 16, 1, bias=False), nn.BatchNorm2d(16).eval()
    nn.init.uniform_(norm.running_var, 0.2, 0.6)
    nn.init.normal_(norm.running_mean)
    x = torch.randn(2, 3, 12, 12)

    def by_layers(_, x):
        return F.silu(norm(second(F.avg_pool2d(F.silu(first(x)), 2)))).mean((2, 3))

    def folded(_, x, fault=""):
        h = F.silu(F.conv2d(x, first.weight, first.bias))
        h = F.max_pool2d(h, 2) if fault else F.avg_pool2d(h, 2)  # pooling
        factor = norm.weight / (norm.running_var + norm.eps).sqrt()
        weight = second.weight * factor[:, None, None, None]
        return F.silu(F.conv2d(h, weight, norm.bias - norm.running_mean * factor)).mean((2, 3))

    whole = captured(by_layers, None, x)
    assert nc.diff(whole, captured(folded, None, x)).verdict in ("round-off", "formats differ")
    found = nc.diff(whole, captured(folded, None, x, fault="pooling"))
    line = folded.__code__.co_firstlineno + 2
    assert found.verdict == "values differ" and f"{__file__.rpartition('/')[2]}:{line}" in found.todos[0].why, str(
        found
    )
