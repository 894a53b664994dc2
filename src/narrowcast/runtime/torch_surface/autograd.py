"""Autograd: the backward that is running, its nodes, what is saved for it, the modes that switch it off."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from operator import methodcaller
from typing import Any

import torch


def note_forward(ctx: Any, dtype: torch.dtype, used_autocast: bool) -> None:
    """Note on an autograd function's context what `torch.amp.custom_bwd` reads: the low dtype, and whether it is on."""
    ctx._dtype, ctx._fwd_used_autocast = dtype, used_autocast


def noted_forward(ctx: Any) -> tuple[torch.dtype, bool]:
    """Return what `note_forward` noted."""
    return ctx._dtype, ctx._fwd_used_autocast


def is_leaf(tensor: torch.Tensor) -> bool:
    """Return whether no op made it. Of a view that was made without gradients, and written to since, torch does not
    say: it raises, and such a view is none.
    """
    try:
        return tensor.is_leaf
    except RuntimeError:
        return False


def is_trained(value: object) -> bool:
    """Return whether a value is a tensor whose gradient a backward adds up."""
    return isinstance(value, torch.Tensor) and value.requires_grad and is_leaf(value)


def gradient_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a tensor's gradient; None of a result that keeps none: torch warns where that is read."""
    return tensor.grad if is_leaf(tensor) or tensor.retains_grad else None


def is_in_derivative() -> bool:
    """Return whether a function that torch.func differentiates is running on this thread."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != "torch._functorch.eager_transforms":
        frame = frame.f_back
    return frame is not None


SET_GRAD_ENABLED = torch._C._set_grad_enabled
"""What `torch.no_grad` is as a call in a graph."""
INFERENCE_MODE = (torch.autograd.grad_mode._enter_inference_mode, torch.autograd.grad_mode._exit_inference_mode)
"""What `torch.inference_mode` is as calls in a graph."""

current_graph_task = torch._C._current_graph_task_id
"""The number of the backward that runs on this thread; -1 if none does."""


next_sequence_number: Callable[[], int] = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]
"""The sequence number that the next autograd node of this thread will get."""
sequence_number: Callable[[Any], int] = methodcaller("_sequence_nr")
"""The sequence number of an autograd node."""
current_autograd_node: Callable[[], Any | None] = torch._C._current_autograd_node
"""The autograd node that is running its backward on this thread, if any."""

_MOST = 20_000


def nodes_before(root: Any, barriers: Set[int] = frozenset()) -> list[Any]:
    """Return an autograd node, and those that its backward goes on to up to the barriers, these included.

    barriers: sequence numbers. At most 20,000 nodes.
    """
    waiting, seen = [root], dict[Any, None]()
    while waiting and len(seen) < _MOST:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen[node] = None
        if sequence_number(node) not in barriers:
            waiting += [before for before, _ in node.next_functions]
    return list(seen)


def numbers_before(root: Any) -> set[int]:
    """Return the sequence numbers of an autograd node and of those that its backward goes on to."""
    return set(map(sequence_number, nodes_before(root)))


def in_hook() -> bool:
    """Return whether a backward is where a leaf gets its gradient: what computes there is a hook of the user's."""
    return hasattr(current_autograd_node(), "variable")


def gives_gradients(node: Any) -> bool:
    """Return whether hooks on gradients that are ready run in this node, or, without one, at the end of a backward."""
    return node is None or hasattr(node, "variable") or "PostBackward" in type(node).__name__


def has_saved_tensors_hooks() -> bool:
    """Return whether what autograd saves on this thread goes through hooks."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


@contextmanager
def transforms_as_they_were() -> Iterator[None]:
    """Leave transforms (torch.func) at the end that are entered inside, and not left because of an error."""
    functorch, saved = torch._C._functorch, torch._C._autograd
    depth = functorch.get_dynamic_layer_stack_depth()
    refusal = saved._saved_tensors_hooks_get_disabled_error_message()
    try:
        yield
    finally:
        functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)
        if refusal is None:
            saved._saved_tensors_hooks_enable()
        else:
            saved._saved_tensors_hooks_disable(refusal)
