"""Graphs of torch.fx, the tracing that makes them, and the fake tensors that it runs on."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from traceback import FrameSummary, StackSummary
from typing import Any

import torch
from torch._C._functorch import is_functorch_wrapped_tensor as is_functorch_wrapped_tensor
from torch._higher_order_ops.utils import reenter_make_fx as reenter_make_fx
from torch._higher_order_ops.wrap import tag_activation_checkpoint
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor, FakeTensorMode as FakeTensorMode
from torch.fx.experimental import proxy_tensor
from torch.utils.checkpoint import checkpoint

from narrowcast.runtime.torch_surface.patches import held
from narrowcast.runtime.torch_surface.state import ENTER_AUTOCAST

without_pre_dispatch_mode = proxy_tensor._temp_remove_pre_dispatch_torch_function_mode
FAKE_TENSOR_LOGGER = "torch._subclasses.fake_tensor"
"""Where torch logs what fake tensors cannot carry."""


def same_random_numbers() -> Any:
    """Return a context after which the random state is as before."""
    return torch._dynamo.utils.preserve_rng_state()


def fake_like(tensor: torch.Tensor, mode: FakeTensorMode, device: torch.device | str) -> FakeTensor:
    """Return a fake tensor of the same sizes, strides and dtype on a device; as `torch.empty_strided` in the mode."""
    there = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
    return FakeTensor(mode, there, torch.device(device))


def as_parameter(tensor: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    """Return a new tensor as a parameter. A fake one is made one: `Parameter` takes a view, a call of its mode."""
    if not isinstance(tensor, FakeTensor):
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    tensor._is_param = True
    return tensor.requires_grad_(requires_grad)


class Interpreter(torch.fx.Interpreter):
    """Runs a graph node by node. What it recomputes in the backward draws the random numbers of the forward again:
    torch's own op for that is made for compilers, which see to it themselves.
    """

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one call."""
        if target is not tag_activation_checkpoint:
            return super().call_function(target, args, kwargs)
        body, *inputs = args
        chosen = {} if (make := body.meta.get("_checkpoint_context_fn")) is None else {"context_fn": make}
        return checkpoint(Interpreter(body).run, *inputs, **{**kwargs, **chosen, "use_reentrant": False})


def all_frames(is_kept: Callable[[str], bool]) -> AbstractContextManager[None]:
    """Return a context in which torch.export notes, besides the frames of `forward`, all that those call in files that
    are kept: rules name functions by them. Dynamo, which strict export runs, notes them in any case.
    """

    def wrap(asked: Callable[..., StackSummary]) -> Callable[..., StackSummary]:
        def filtered(tracer: Any, frames: list[FrameSummary]) -> StackSummary:
            noted = asked(tracer, frames)
            known = {id(frame) for frame in noted}
            first = next((n for n, frame in enumerate(frames) if id(frame) in known), len(frames))
            return StackSummary.from_list(f for f in frames[first:] if id(f) in known or is_kept(f.filename))

        return filtered

    return held(torch.fx.proxy.TracerBase, "rules name functions", _filter_traceback_frames=wrap)


def keeping_grad_modes() -> AbstractContextManager[None]:
    """Return a context in which torch.export keeps a `no_grad` block inside an autocast block: it splits the graph
    there, opens the autocast block again before each part, and asks whether a part begins with a grad mode.
    """
    passes = importlib.import_module("torch._export.passes.replace_set_grad_with_hop_pass")

    def wrap(asked: Callable[..., bool]) -> Callable[..., bool]:
        def begins(node: torch.fx.Node, omit_if_same_with_ambient: bool = False) -> bool:
            part = getattr(node.graph.owning_module, str(node.target), None) if node.op == "call_module" else None
            nodes = part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ()
            passed = ("placeholder", "get_attr")
            first = next((n for n in nodes if n.op not in passed and n.target is not ENTER_AUTOCAST), None)
            if first is None or first.target is not torch._C._set_grad_enabled:
                return asked(node, omit_if_same_with_ambient)
            return not omit_if_same_with_ambient or first.args[0] != torch.is_grad_enabled()

        return begins

    return held(passes, "no_grad in an autocast block", _is_set_grad_enabled_sub_mod=wrap)


def keep_calls(*functions: Callable[..., Any]) -> None:
    """Keep calls of these in graphs whatever becomes of their results."""
    from torch.fx.node import _side_effectful_functions

    _side_effectful_functions.update(functions)


rename = torch.fx.Node._rename
"""Give a node of a graph another name."""


def updated_program(program: torch.export.ExportedProgram, *args: Any, **changed: Any) -> torch.export.ExportedProgram:
    """Return an exported program with another graph and signature."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)  # of torch's own copy
        return torch.export.ExportedProgram._update(program, *args, **changed)
