"""The log-probabilities that a language model gave the tokens it was run on."""

from __future__ import annotations

from typing import Any

import torch

from narrowcast.errors import RunError
from narrowcast.observation.observer.observer import quietly


def log_probabilities_of(output: Any, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token but the first of its row, and its log-probability given those before it, in fp64: two of [N].

    output: logits [..., T, V], or what has them as `logits`, or first; tokens: ids [..., T]. RunError for others.
    """
    logits = getattr(output, "logits", output)
    logits = logits[0] if isinstance(logits, list | tuple) and logits else logits
    asked = f"capture(tokens={list(tokens.shape)})"
    if not isinstance(logits, torch.Tensor) or logits.shape[:-1] != tokens.shape or tokens.shape[-1] < 2:
        found = list(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
        raise RunError(
            asked, f"the model returned {found}, no logits of each token",
            advice="Give the ids [..., T] of a model whose output, its `logits` or its first part is [..., T, V].",
        )  # fmt: skip
    with quietly():
        ids = tokens[..., 1:].to(logits.device).reshape(-1)
        if not 0 <= int(ids.min()) <= int(ids.max()) < logits.shape[-1]:
            raise RunError(asked, f"ids outside of a vocabulary of {logits.shape[-1]}", advice="Give the model's ids.")
        rows = logits[..., :-1, :].reshape(-1, logits.shape[-1])
        values = [row.double().log_softmax(-1).gather(0, ids[number, None]) for number, row in enumerate(rows)]
        return ids.cpu(), torch.cat(values).cpu()
