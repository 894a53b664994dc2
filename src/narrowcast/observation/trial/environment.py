"""In which environment a run is made: what two runs that differ are asked about first."""

from __future__ import annotations

import platform
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from operator import attrgetter
from typing import Any

import torch

from narrowcast.core.policy import Policy
from narrowcast.runtime.devices.device import device_now

_PACKAGES = ("torch", "narrowcast", "numpy", "transformers", "triton")


def environment(device_type: str, policy: Policy | None = None, low: str = "") -> dict[str, Any]:
    """Return versions, device, flags of precision and determinism, seed, policy; values that JSON has."""
    device = device_now(device_type)
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": str(device),
        "device_type": device_type,
        "threads": torch.get_num_threads(),
        "seed": torch.initial_seed(),
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "packages": {name: text for name in _PACKAGES if (text := _version(name))},
        "flags": {name: _flag(name) for name in _FLAGS},
        "command": " ".join(sys.argv[:1]),
    }
    if policy is not None:
        facts["policy"] = {"name": policy.name, "digest": policy.resolve(device_type).digest, "low": low}
    return facts


@cache
def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return str(getattr(sys.modules.get(name), "__version__", ""))


_FLAGS = (
    "get_float32_matmul_precision", "are_deterministic_algorithms_enabled", "backends.mkldnn.enabled",
    "backends.cudnn.deterministic", "backends.cudnn.benchmark", "backends.cudnn.allow_tf32",
    "backends.cuda.matmul.allow_tf32", "backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
    "backends.cuda.matmul.allow_bf16_reduced_precision_reduction", "backends.mha.get_fastpath_enabled",
)  # fmt: skip
"""What decides in torch how precisely, and how repeatably, ops compute."""


def _flag(path: str) -> Any:
    try:
        value: Any = attrgetter(path)(torch)
        value = value() if callable(value) else value
    except (AttributeError, RuntimeError) as error:
        return f"not to be read: {type(error).__name__}"
    return value if isinstance(value, bool | int | float | str) else str(value)
