"""Composite ops: in a region, those that no rule is about are captured as the calls inside them.

Eager autocast works so by itself: such an op has no autocast kernel, and the ops that it calls have theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.fx.traceback import annotate

from narrowcast.core.decide import Argument, Call, decide
from narrowcast.core.policy import NOWHERE, RESULT, Site
from narrowcast.core.refusals import check_counted, refusal
from narrowcast.runtime.regions.marks import BOUNDARY, boundary_note
from narrowcast.runtime.regions.ruling import region_on
from narrowcast.runtime.regions.stack import OpenRegion
from narrowcast.runtime.sites.graph_nodes import traced_site
from narrowcast.runtime.sites.numbering import number_call
from narrowcast.runtime.sites.python_stack import warn_here
from narrowcast.runtime.torch_bridge import FORMATS, OpFacts, op_facts, overloads_in, tensors_in
from narrowcast.runtime.torch_bridge.calls import call_of, cast_arguments, cast_results, gather, places_of, slots_of
from narrowcast.runtime.torch_surface import dispatch
from narrowcast.runtime.torch_surface.dispatch import OpOverload, can_decompose, has_kernel
from narrowcast.runtime.torch_surface.state import any_autocast, autocast_off

# -- fused ops, whose kernels call other ops: in a region, captured as those calls -------------------------------------
#
# Eager autocast has no rule about such an op, and casts inside its kernel. A graph that kept the op as one call would
# lose those casts. Each function here makes the calls of a kernel, in its order, in place where the kernel is.


def _encoder_layer(
    src: Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: Tensor,
    norm_bias_1: Tensor,
    norm_weight_2: Tensor,
    norm_bias_2: Tensor,
    ffn_weight_1: Tensor,
    ffn_bias_1: Tensor,
    ffn_weight_2: Tensor,
    ffn_bias_2: Tensor,
    mask: Tensor | None = None,
    mask_type: int | None = None,
) -> Any:
    """Make the calls of transformer_encoder_layer_forward (aten/src/ATen/native/transformers/transformer.cpp)."""
    if src.device.type != "cpu":  # elsewhere nn.TransformerEncoderLayer does not call it in a region
        return NotImplemented
    if src.numel() == 0:
        return src.clone()

    def norm(value: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.layer_norm(value, [embed_dim], weight, bias, eps)

    first = norm(src, norm_weight_1, norm_bias_1) if norm_first else src
    attended: Tensor = dispatch.MULTI_HEAD_ATTENTION(
        first, first, first, embed_dim, num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias, mask, False, True,
        mask_type,
    )[0].add_(src)  # fmt: skip
    between = attended if norm_first else norm(attended, norm_weight_1, norm_bias_1)
    value = norm(between, norm_weight_2, norm_bias_2) if norm_first else between
    rows = value.view(-1, value.size(2))
    hidden = dispatch.ADDMM_ACTIVATION(ffn_bias_1, rows, ffn_weight_1.t(), use_gelu=use_gelu)
    result = torch.addmm(ffn_bias_2, hidden, ffn_weight_2.t()).view(value.size(0), value.size(1), -1).add_(between)
    return result if norm_first else norm(result, norm_weight_2, norm_bias_2)


_BILINEAR = ([1, 3], [0], [1, 2], [2, 3])


def _trilinear(
    first: Tensor,
    weight: Tensor,
    second: Tensor,
    expand1: list[int],
    expand2: list[int],
    expand3: list[int],
    sumdim: list[int],
    unroll_dim: int = 1,
) -> Any:
    """Make the calls of _trilinear in torch.bilinear (aten/src/ATen/native/Linear.cpp): two bmm for each feature.

    They are below autograd, so the gradients are those of the op: its result keeps them, and takes the calls' values.
    """
    if (expand1, expand2, expand3, sumdim) != _BILINEAR or unroll_dim != 1:
        return NotImplemented
    left, weights, right = first.detach(), weight.detach(), second.detach()
    columns = []
    for n in range(weight.size(0)):
        rows = torch.bmm(left.unsqueeze(0), weights.narrow(0, n, 1))
        columns.append(torch.bmm(rows.transpose(0, 1), right.unsqueeze(2)).squeeze(2))
    values = torch.cat(columns, 1).to(first.dtype) if columns else first.new_zeros(first.size(0), 0)
    if not (torch.is_grad_enabled() and any(t.requires_grad for t in (first, weight, second))):
        return values
    with autocast_off():
        result = dispatch.TRILINEAR(first, weight, second, expand1, expand2, expand3, sumdim, unroll_dim)
    result.detach().copy_(values)
    return result


def _matrix_exp(matrix: Tensor) -> Any:
    """Warn of a matrix in a low format: its kernel chooses by the values what it computes, which is not captured."""
    if matrix.dtype in (torch.bfloat16, torch.float16):
        _tell(f"torch.matrix_exp of a matrix in {str(matrix.dtype).removeprefix('torch.')}", "the last bits differ")
    return NotImplemented


def _pinv(matrix: Tensor, *, atol: Tensor | None = None, rtol: Tensor | None = None, hermitian: bool = False) -> Any:
    """Make the calls of linalg_pinv (aten/src/ATen/native/LinearAlgebra.cpp). Its gradient is one formula."""
    if torch.is_grad_enabled() and matrix.requires_grad:
        _tell("torch.linalg.pinv with gradients", "it computes in fp32 here, and gives fp32")
        return NotImplemented
    if matrix.numel() == 0:
        return torch.matmul(matrix.mH, matrix.new_zeros(matrix.size(-2), matrix.size(-2)))
    options: Any = {"dtype": torch.float64, "device": matrix.device}
    precision = torch.finfo(matrix.dtype).eps * max(matrix.size(-2), matrix.size(-1))
    if rtol is None:
        rtol = torch.full((), precision, **options)
        rtol = rtol if atol is None else torch.where(atol > 0, torch.zeros((), **options), rtol)
    atol = torch.zeros((), **options) if atol is None else atol
    if hermitian:
        values, right = torch.linalg.eigh(matrix)
        sizes = values.abs()
        left, largest = right, sizes.amax(-1, True)
    else:
        right, values, vectors = torch.linalg.svd(matrix, full_matrices=False)
        sizes, largest, left = values, values.narrow(-1, 0, 1), vectors.mH
    tolerance = torch.max(atol.unsqueeze(-1), rtol.unsqueeze(-1) * largest)
    inverted = torch.where(
        sizes > tolerance, values.reciprocal(), torch.zeros((), dtype=values.dtype, device=values.device)
    ).to(matrix.dtype)
    return torch.matmul(left * inverted.unsqueeze(-2), right.mH)


def _scaled_mm(matrix: Tensor, *_: Any, **__: Any) -> Any:
    """Call a multiplication of the unpacked operands, as on the cpu, which eager autocast casts."""
    if matrix.device.type == "cpu":
        _tell("a scaled product (aten._scaled_mm) on the cpu", "the last bits differ")
    return NotImplemented


def _tell(what: str, how: str) -> None:
    text = f"narrowcast: {what} casts inside its kernel in eager code, and not in compiled or exported code: {how}. "
    text += "Call it on x.float() outside of the region, or give it a rule of its own"
    warn_here(text)


INSIDE: Mapping[dispatch.OpOverload, Callable[..., Any]] = {
    dispatch.ENCODER_LAYER: _encoder_layer,
    dispatch.TRILINEAR: _trilinear,
    torch.ops.aten.linalg_matrix_exp.default: _matrix_exp,
    torch.ops.aten.linalg_pinv.atol_rtol_tensor: _pinv,
    dispatch.SCALED_MM: _scaled_mm,
    dispatch.SPARSE_ADDMM: torch.addmm,
}
"""By op: what makes the calls inside its kernel, or says that it is called in another way."""


# -- composite ops -----------------------------------------------------------------------------------------------------


def decompositions(graph: torch.fx.GraphModule) -> dict[OpOverload, Callable[..., Any]]:
    """Return functions that run the calls inside composite ops where a region is on and no rule is about the op."""
    called = dict.fromkeys(node.target for node in graph.graph.nodes if isinstance(node.target, OpOverload))
    others = [op for op in called if op.namespace != "aten" and can_decompose(op)]
    return _aten_decompositions() | {op: _decomposed_if_undecided(op) for op in others}


@cache
def _aten_decompositions() -> dict[OpOverload, Callable[..., Any]]:
    """Return the functions of torch's own composite ops, which are the same for all graphs."""
    return {op: _decomposed_if_undecided(op) for op in (*filter(can_decompose, overloads_in("aten")), *INSIDE)}


