"""Sound pairs of programs, pairs with one difference that is planted, and how one sample's numbers vary here.

    python tests/conformance/parity_pairs.py            run all, exit with 1 if a verdict is another than is expected
    python tests/conformance/parity_pairs.py --write    also write the tables into docs/reference/parity.md

Models are small, and most have random weights that are large enough for differences to be seen: what is asked is which
cause is named, with its module, and none of pairs that do the same. Five pairs go through the engine of transformers,
`generate_batch`: a paged cache, a flattened batch, chunked prefill, in a thread of its own.
"""

from __future__ import annotations

import argparse
import copy
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import (
    ContinuousBatchingConfig,
    DynamicCache,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import narrowcast as nc

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parent))
import gpt as gpt_of_bytes
import models as zoo

PAGE = Path(__file__).parents[2] / "docs/reference/parity.md"
BEGIN, END = "<!-- written by tests/conformance/parity_pairs.py: {} -->", "<!-- end -->"
SOUND = ("alike", "round-off", "batch shape")
VOCABULARY, SMALL = 256, {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
IDS = torch.randint(3, VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(1))

# -- models ------------------------------------------------------------------------------------------------------------


def of_config(kind: Any, config: Any) -> Any:
    torch.manual_seed(0)
    model = kind(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "ln_" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def llama() -> Any:
    sizes = {"vocab_size": VOCABULARY, "intermediate_size": 128, "num_hidden_layers": 3, "max_position_embeddings": 128}
    return of_config(LlamaForCausalLM, LlamaConfig(**SMALL, **sizes, initializer_range=0.2))


def mixtral() -> Any:
    sizes = {"vocab_size": VOCABULARY, "intermediate_size": 96, "num_hidden_layers": 3, "num_local_experts": 6}
    return of_config(MixtralForCausalLM, MixtralConfig(**SMALL, **sizes, initializer_range=0.15))


def gpt() -> Any:
    return of_config(GPT2LMHeadModel, GPT2Config(vocab_size=VOCABULARY, n_embd=64, n_layer=3, n_head=4, n_positions=64))


def t5() -> Any:
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
    return of_config(T5ForConditionalGeneration, T5Config(vocab_size=VOCABULARY, **sizes))


def t5_inputs() -> dict[str, torch.Tensor]:
    return {"input_ids": IDS, "decoder_input_ids": IDS[:, :10].flip(1)}


class PortedBlock(nn.Module):
    """A block of a GPT-2 by another author: linear layers in the place of transposed ones, q, k and v apart."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.norm, self.norm2 = copy.deepcopy(block.ln_1), copy.deepcopy(block.ln_2)
        full = block.attn.c_attn
        self.q, self.k, self.v = (self._linear(full.weight[:, n : n + 64], full.bias[n : n + 64]) for n in (0, 64, 128))
        of = block.attn.c_proj, block.mlp.c_fc, block.mlp.c_proj
        self.o, self.up, self.down = (self._linear(one.weight, one.bias) for one in of)

    @staticmethod
    def _linear(weight: torch.Tensor, bias: torch.Tensor) -> nn.Linear:
        layer = nn.Linear(*weight.shape)
        with torch.no_grad():
            layer.weight.copy_(weight.t())
            layer.bias.copy_(bias)
        return layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        q, k, v = (part(y).unflatten(-1, (4, 16)).transpose(1, 2) for part in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Ported(nn.Module):
    """A GPT-2 by another author. first: its first position."""

    first = 0

    def __init__(self, model: Any) -> None:
        super().__init__()
        inner = model.transformer
        self.tokens, self.places, self.norm = (copy.deepcopy(part) for part in (inner.wte, inner.wpe, inner.ln_f))
        self.blocks = nn.ModuleList(map(PortedBlock, inner.h))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]) + self.first)
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.tokens.weight.t()


def with_cache(model: Any, wrong: bool = False) -> Callable[[torch.Tensor], torch.Tensor]:
    """Decode token by token. wrong: each position but the first is that of the token before."""

    def engine(ids: torch.Tensor) -> torch.Tensor:
        cache, found = DynamicCache(), []
        for n in range(ids.shape[1]):
            at = torch.full((len(ids), 1), max(0, n - wrong))
            found.append(model(ids[:, n : n + 1], past_key_values=cache, use_cache=True, position_ids=at).logits)
        return torch.cat(found, 1)

    return engine


PROMPTS = [row[:length].tolist() for row, length in zip(IDS.repeat(2, 1), (9, 5, 12), strict=False)]


def served(trainer: Any, engine: Any, **sampling: Any) -> Any:
    """Compare what `generate_batch` of a model gave with one forward of the trainer over the same tokens."""
    settings = GenerationConfig(max_new_tokens=8, eos_token_id=-1, pad_token_id=0, **{"do_sample": False, **sampling})
    blocks = ContinuousBatchingConfig(return_logprobs=True, page_size=16, num_blocks=16, max_batch_tokens=32)
    with nc.capture().of(engine) as run:
        outputs = engine.generate_batch(
            PROMPTS, generation_config=settings, continuous_batching_config=blocks, progress_bar=False, warmup=False
        )
    rows = [outputs[name] for name in sorted(outputs)]
    for row in rows:
        run.keep_tokens(row.generated_tokens, row.logprobs)
    length = max(len(row.prompt_ids) + len(row.generated_tokens) for row in rows)
    ids, wanted = torch.zeros(len(rows), length, dtype=torch.int64), torch.full((len(rows), length), -100)
    mask = torch.zeros_like(ids)
    for n, row in enumerate(rows):
        prompt, end = len(row.prompt_ids), len(row.prompt_ids) + len(row.generated_tokens)
        ids[n, :end], mask[n, :end] = torch.tensor([*row.prompt_ids, *row.generated_tokens]), 1
        wanted[n, prompt:end] = torch.tensor(row.generated_tokens)
    return nc.parity(trainer, run, {"input_ids": ids, "attention_mask": mask}, tokens=wanted)


def changed(model: Any, change: Callable[[Any], Any]) -> Any:
    made = copy.deepcopy(model)
    with torch.no_grad():
        change(made)
    return made


def set_eps(model: Any, eps: float) -> None:
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = eps


# -- pairs -------------------------------------------------------------------------------------------------------------

Row = tuple[str, Any, str]
"""What is compared, what was found, and which cause is expected; none for a sound pair."""


def sound() -> Iterator[Row]:
    """Yield pairs that do the same."""
    a = llama()
    yield "Llama, a copy", nc.parity(a, copy.deepcopy(a), IDS), ""
    eager = changed(a, lambda m: m.set_attn_implementation("eager"))
    yield "Llama, sdpa and eager attention", nc.parity(a, eager, IDS), ""
    yield "Llama, compiled", nc.parity(a, torch.compile(copy.deepcopy(a), backend="aot_eager"), IDS), ""
    yield "Llama, token by token", nc.parity(a, with_cache(a), IDS), ""
    yield "Llama, `generate_batch`", served(a, copy_kept(a)), ""
    b = a.to(torch.bfloat16)
    yield "Llama in bf16, token by token", nc.parity(b, with_cache(b), IDS), ""
    yield "Llama in bf16, `generate_batch`", served(b, copy_kept(b)), ""
    c = gpt()
    yield "GPT-2, a port with split and transposed weights", nc.parity(c, Ported(c), IDS), ""
    yield "GPT-2, token by token", nc.parity(c, with_cache(c), IDS), ""
    with torch.no_grad():
        runs = nc.capture(c, IDS, tokens=IDS), nc.capture(Ported(c), IDS, tokens=IDS)
    yield "GPT-2, its port, two runs alone", nc.parity(*runs), ""
    d = mixtral()
    yield "Mixtral, a copy", nc.parity(d, copy.deepcopy(d), IDS), ""
    yield "Mixtral, rows one by one", nc.parity(d, lambda ids: torch.cat([d(row[None]).logits for row in ids]), IDS), ""
    e = t5()
    yield "T5, a copy", nc.parity(e, copy.deepcopy(e), t5_inputs()), ""
    yield "GPT-2's port, on one rank and on two", ranks(1.0), ""
    f, args, kwargs = zoo.minilm()
    yield "MiniLM, a copy", nc.parity(f, copy.deepcopy(f), (args, kwargs)), ""
    one = lambda **x: torch.cat([f(**{k: v[n : n + 1] for k, v in x.items()})[0] for n in range(len(x["input_ids"]))])
    yield "MiniLM, documents one by one", nc.parity(lambda **x: f(**x)[0], one, (args, kwargs)), ""


# -- two ranks ---------------------------------------------------------------------------------------------------------


class Sharded(nn.Module):
    """The second linear layer of a pair, its first part that of this rank: products are summed over all of them."""

    def __init__(self, up: nn.Linear, down: nn.Linear, rank: int, factor: float) -> None:
        super().__init__()
        rows = slice(rank * up.out_features // 2, (rank + 1) * up.out_features // 2)
        self.up, self.down = (
            nn.Parameter(up.weight[rows].detach()),
            nn.Parameter(down.weight[:, rows].detach() * factor),
        )
        self.up_bias, self.down_bias = nn.Parameter(up.bias[rows].detach()), copy.deepcopy(down.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        part = F.linear(F.gelu(F.linear(x, self.up, self.up_bias), approximate="tanh"), self.down)
        torch.distributed.all_reduce(part)
        return part + self.down_bias


class ShardedBlock(nn.Module):
    def __init__(self, block: PortedBlock, rank: int, factor: float) -> None:
        super().__init__()
        self.block, self.mlp = copy.deepcopy(block), Sharded(block.up, block.down, rank, factor)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.block.down.forward = self.block.up.forward = lambda x: x  # of the whole, which is not computed
        y = self.block.norm(x)
        q, k, v = (
            part(y).unflatten(-1, (4, 16)).transpose(1, 2) for part in (self.block.q, self.block.k, self.block.v)
        )
        x = x + self.block.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.block.norm2(x))


def of_rank(rank: int, folder: str, factor: float) -> None:
    """Capture a model whose layers are divided over two ranks; the second one's share of one is off by a factor."""
    torch.distributed.init_process_group("gloo", f"file://{folder}/store{factor}", rank=rank, world_size=2)
    torch.set_num_threads(1)
    model = Ported(gpt())
    for n, block in enumerate(model.blocks):
        model.blocks[n] = ShardedBlock(block, rank, factor if (rank, n) == (1, 1) else 1.0)
    with torch.no_grad():
        run = nc.capture(model, IDS, tokens=IDS)
    if rank == 0:
        run.save(f"{folder}/{factor}.json.gz")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def ranks(factor: float) -> Any:
    """Compare one rank with the run of two, which are gone then."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(of_rank, (folder, factor), nprocs=2)
        return nc.parity(Ported(gpt()), f"{folder}/{factor}.json.gz", IDS)


KEPT: list[Any] = []


def copy_kept(model: Any) -> Any:
    """A copy that stays: a run knows its module as long as that is there."""
    KEPT.append(copy.deepcopy(model))
    return KEPT[-1]


def planted() -> Iterator[Row]:
    """Yield pairs with one difference, and the cause that it is."""
    a = llama()
    scaled = changed(a, lambda m: m.model.layers[1].mlp.up_proj.weight.mul_(1.3))
    yield "Llama, a weight times 1.3", nc.parity(a, scaled, IDS), "weights"
    yield "Llama, another epsilon", nc.parity(a, changed(a, lambda m: set_eps(m, 1e-3)), IDS), "attribute"
    theta = copy.deepcopy(a.config)
    theta.rope_parameters = {"rope_type": "default", "rope_theta": 9000.0}
    other = of_config(LlamaForCausalLM, theta)
    other.load_state_dict(a.state_dict())
    yield "Llama, another base of positions", nc.parity(a, other, IDS), "attribute"
    yield "Llama, weights in bf16", nc.parity(a, copy.deepcopy(a).bfloat16(), IDS), "format"
    yield "Llama, a bf16 region", nc.parity(a, a, IDS, under=(None, "bf16")), "format"
    yield "Llama, a position too early", nc.parity(a, with_cache(a, wrong=True), IDS), "cache or position"
    first = torch.cat([torch.ones(2, 1, dtype=torch.int64), IDS], 1)
    yield "Llama, one BOS more", nc.parity(nc.Case(a, IDS), nc.Case(a, first)), "tokens"
    yield "`generate_batch`, temperature 0.7", served(a, copy_kept(a), do_sample=True, temperature=0.7), "sampler"
    yield "`generate_batch`, a weight times 1.3", served(a, copy_kept(scaled)), "weights"
    yield "`generate_batch`, another epsilon", served(a, copy_kept(changed(a, lambda m: set_eps(m, 1e-3)))), "attribute"
    yield "`generate_batch`, weights in bf16", served(a, copy_kept(a).bfloat16()), "format"
    c = gpt()
    port = changed(Ported(c), lambda m: m.blocks[1].v.weight[3].mul_(2))
    yield "GPT-2, a row of v in its port", nc.parity(c, port, IDS), "weights"
    port = Ported(c)
    port.blocks[2].down.forward = lambda x: F.linear(x, port.blocks[2].down.weight, port.blocks[2].down.bias) * 1.0005
    yield "GPT-2, a product times 1.0005 in its port", nc.parity(c, port, IDS), "calls"
    capped = type("Capped", (Ported,), {"forward": lambda self, ids: torch.tanh(Ported.forward(self, ids) / 2) * 2})(c)
    yield "GPT-2, a softcap in its port", nc.parity(c, capped, IDS), "calls"
    yield "GPT-2's port, on two ranks of which one has a share times 1.1", ranks(1.1), "calls"
    d, e = mixtral(), t5()
    nudged = changed(d, lambda m: m.model.layers[1].mlp.gate.weight.mul_(1.2))
    yield "Mixtral, a router times 1.2", nc.parity(d, nudged, IDS), "weights"
    many = torch.randint(3, VOCABULARY, (16, 48), generator=torch.Generator().manual_seed(2))
    yield "Mixtral, a bf16 region", nc.parity(d, d, many, under=(None, "bf16")), "routing"
    changed_eps = changed(e, lambda m: setattr(m.decoder.block[0].layer[0].layer_norm, "variance_epsilon", 1e-1))
    yield "T5, another epsilon in one layer", nc.parity(e, changed_eps, t5_inputs()), "attribute"


def table_of_pairs() -> tuple[str, int]:
    """Return the table, and how many pairs are not as expected."""
    lines, wrong = ["| pair | expected | found | nats rms | at, in b |", "|---|---|---|---|---|"], 0
    for pairs in (sound, planted):
        began = time.monotonic()
        for what, found, expected in pairs():
            is_right = found.verdict == expected if expected else found.verdict in SOUND and not found.is_over
            wrong += not is_right
            cause = found.causes[0]
            how = "" if not expected else ", confirmed" if cause.is_confirmed else ", likely"
            said = f"{found.verdict}{how}" if is_right else f"**{found.verdict}**"
            unit = "" if found.distance.unit == "nats" else " (relative)"
            far = f"{found.distance.rms:.1e}{unit}"
            where = cause.module if expected else ""
            took = time.monotonic() - began
            lines.append(f"| {what} | {expected or 'sound'} | {said} | {far} | {where} |")
            sys.stdout.write(f"{lines[-1]} {took:.1f} s\n")
            sys.stdout.flush()
            began = time.monotonic()
    return "\n".join(lines), wrong


# -- invariance --------------------------------------------------------------------------------------------------------


def models() -> Iterator[tuple[str, Any, Any, int]]:
    """Yield name, model, inputs and the dimension of samples."""
    for name in ("minilm", "effnet_lite0"):
        model, args, kwargs = getattr(zoo, name)()
        yield name, model, (args, kwargs), 0
    yield "llama", llama(), IDS, 0
    yield "gpt2", gpt(), IDS, 0


def table_of_invariance() -> str:
    """Return what varies on this machine."""
    lines = [
        "| model | format | code | same bits | in batches | padded, chunks, cache | first call |",
        "|---|" + "---|" * 6,
    ]
    for name, model, inputs, dim in models():
        for format in (None, "bf16"):
            for code in ("eager", "compiled"):
                run = (
                    nc.compile(copy.deepcopy(model), under=format, backend="aot_eager") if code == "compiled" else model
                )
                try:
                    under = format if code == "eager" else None
                    found = nc.check_invariance(run, inputs, under=under, dim=dim)
                except nc.errors.NarrowcastError as error:
                    lines.append(f"| {name} | {format or 'fp32'} | {code} | {str(error).splitlines()[0]} | | | |")
                    continue
                batches = [v for v in found.variants if v.name.startswith("batch")]
                others = [v for v in found.variants if v not in batches]
                worst = [max((v.error for v in of), default=0.0) for of in (batches, others)]
                call = next((f"{v.call.op} {v.shapes[0]} / {v.shapes[1]}" for v in found.varying if v.call), "")
                same = len(found.variants) - len(found.varying)
                texts = [f"{error:.1e}" if error else "0" for error in worst]
                of = f"{same} of {len(found.variants)}"
                lines.append(f"| {name} | {format or 'fp32'} | {code} | {of} | {' | '.join(texts)} | {call} |")
                sys.stdout.write(lines[-1] + "\n")
                sys.stdout.flush()
    return "\n".join(lines)


# -- the head in fp32 --------------------------------------------------------------------------------------------------


class Rows(nn.Module):
    """An engine: rows one by one, attention without a fused kernel."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return torch.cat([self.model(row[None]) for row in ids])


def table_of_heads() -> str:
    """Return how far trainer and engine are apart in bf16, with the head in fp32 in none, one or both."""
    model = gpt_of_bytes.trained().bfloat16()
    ids = gpt_of_bytes.windows(gpt_of_bytes.text(is_held_out=True), 16, 3)[0]
    low = nc.Policy.native()
    full = low.with_rules(nc.Rule("aten.linear", "full", module="*head", reason="log-probabilities in fp32"))
    lines = ["| engine | neither | the trainer alone | the engine alone | both |", "|---|---|---|---|---|"]
    engines = {"the trainer's kernels and batch": model, "other attention, rows one by one": Rows(model)}
    for name, engine in engines.items():
        far = []
        for policies in ((low, low), (full, low), (low, full), (full, full)):
            regions = tuple(nc.autocast("cpu", torch.bfloat16, policy=policy) for policy in policies)
            far.append(nc.parity(model, engine, ids, under=regions).distance.rms)
        lines.append(f"| {name} | {' | '.join(f'{one:.4f}' if one else '0' for one in far)} |")
        sys.stdout.write(lines[-1] + "\n")
        sys.stdout.flush()
    return "\n".join(lines)


def write(name: str, table: str) -> None:
    """Write a table between its marks."""
    text = PAGE.read_text(encoding="utf-8")
    before, mark, rest = text.partition(BEGIN.format(name))
    PAGE.write_text(f"{before}{mark}\n\n{table}\n\n{END}{rest.partition(END)[2]}", encoding="utf-8")


def main() -> None:
    """Run all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true", help="write the tables into the page")
    asked = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(2)
    pairs, wrong = table_of_pairs()
    heads = table_of_heads()
    varying = table_of_invariance()
    if asked.write:
        write("heads", heads)
        write("pairs", pairs)
        write("invariance", varying)
    sys.exit(int(wrong > 0))


if __name__ == "__main__":
    main()
