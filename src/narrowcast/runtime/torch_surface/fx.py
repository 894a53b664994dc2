"""Graphs of torch.fx, the tracing that makes them, and the fake tensors that it runs on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C._functorch import is_functorch_wrapped_tensor as is_functorch_wrapped_tensor
from torch._higher_order_ops.utils import reenter_make_fx as reenter_make_fx
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor, FakeTensorMode as FakeTensorMode
from torch.fx.experimental import proxy_tensor

without_pre_dispatch_mode = proxy_tensor._temp_remove_pre_dispatch_torch_function_mode
FAKE_TENSOR_LOGGER = "torch._subclasses.fake_tensor"
"""Where torch logs what fake tensors cannot carry."""


def same_random_numbers() -> Any:
    """Return a context after which the random state is as before."""
    return torch._dynamo.utils.preserve_rng_state()


def keep_calls(*functions: Callable[..., Any]) -> None:
    """Keep calls of these in graphs whatever becomes of their results."""
    from torch.fx.node import _side_effectful_functions

    _side_effectful_functions.update(functions)


rename = torch.fx.Node._rename
"""Give a node of a graph another name."""
updated_program: Callable[..., torch.export.ExportedProgram] = torch.export.ExportedProgram._update
"""An exported program with another graph and signature."""
