"""Log-probabilities of a language model's tokens, of the logits that it returns."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from narrowcast.errors import RunError
from narrowcast.observation.trial.trial import Trial
from narrowcast.runtime.torch_surface.dispatch import quietly

LEFT_OUT = -100
"""Among tokens, where no log-probability is wanted: torch's own number for what a loss leaves out."""
NAMES = ("decoder_input_ids", "input_ids", "tokens", "ids")
"""Keyword arguments that hold a language model's tokens, the first first."""


def without_padding(tokens: torch.Tensor, trial: Trial) -> torch.Tensor:
    """Return tokens with -100 where the mask among a model's arguments is zero, and where the logits of a token are
    those of such a place.
    """
    try:
        names = [*inspect.signature(getattr(trial.model, "forward", trial.model)).parameters]
    except (TypeError, ValueError):  # of C code
        names = []
    given = {**dict(zip(names, trial.args, strict=False)), **trial.kwargs}
    mask = given.get("decoder_attention_mask" if given.get(NAMES[0]) is not None else "attention_mask")
    if not isinstance(mask, torch.Tensor) or mask.shape != tokens.shape:
        return tokens
    is_out = mask == 0
    is_out[..., 1:] |= mask[..., :-1] == 0
    return tokens.masked_fill(is_out, LEFT_OUT)


def log_probabilities_of(output: Any, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each token but the first of its row, and its log-probability given those before it, in fp64: two of [N].

    output, tokens: as for `logits_of`.
    """
    ids, rows = logits_of(output, tokens)
    with quietly():
        values = [row.double().log_softmax(-1).gather(0, ids[number, None]) for number, row in enumerate(rows)]
        return ids.cpu(), torch.cat(values).cpu()


def after_the_last(a: Any, b: Any, tokens: torch.Tensor) -> tuple[list[float], list[float]]:
    """Return the log-probabilities, in a and in b, of what either finds most likely after the last token of each row;
    none where there is padding, or vocabularies are of other sizes. a, b, tokens: as for `logits_of`.
    """
    with quietly():
        is_wanted = (tokens[..., -1] != LEFT_OUT).reshape(-1)
        x, y = (_logits_in(one).detach()[..., -1, :].double().cpu() for one in (a, b))
        if x.shape != y.shape:
            return [], []
        x, y = (one.reshape(-1, one.shape[-1])[is_wanted.cpu()].log_softmax(-1) for one in (x, y))
        ids = torch.stack([x.argmax(-1), y.argmax(-1)], -1)
        return x.gather(-1, ids).flatten().tolist(), y.gather(-1, ids).flatten().tolist()


def _logits_in(output: Any) -> Any:
    logits = output["logits"] if isinstance(output, Mapping) and "logits" in output else output
    logits = getattr(logits, "logits", logits)
    return logits[0] if isinstance(logits, list | tuple) and logits else logits


def logits_of(output: Any, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each token but the first of its row, and the logits for its place: [N], [N, V].

    output: logits [..., T, V], or what has them as `logits`, or first; tokens: ids [..., T], -100 where nothing is
    wanted. RunError for others.
    """
    logits = _logits_in(output)
    asked = f"capture(tokens={list(tokens.shape)})"
    if not isinstance(logits, torch.Tensor) or logits.shape[:-1] != tokens.shape or tokens.shape[-1] < 2:
        found = list(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
        raise RunError(
            asked, f"the model returned {found}, no logits of each token",
            advice="Give the ids [..., T] of a model whose output, its `logits` or its first part is [..., T, V].",
        )  # fmt: skip
    with quietly():
        ids = tokens[..., 1:].to(logits.device).reshape(-1)
        rows = logits[..., :-1, :].reshape(-1, logits.shape[-1])
        is_wanted = ids != LEFT_OUT
        ids, rows = ids[is_wanted], rows[is_wanted]
        if not ids.numel():
            raise RunError(asked, f"every token is {LEFT_OUT}", advice="Give the ids of those to compare.")
        if not 0 <= int(ids.min()) <= int(ids.max()) < logits.shape[-1]:
            raise RunError(asked, f"ids outside of a vocabulary of {logits.shape[-1]}", advice="Give the model's ids.")
        return ids, rows
