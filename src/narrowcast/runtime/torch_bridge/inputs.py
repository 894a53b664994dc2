"""`inputs`: what a model is called with, as one value."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from narrowcast.errors import RunError

Inputs = Any
"""A tensor is one argument; a tuple or list, the arguments; a mapping, the keyword arguments; `(tuple, mapping)`, both.
"""


def call_arguments(verb: str, inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments and keyword arguments that inputs represent. Raise RunError for what is none of these.

    As in torch.jit.trace, a model that takes one tuple is given `((pair,),)`; a named tuple, as torch's packed
    sequences are, is one argument.
    """
    if isinstance(inputs, torch.Tensor) or (isinstance(inputs, tuple) and hasattr(inputs, "_fields")):
        return (inputs,), {}
    if isinstance(inputs, Mapping):
        return (), _keywords(verb, inputs)
    if not isinstance(inputs, tuple | list):
        raise RunError(
            f"{verb}(model, {type(inputs).__name__})", "inputs are a tensor, a tuple of arguments, or a mapping of "
            "keyword arguments", advice=f"Write {verb}(model, (x,)) for one argument of another kind.",
        )  # fmt: skip
    if len(inputs) == 2 and type(inputs[0]) is tuple and isinstance(inputs[1], Mapping):
        return inputs[0], _keywords(verb, inputs[1])
    return tuple(inputs), {}


@contextmanager
def called_with(model: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Add to a TypeError of a call that does not fit the model's signature how inputs become arguments."""
    try:
        yield
    except TypeError as error:
        try:
            inspect.signature(model.forward if isinstance(model, torch.nn.Module) else model).bind(*args, **kwargs)
        except TypeError:
            error.add_note(
                f"inputs were given as {len(args)} arguments and {len(kwargs)} keyword arguments: a tuple is the "
                "arguments, a mapping the keyword arguments, ((a, b),) one argument that is a tuple"
            )
        except ValueError:
            pass  # it has no signature to be read
        raise


def _keywords(verb: str, inputs: Mapping[Any, Any]) -> dict[str, Any]:
    wrong = next((key for key in inputs if not isinstance(key, str)), None)
    if wrong is not None:
        raise RunError(
            f"{verb}(model, a mapping)", f"its key {wrong!r} is not the name of an argument",
            advice=f"A mapping holds keyword arguments; write {verb}(model, (mapping,)) for one that is an argument.",
        )  # fmt: skip
    return dict(inputs)