def _decomposed_if_undecided(op: OpOverload) -> Callable[..., Any]:
    facts = op_facts(op)
    inside = _dropout if op is torch.ops.aten.dropout.default else INSIDE.get(op) or composite_kernel(op)

    def run(*args: Any, **kwargs: Any) -> Any:
        if not any_autocast():
            return NotImplemented
        for device in dict.fromkeys(t.device.type for t in tensors_in(args, kwargs)):
            region = region_on(device)
            if region is None or not is_composite(op, device):
                continue
            candidates = region.prepared.for_graphs.policy.table.candidates(facts.id, facts.computes)
            depends = region.prepared.for_graphs.policy.asks_where(facts.id, facts.computes)
            site = (traced_site() or NOWHERE) if depends else NOWHERE
            if _is_repaired(facts.id, region, site, tensors_in(args, kwargs)):
                return NotImplemented
            if any(rule.matches_site(site) for rule in candidates.whole):
                return NotImplemented
            if not any(rule.matches_site(site) for rule in candidates.per_argument):
                return inside(*args, **kwargs)
            return _in_parts(facts, region, site, inside, args, kwargs)
        return NotImplemented

    return run


def _in_parts(
    facts: OpFacts, region: OpenRegion, site: Site, inside: Callable[..., Any], args: Any, kwargs: dict[str, Any]
) -> Any:
    """Run the calls inside of an op with single arguments or results of which rules are about, as eager code does: its
    arguments are cast, then the calls inside are, and then its results.
    """
    prepared, slots = region.prepared.for_graphs, slots_of(facts, args, kwargs)
    number = number_call(facts.id)
    if not number:
        check_counted(prepared.policy, facts.id, site, facts.computes)
    call = call_of(facts, slots, gather(facts, args, kwargs), site, number=number)
    plan = decide(call, prepared.policy, prepared.facts)
    if plan.refused is not None:
        raise refusal(plan, facts.id, site)

    def noted(name: str) -> Any:
        return annotate({BOUNDARY: boundary_note(facts.id, name, plan.rule_about(name), prepared.policy)})

    for place in places_of(slots, plan):
        with noted(place[1]):
            args, kwargs = cast_arguments((place,), args, kwargs)
    result = inside(*args, **kwargs)
    with noted(RESULT):
        return cast_results(result, plan)


