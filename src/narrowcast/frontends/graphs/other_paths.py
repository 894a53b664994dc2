"""Modules that take another path when they are traced than in eager code: torch's own choice, which is said.

nn.MultiheadAttention asks whether it is traced. In eager code, in evaluation and without gradients, it is one fused op;
traced, it is the calls of the unfused path, which round elsewhere. No cast makes up for that.
"""

from __future__ import annotations

import warnings

import torch

from narrowcast.formats import fp32
from narrowcast.programs.program import Program


def tell_other_paths(model: torch.nn.Module, program: Program) -> None:
    """Warn of each attention of the model that a captured program computes otherwise than eager code does."""
    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.MultiheadAttention) and _may_be_fused(module) and _takes_weights(program, name)
    ]
    if names:
        where = ", ".join(name or "the model itself" for name in names)
        warnings.warn(
            "narrowcast: nn.MultiheadAttention is one fused op in eager code, in evaluation and without gradients, and "
            f"takes torch's unfused path when it is traced: {where}. The last bits differ, in fp32, too. "
            "torch.backends.mha.set_fastpath_enabled(False) has eager code take the same path",
            stacklevel=3,
        )


def _may_be_fused(attention: torch.nn.MultiheadAttention) -> bool:
    """Whether eager code fuses it for an input of the format of its weights, as it is now."""
    trains = torch.is_grad_enabled() and any(p.requires_grad for p in attention.parameters())
    plain = attention.bias_k is None and attention.bias_v is None and not attention.add_zero_attn
    whole = attention.in_proj_weight is not None and attention.in_proj_bias is not None
    fits = attention.batch_first and attention.num_heads % 2 == 0
    return torch.backends.mha.get_fastpath_enabled() and not (trains or attention.training) and plain and whole and fits


def _takes_weights(program: Program, name: str) -> bool:
    """Whether the unfused path was captured there, of one fp32 tensor, in a region of the cpu."""
    steps = [step for step in program.steps.values() if step.site.module_path == (name or "(root)")]
    turned = {step.operands[0].value for step in steps if step.op == "aten.transpose.int"} - {step.id for step in steps}
    if len(turned) != 1:  # query, key and value are not the same, or it is fused here, too
        return False
    value = program.values[turned.pop()]
    enabled = any(r.facts.enabled and r.facts.device_type == value.device == "cpu" for r in program.regions)
    return value.format is fp32 and not value.gradient and enabled
