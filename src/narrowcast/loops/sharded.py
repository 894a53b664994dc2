"""Looks at models whose wrapper casts, too: FSDP2's MixedPrecisionPolicy, and hooks that reduce gradients."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from narrowcast.torch_bridge import FORMATS
from narrowcast.torch_surface.modules import formats_of_wrapper

_LOW = (torch.float16, torch.bfloat16)
KIND = "FSDP2 casts beside the region"


def casts_beside(model: torch.nn.Module) -> tuple[str, str] | None:
    """What a model's wrappers cast besides the region that it is called in, and what to write instead."""
    found = dict.fromkeys(row for module in model.modules() for row in _of(module))
    if not found:
        return None
    what = ", ".join(f"{name} ({does})" for name, does, _ in found)
    return what, " ".join(dict.fromkeys(todo for _, _, todo in found))


def _of(module: torch.nn.Module) -> Iterator[tuple[str, str, str]]:
    formats, hooks = formats_of_wrapper(module)
    leave = "Leave one of them: fully_shard(model) without mp_policy in a region, which casts what each call reads; or "
    leave += "no region."
    for name, does in (("param_dtype", "weights reach every call in it"), ("output_dtype", "what it returns is cast")):
        dtype = formats.get(name)
        if dtype in _LOW:
            yield f"{name}={FORMATS[dtype]}", does, leave
    reduced = formats.get("reduce_dtype") or formats.get("param_dtype")
    if reduced in _LOW:
        todo = "Gradients are added up in fp32 with MixedPrecisionPolicy(reduce_dtype=torch.float32)."
        yield f"reduce_dtype={FORMATS[reduced]}", "gradients are added up over processes in it", todo
    for hook in hooks:
        if "16" in hook:
            yield hook, "a hook that reduces gradients in a low format", "Register no such hook."
