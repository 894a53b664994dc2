"""Looks at models whose wrapper casts, too: FSDP2's MixedPrecisionPolicy, and who adds gradients up over processes."""

from __future__ import annotations

from typing import Any

import torch

from narrowcast.core.policy import Site
from narrowcast.runtime.torch_bridge import FORMATS, LOW, OpFacts, tensors_in
from narrowcast.runtime.torch_surface.autograd import current_autograd_node, gives_gradients
from narrowcast.runtime.torch_surface.modules import formats_of_wrapper, hooks_of_wrapper, reduces_gradients
from narrowcast.training.check.gradients import Found

_DOES = {
    "param_dtype": "weights reach every call in it",
    "output_dtype": "what a module returns is cast to it",
    "reduce_dtype": "gradients are added up over processes in it",
}


def casts_beside(model: torch.nn.Module, site: Site) -> Found | None:
    """What a model's wrappers cast besides the region that it is called in."""
    formats = {name: d for module in model.modules() for name, d in formats_of_wrapper(module).items() if d in LOW}
    if not formats:
        return None
    what = ", ".join(f"{name}={FORMATS[dtype]} ({_DOES[name]})" for name, dtype in formats.items())
    is_reduced = "reduce_dtype" in formats
    without = "fully_shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))"
    return (
        "FSDP2 casts beside the region", f"the MixedPrecisionPolicy of fully_shard has {what}",
        f"Let one of both cast: {without if is_reduced else 'fully_shard(model)'} in the region, or no region.", site,
    )  # fmt: skip


class Reduced:
    """What DistributedDataParallel and FSDP2 send, by the hooks that are registered with them, whatever these are."""

    def __init__(self) -> None:
        self._hooks: dict[str, None] = {}
        self._site: Site | None = None

    def met(self, model: torch.nn.Module, site: Site) -> None:
        """A model is called that is perhaps wrapped."""
        reducing = [module for module in model.modules() if reduces_gradients(module)]
        trained = [parameter for module in reducing for parameter in module.parameters() if parameter.requires_grad]
        if trained and not any(parameter.dtype in LOW for parameter in trained):
            self._site = site
            self._hooks |= {name: None for module in reducing for name in hooks_of_wrapper(module)}

    def sends(self, facts: OpFacts, args: tuple[Any, ...]) -> Found | None:
        """An op of a backward is about to run: whether it adds gradients in fp32 up over processes in a low format."""
        if self._site is None or facts.op.namespace != "c10d" or not gives_gradients(current_autograd_node()):
            return None
        low = next((t for t in tensors_in(args) if t.dtype in LOW or (self._hooks and t.itemsize == 1)), None)
        if low is None:
            return None
        who = ", ".join(self._hooks) or "a hook of the reducer's own"
        return (
            "gradients reduced in a low format",
            f"{who} adds gradients in fp32 up over processes in {str(low.dtype).removeprefix('torch.')}",
            "Register no such hook: without one gradients are added up in their own format.", self._site,
        )  # fmt: skip
