"""Graphs of torch.fx, the tracing that makes them, and the fake tensors that it runs on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._higher_order_ops.utils import reenter_make_fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import (
    _temp_remove_pre_dispatch_torch_function_mode as without_pre_dispatch_mode,
)

__all__ = [
    "FAKE_TENSOR_LOGGER",
    "FakeTensor",
    "FakeTensorMode",
    "is_functorch_wrapped_tensor",
    "keep_calls",
    "reenter_make_fx",
    "rename",
    "same_random_numbers",
    "updated_program",
    "without_pre_dispatch_mode",
]  # fmt: skip

FAKE_TENSOR_LOGGER = "torch._subclasses.fake_tensor"
"""Where torch logs what fake tensors cannot carry."""


def same_random_numbers() -> Any:
    """A context after which the random state is as before."""
    return torch._dynamo.utils.preserve_rng_state()


def keep_calls(*functions: Callable[..., Any]) -> None:
    """Calls of these stay in graphs whatever becomes of their results."""
    from torch.fx.node import _side_effectful_functions

    _side_effectful_functions.update(functions)


def rename(node: torch.fx.Node, name: str) -> None:
    """Give a node of a graph another name."""
    node._rename(name)


def updated_program(program: torch.export.ExportedProgram, *args: Any, **kwargs: Any) -> torch.export.ExportedProgram:
    """An exported program with another graph and signature."""
    result: torch.export.ExportedProgram = program._update(*args, **kwargs)
    return result
