"""How a model is given padding, positions and caches: a small protocol, and that of models of transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch


class Decoding(Protocol):
    """The words of a model of sequences. inputs: its keyword arguments, of one sample."""

    def length(self, inputs: Mapping[str, Any]) -> int:
        """Return how many tokens the sample has."""

    def padded(self, inputs: Mapping[str, Any], before: int, after: int, fill: int) -> Mapping[str, Any]:
        """Return the inputs with padding of this token before and after the sample, masked, positions unchanged."""

    def own(self, output: Any, before: int, after: int) -> torch.Tensor:
        """Return what the output has for the sample's own tokens, in order."""

    def in_chunks(self, model: Any, inputs: Mapping[str, Any], lengths: Sequence[int]) -> torch.Tensor | None:
        """Return the same where the model reads tokens in chunks of these lengths, with a cache; None without one."""


class OfTransformers:
    """That of models of transformers: `input_ids`, `attention_mask`, `position_ids`, `past_key_values`."""

    def length(self, inputs: Mapping[str, Any]) -> int:
        """Return how many tokens the sample has."""
        return int(inputs["input_ids"].shape[1])

    def padded(self, inputs: Mapping[str, Any], before: int, after: int, fill: int) -> Mapping[str, Any]:
        """Return the inputs with padding before and after."""
        ids = inputs["input_ids"]
        mask = inputs.get("attention_mask", torch.ones_like(ids))
        ends = before, after
        padded = {
            "input_ids": torch.nn.functional.pad(ids, ends, value=fill),
            "attention_mask": torch.nn.functional.pad(mask, ends, value=0),
        }
        if before and "position_ids" in self.takes:
            places = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
            padded["position_ids"] = torch.nn.functional.pad(places, ends, value=0)
        return {**inputs, **padded}

    def __init__(self, takes: Sequence[str]) -> None:
        """takes: the names of the arguments of the model's forward."""
        self.takes = takes

    def own(self, output: Any, before: int, after: int) -> torch.Tensor:
        """Return the logits, or the last hidden state, of the sample's tokens."""
        rows = _rows(output)
        return rows[:, before : rows.shape[1] - after]

    def in_chunks(self, model: Any, inputs: Mapping[str, Any], lengths: Sequence[int]) -> torch.Tensor | None:
        """Return what the model gives chunk by chunk, with its own cache."""
        if "past_key_values" not in self.takes or set(inputs) - {"input_ids", "attention_mask"}:
            return None
        ids, cache, found, done = inputs["input_ids"], None, [], 0
        for length in lengths:
            mask = torch.ones_like(ids[:, : done + length])
            output = model(
                input_ids=ids[:, done : done + length], attention_mask=mask, past_key_values=cache, use_cache=True
            )
            cache = getattr(output, "past_key_values", None)
            if cache is None:
                return None
            found.append(_rows(output))
            done += length
        return torch.cat(found, 1)


def _rows(output: Any) -> torch.Tensor:
    rows = getattr(output, "logits", None)
    rows = getattr(output, "last_hidden_state", None) if rows is None else rows
    found: torch.Tensor = output[0] if rows is None else rows
    return found


def decoding_of(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Decoding, dict[str, Any]] | None:
    """Return the protocol of a model of transformers and its inputs by name; None of another, or of one that is given
    more than tokens, or padding.
    """
    if not hasattr(model, "config") or not type(model).__module__.startswith("transformers."):
        return None
    inputs = dict(kwargs)
    if len(args) == 1 and isinstance(args[0], torch.Tensor) and not args[0].is_floating_point():
        inputs["input_ids"] = args[0]
    elif args:
        return None
    code = type(model).forward
    takes = code.__wrapped__.__code__.co_varnames if hasattr(code, "__wrapped__") else code.__code__.co_varnames
    mask = inputs.get("attention_mask")
    if isinstance(mask, torch.Tensor) and not bool(mask.all()):
        return None
    is_text = set(inputs) <= {"input_ids", "attention_mask"} and "input_ids" in inputs and "attention_mask" in takes
    return (
        (OfTransformers(takes), inputs) if is_text and not getattr(model.config, "is_encoder_decoder", False) else None
    )
