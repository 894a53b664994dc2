"""Gradient scaling: torch's scaler under public names, its ops, who clips gradients, what a loss was computed in."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from traceback import walk_stack
from typing import Any

import torch
from torch.amp.grad_scaler import OptState
from torch.nn.utils import clip_grad

from narrowcast.runtime.torch_surface.autograd import nodes_before
from narrowcast.runtime.torch_surface.patches import stay

check_and_unscale = torch._amp_foreach_non_finite_check_and_unscale_
"""(gradients of one device and dtype, flag, inverse scale): multiply in place; the flag is 1.0 if one is not finite."""
update_scale = torch._amp_update_scale_
"""(scale, steps without a skip, flag, growth factor, backoff factor, growth interval), in place, on the device."""
UNSCALE = "aten._amp_foreach_non_finite_check_and_unscale_.default"
UPDATE_SCALE = "aten._amp_update_scale_.default"
"""The ids of these two."""
norms_of = torch._foreach_norm
"""(tensors, order): a norm of each."""
is_definitely_without_cuda = torch.cuda.amp.common.amp_definitely_not_available
"""Whether a scaler for `cuda` switches itself off here."""

READY, UNSCALED, STEPPED = OptState.READY, OptState.UNSCALED, OptState.STEPPED
"""Where an optimizer stands between two updates."""


class NativeScaler(torch.amp.GradScaler):
    """torch's scaler, whose own methods call `gradients_checked` where they check."""

    def gradients_checked(
        self, optimizer: torch.optim.Optimizer, inverse: torch.Tensor, found: torch.Tensor
    ) -> dict[torch.device, torch.Tensor]:
        """Check the optimizer's gradients and multiply them by `inverse`; a flag for each device."""
        raise NotImplementedError

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        return self.gradients_checked(optimizer, inv_scale, found_inf)

    # -- its parts under public names ----------------------------------------------------------------------------------

    @property
    def scale_tensor(self) -> torch.Tensor | None:
        """The scale on its device; None before something was scaled."""
        return scale_of(self)

    @property
    def first_scale(self) -> float:
        """The scale that the first scaled loss will be scaled by."""
        return float(self._init_scale)

    def make_scale(self, device: torch.device) -> torch.Tensor:
        """Return the scale on its device, made there if it is on none."""
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(device)
        scale: torch.Tensor = self._scale  # type: ignore[assignment]
        return scale

    def state_of(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the state of an optimizer since the last update: `stage`, and `found_inf_per_device`, its flags."""
        state: dict[str, Any] = self._per_optimizer_states[id(optimizer)]
        return state

    def states(self) -> tuple[dict[str, Any], ...]:
        """Return the states of all optimizers since the last update."""
        return tuple(self._per_optimizer_states.values())

    def forget_states(self) -> None:
        """Make every optimizer ready again, as the last step of an update."""
        self._per_optimizer_states.clear()


def steps_by_scaler() -> bool:
    """Return whether this is called in the step of a scaler, which asks for its optimizer, and steps it."""
    frames = (frame for frame, _ in walk_stack(sys._getframe(1)) if frame.f_code.co_name == "step")
    return any(isinstance(frame.f_locals.get("self"), torch.amp.GradScaler) for frame in frames)


def scale_of(scaler: torch.amp.GradScaler) -> torch.Tensor | None:
    """Return the scale of a scaler, torch's or ours, on its device; None before a loss was scaled, and if it is off."""
    return getattr(scaler, "_scale", None)


def innermost(optimizer: Any) -> Any:
    """Return the optimizer inside the wrappers of frameworks, which have it as `optimizer` with the same parameters."""
    inner = getattr(optimizer, "optimizer", None)
    while inner is not None and _first_of(inner) is not None and _first_of(inner) is _first_of(optimizer):
        optimizer, inner = inner, getattr(inner, "optimizer", None)
    return optimizer


def _first_of(optimizer: Any) -> Any:
    groups = getattr(optimizer, "param_groups", None)
    return groups[0]["params"][0] if groups and groups[0]["params"] else None


def takes_scale(optimizer: Any) -> bool:
    """Return whether the optimizer's own kernel unscales and skips: then the host does not learn whether it stepped."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def keep_scale_outside(optimizer: Any) -> bool:
    """Let scalers unscale gradients before an optimizer's steps; return whether its own kernel would have."""
    takes = bool(vars(optimizer).get("_step_supports_amp_scaling"))
    if takes:
        optimizer._step_supports_amp_scaling = False
    return takes


def take_scale(optimizer: Any) -> None:
    """Let scalers give an optimizer the scale, as before `keep_scale_outside`."""
    optimizer._step_supports_amp_scaling = True


# -- DTensor -----------------------------------------------------------------------------------------------------------


def dtensor_class() -> type[Any] | None:
    """Return the class of sharded tensors, if it is imported already; nothing has one otherwise."""
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


def local_part(tensor: Any) -> torch.Tensor:
    """Return the part of a DTensor on this rank: written to in place, the DTensor has it."""
    local: torch.Tensor = tensor._local_tensor
    return getattr(local, "elem", local) if type(local).__name__ == "AsyncCollectiveTensor" else local


def with_local_part(tensor: Any, local: torch.Tensor) -> torch.Tensor:
    """Return a DTensor like another one, with this as its part on this rank."""
    made: torch.Tensor = type(tensor).from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
    return made


def offsets_of_part(tensor: Any) -> tuple[int, ...] | None:
    """Return where this rank's part of a DTensor begins, in each dimension; None where it is no block of it.

    Source: `compute_local_shape_and_global_offset` in torch/distributed/tensor/_utils.py.
    """
    sizes, offsets, at = list(tensor.shape), [0] * tensor.dim(), tensor.device_mesh.get_coordinate() or ()
    for along, place in enumerate(tensor.placements):
        if place.is_partial() or type(place).__name__ == "_StridedShard":
            return None
        if place.is_shard():
            size, chunk = sizes[place.dim], -(-sizes[place.dim] // tensor.device_mesh.size(along))
            start = min(size, at[along] * chunk)
            offsets[place.dim] += start
            sizes[place.dim] = min(chunk, size - start)
    return tuple(offsets)


stored_indices: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor._indices
"""The indices that a sparse tensor stores, equal ones too."""
stored_values: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor._values
"""The values that a sparse tensor stores, of equal indices each on its own."""


# -- what a loss was computed in ---------------------------------------------------------------------------------------


def formats_of_graph(tensor: torch.Tensor) -> set[torch.dtype]:
    """Return the dtypes of the results in the graph that a backward from this tensor would walk."""
    results = (node for node in nodes_before(tensor.grad_fn) if not hasattr(node, "variable"))  # a leaf is a weight
    return {meta.dtype for node in results for meta in node._input_metadata}


# -- who clips ---------------------------------------------------------------------------------------------------------

_told: list[Callable[[list[Any]], None]] = []


def _telling(clip: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(clip)
    def notifying(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        limit = args[0] if args else kwargs.get("max_norm", kwargs.get("clip_value"))
        if _told and limit != math.inf and not torch.compiler.is_compiling():  # which asks for the norm alone
            parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            for tell in tuple(_told):
                tell(parameters)
        return clip(parameters, *args, **kwargs)

    return notifying


def tell_of_clips(tell: Callable[[list[Any]], None]) -> None:
    """Call a function, in this process, with parameters whose gradients torch.nn.utils is about to clip."""
    why = "clips of gradients that are still scaled are seen"
    # clip_grad_norm_ calls this one, whatever has imported it before; torch has no such part of clip_grad_value_.
    stay(clip_grad, "_clip_grads_with_norm_", _telling, why)
    stay(clip_grad, "clip_grad_value_", _telling, why)
    stay(torch.nn.utils, "clip_grad_value_", _telling, why)
    if tell not in _told:
        _told.append(tell)