def _is_repaired(op: str, region: OpenRegion, site: Site, tensors: list[torch.Tensor]) -> bool:
    """Return whether the device lacks what is inside the op, so that it runs as a whole, in fp32."""
    prepared = region.prepared.for_graphs
    if op not in prepared.policy.lacking:
        return False
    arguments = tuple(Argument("", FORMATS.get(t.dtype), t.device.type) for t in tensors)
    return decide(Call(op, arguments, site), prepared.policy, prepared.facts).rule is not None


def _dropout(value: torch.Tensor, p: float, train: bool) -> Any:
    """Compute what eager code computes in dropout, without its in-place ops.

    On the cpu it divides a mask of the value's own format by 1 - p, which rounds; made functional, its in-place
    `bernoulli_` would draw other numbers for a tensor that is not contiguous. native_dropout draws the same ones.
    """
    aten = torch.ops.aten
    if value.device.type != "cpu" or not train or not 0 < p < 1 or value.numel() == 0:
        return composite_kernel(aten.dropout.default)(value, p, train)
    mask = aten.native_dropout.default(value.detach(), p, True)[1]
    return value * aten.div.Scalar(mask.to(value.dtype), 1 - p)


@cache
def is_composite(op: OpOverload, device_type: str) -> bool:
    """Return whether the op, on this device type, is nothing but calls of other ops, which autocast sees."""
    if op in INSIDE:
        return True
    if not can_decompose(op):
        return False
    return not any(has_kernel(op, key) for key in (device_type.upper(), f"Autograd{device_type.upper()}"))


def composite_kernel(op: OpOverload) -> Callable[..., Any]:
    """Return what runs the calls inside a composite op: those of eager code, not of the Python version for compilers.

    Those two differ: dropout on the cpu, for example, rounds its scale to the input's format in eager code alone. But
    eager code's istft reads the values of its window, which a capture does not know.
    """
    kernel = dispatch.composite_kernel(op) if op is not torch.ops.aten.istft.default else None
    return kernel or op.decompose
