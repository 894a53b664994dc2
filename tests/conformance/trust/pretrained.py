"""Sound programs of transformers, from small configurations. Without the package they are said to be missing."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from program import Made, program

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 60}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 60}
CODEC = {"num_filters": 8, "hidden_size": 32, "upsampling_ratios": [4, 4, 2], "codebook_dim": 32}
VISION = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
TOKENS = {"input_ids": (2, 10)}

MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    # name of the classes' stem: suffix of the model's class, configuration, what it reads
    "Bert": ("ForMaskedLM", SMALL, "padded"),
    "Roberta": ("ForMaskedLM", SMALL, "tokens"),
    "Albert": ("Model", SMALL | {"embedding_size": 16}, "padded"),
    "DebertaV2": ("Model", SMALL | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}, "padded"),
    "GPT2": ("LMHeadModel", {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 60, "n_positions": 32}, "tokens"),
    "GPTNeoX": ("ForCausalLM", SMALL, "tokens"),
    "Llama": ("ForCausalLM", SMALL, "padded"),
    "Mistral": ("ForCausalLM", SMALL | {"num_key_value_heads": 2}, "tokens"),
    "Qwen2": ("ForCausalLM", SMALL | {"num_key_value_heads": 2}, "tokens"),
    "Gemma2": ("ForCausalLM", SMALL | {"num_key_value_heads": 2, "head_dim": 8}, "tokens"),
    "Mixtral": ("ForCausalLM", SMALL | {"num_key_value_heads": 2, "num_local_experts": 4}, "tokens"),
    "Bloom": ("ForCausalLM", {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 60}, "tokens"),
    "OPT": ("ForCausalLM", {**SMALL, "ffn_dim": 64, "word_embed_proj_dim": 32}, "tokens"),
    "T5": ("ForConditionalGeneration", T5, "both"),
    "Mamba": ("ForCausalLM", {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 60, "state_size": 4}, "tokens"),
    "ViT": ("Model", VISION | {"image_size": 16, "patch_size": 4}, "image"),
    "ConvNext": ("Model", {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2}, "image"),
    "Encodec": ("Model", CODEC, "sound"),
}


def _inputs(kind: str) -> tuple[Any, ...]:
    tokens = torch.randint(3, 60, (2, 10))
    keep = (torch.arange(10) < torch.tensor([[10], [6]])).long()
    return {
        "tokens": (tokens,), "padded": (tokens, keep), "both": (tokens, None, tokens),
        "image": (torch.randn(2, 3, 16, 16),), "sound": (torch.randn(1, 1, 480),),
    }[kind]  # fmt: skip


def enter() -> str:
    """Puts them into the table; says what is missing."""
    try:
        transformers = importlib.import_module("transformers")
    except ImportError:
        return f"transformers is not installed: {len(MODELS)} programs are missing"
    for stem, (suffix, options, kind) in MODELS.items():

        def make(stem: str = stem, suffix: str = suffix, options: Any = options, kind: str = kind) -> Made:
            config = getattr(transformers, f"{stem}Config")(**options)
            model = getattr(transformers, stem + suffix)._from_config(config, attn_implementation="eager") \
                if stem in ("GPT2", "Llama", "Bert") else getattr(transformers, stem + suffix)(config)  # fmt: skip
            return Made(_Plain(model.eval()), _inputs(kind), lambda out: out.float().square().mean())

        make.__name__ = f"transformers_{stem}"
        program("configurations of transformers", trains=stem != "Encodec")(make)
    return ""


class _Plain(torch.nn.Module):
    """Gives its first tensor: no caches, no hidden states."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model
        takes = {"T5": ("input_ids", "attention_mask", "decoder_input_ids")}
        self.names = takes.get(type(model).__name__[:2], ())

    def forward(self, *args: Any) -> Any:
        out = self.model(**dict(zip(self.names, args, strict=False))) if self.names else self.model(*args)
        values = out.to_tuple()
        return values[-1] if "Encodec" in type(self.model).__name__ else values[0]
