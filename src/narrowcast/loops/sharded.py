"""Looks at models whose wrapper casts, too: FSDP2's MixedPrecisionPolicy, and hooks that reduce gradients."""

from __future__ import annotations

import torch

from narrowcast.torch_bridge import FORMATS
from narrowcast.torch_surface.modules import formats_of_wrapper

_LOW = (torch.float16, torch.bfloat16)
BESIDE = "FSDP2 casts beside the region"
REDUCED = "gradients reduced in a low format"
_DOES = {
    "param_dtype": "weights reach every call in it",
    "output_dtype": "what a module returns is cast to it",
    "reduce_dtype": "gradients are added up over processes in it",
}


def casts_beside(model: torch.nn.Module) -> list[tuple[str, str, str]]:
    """What a model's wrappers cast besides the region that it is called in: kind, what, and what to write instead."""
    formats: dict[str, torch.dtype] = {}
    hooks: dict[str, None] = {}
    for module in model.modules():
        of_module, names = formats_of_wrapper(module)
        formats |= {name: dtype for name, dtype in of_module.items() if dtype in _LOW}
        hooks |= dict.fromkeys(name for name in names if "16" in name)
    found = []
    if formats:
        what = ", ".join(f"{name}={FORMATS[dtype]} ({_DOES[name]})" for name, dtype in formats.items())
        is_reduced = "reduce_dtype" in formats
        without = "fully_shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))"
        found.append((
            BESIDE, f"the MixedPrecisionPolicy of fully_shard has {what}",
            f"Let one of both cast: {without if is_reduced else 'fully_shard(model)'} in the region, or no region.",
        ))  # fmt: skip
    if hooks:
        found.append((
            REDUCED, f"{', '.join(hooks)} adds gradients up over processes in a low format",
            "Register no such hook: without one gradients are added up in their own format.",
        ))  # fmt: skip
    return found
