"""check: run an explicit graph on fake tensors, without autocast, and compare every format with what was captured.

The capture ran the region's own kernels; the graph has what `decide` returned. Two ways to the same formats: where they
differ, one of them is wrong, and the graph is not used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from narrowcast.errors import CaptureError, first_line
from narrowcast.formats import fp32
from narrowcast.frontends.graphs.capture import detached
from narrowcast.programs.program import Program
from narrowcast.runtime.sites.graph_nodes import node_site
from narrowcast.runtime.sites.python_stack import warn_here
from narrowcast.runtime.torch_surface.autograd import SET_GRAD_ENABLED
from narrowcast.runtime.torch_surface.dispatch import HigherOrderOperator, OpOverload, enable_python_dispatcher
from narrowcast.runtime.torch_surface.fx import same_random_numbers
from narrowcast.runtime.torch_surface.state import autocast_off


def check_formats(graph: GraphModule, inputs: Sequence[Any]) -> None:
    """Raise CaptureError if a call returns another element type than it was captured with, or cannot be called at all.

    With the Python dispatcher, as tracing has it: some ops take symbolic sizes there alone.
    """
    runner = _Checker(graph)
    with torch.no_grad(), autocast_off(), same_random_numbers(), enable_python_dispatcher():
        runner.run(*[detached(v) if isinstance(v, torch.Tensor) else v for v in inputs])


class _Checker(torch.fx.Interpreter):
    def run_node(self, n: Node) -> Any:
        expected = n.meta.get("val")
        if isinstance(n.target, HigherOrderOperator):
            return expected  # taken at its word
        if n.target is SET_GRAD_ENABLED:  # grad mode is of no interest here
            return None
        if not isinstance(n.target, OpOverload):
            return super().run_node(n)
        try:
            value = super().run_node(n)
        except Exception as error:
            raise _difference(n, first_line(error)) from error
        if isinstance(expected, torch.Tensor) and isinstance(value, torch.Tensor) and expected.dtype != value.dtype:
            raise _difference(n, f"gives {value.dtype} where the region's own kernels return {expected.dtype}")
        return value


def _difference(node: Node, found: str) -> CaptureError:
    where = node_site(node.meta).origins
    advice = "The graph runs as eager would run it instead. Please report this with the model."
    return CaptureError(f"{node.target} with explicit casts", found, where, advice)


# -- modules that take another path when they are traced than in eager code --------------------------------------------
#
# nn.MultiheadAttention asks whether it is traced. In eager code, in evaluation and without gradients, it is one fused
# op; traced, it is the calls of the unfused path, which round elsewhere. No cast makes up for that.


def tell_other_paths(model: torch.nn.Module, program: Program) -> None:
    """Warn of each attention of the model that a captured program computes otherwise than eager code does."""
    attentions = ((n, m) for n, m in model.named_modules() if isinstance(m, torch.nn.MultiheadAttention))
    names = [name for name, module in attentions if _may_be_fused(module) and _takes_weights(program, name)]
    if names:
        where = ", ".join(name or "the model itself" for name in names)
        text = "narrowcast: nn.MultiheadAttention is one fused op in eager code, in evaluation and without gradients, "
        text += f"and takes torch's unfused path when it is traced: {where}. The last bits differ, in fp32, too. "
        text += "torch.backends.mha.set_fastpath_enabled(False) has eager code take the same path"
        warn_here(text)


def _may_be_fused(attention: torch.nn.MultiheadAttention) -> bool:
    """Return whether eager code fuses it for an input of the format of its weights, as it is now."""
    trains = torch.is_grad_enabled() and any(p.requires_grad for p in attention.parameters())
    plain = attention.bias_k is None and attention.bias_v is None and not attention.add_zero_attn
    whole = attention.in_proj_weight is not None and attention.in_proj_bias is not None
    fits = attention.batch_first and attention.num_heads % 2 == 0
    return torch.backends.mha.get_fastpath_enabled() and not (trains or attention.training) and plain and whole and fits


def _takes_weights(program: Program, name: str) -> bool:
    """Return whether the unfused path was captured there, of one fp32 tensor, in a region of the cpu."""
    steps = [step for step in program.steps.values() if step.site.module_path == (name or "(root)")]
    turned = {step.operands[0].value for step in steps if step.op == "aten.transpose.int"} - {step.id for step in steps}
    if len(turned) != 1:  # query, key and value are not the same, or it is fused here, too
        return False
    value = program.values[turned.pop()]
    enabled = any(r.facts.enabled and r.facts.device_type == value.device == "cpu" for r in program.regions)
    return value.format is fp32 and not value.gradient and enabled
