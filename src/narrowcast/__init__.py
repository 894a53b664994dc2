"""Narrowcast: mixed precision for PyTorch that you can see, steer and trust."""

from __future__ import annotations

import importlib
import traceback
from typing import TYPE_CHECKING

from narrowcast import errors, formats
from narrowcast.decide import Argument, Call, Plan, Region, decide
from narrowcast.formats import Format, is_exact, widest
from narrowcast.ledger import Cast, Ledger, Refusal
from narrowcast.policy import Action, Place, Policy, Rule, installed_torch, lint_policy
from narrowcast.report import Explanation

if TYPE_CHECKING:
    from narrowcast.compiler import compile
    from narrowcast.eager import autocast, cache_info, carry, custom_bwd, custom_fwd, invalidate, pin, unpin
    from narrowcast.eager.record import record
    from narrowcast.explainer import Subject, explain
    from narrowcast.exporter import export
    from narrowcast.numerics import round_to

__version__ = "0.1.0.dev0"

# The torch half is imported when it is first asked for: policies, ledgers and reports need no torch.
_TORCH_HALF = {
    "autocast": "narrowcast.eager",
    "cache_info": "narrowcast.eager",
    "carry": "narrowcast.eager",
    "compile": "narrowcast.compiler",
    "convert": "narrowcast.scripting",
    "custom_bwd": "narrowcast.eager",
    "custom_fwd": "narrowcast.eager",
    "export": "narrowcast.exporter",
    "invalidate": "narrowcast.eager",
    "pin": "narrowcast.eager",
    "record": "narrowcast.eager",
    "Subject": "narrowcast.explainer",
    "explain": "narrowcast.explainer",
    "round_to": "narrowcast.numerics",
    "script": "narrowcast.scripting",
    "target_of": "narrowcast.made_for",
    "trace": "narrowcast.scripting",
    "unpin": "narrowcast.eager",
}

__all__ = [
    "Action",
    "Argument",
    "Call",
    "Cast",
    "Explanation",
    "Format",
    "Ledger",
    "Place",
    "Plan",
    "Policy",
    "Refusal",
    "Region",
    "Rule",
    "Subject",
    "__version__",
    "autocast",
    "cache_info",
    "carry",
    "compile",
    "convert",
    "custom_bwd",
    "custom_fwd",
    "decide",
    "errors",
    "explain",
    "export",
    "formats",
    "invalidate",
    "is_exact",
    "lint_policy",
    "pin",
    "record",
    "round_to",
    "script",
    "target_of",
    "trace",
    "unpin",
    "widest",
]


def __getattr__(name: str) -> object:
    module = _TORCH_HALF.get(name)
    if module is None:
        raise AttributeError(f"module 'narrowcast' has no attribute {name!r}")
    value = _load(module, name)
    globals()[name] = value
    return value


def _load(module: str, name: str) -> object:
    """A name of the torch half; an error that says so, where this torch is not as it is taken to be."""
    try:
        importlib.import_module("narrowcast.torch_surface.probes").check_version()
        return getattr(importlib.import_module(module), name)
    except (AttributeError, ImportError) as error:
        frames = traceback.extract_tb(error.__traceback__)
        if not any("torch_surface" in frame.filename for frame in frames) or getattr(error, "name", "") == "torch":
            raise
        raise errors.SurfaceError(
            asked=f"narrowcast.{name} with torch {installed_torch()}",
            found=f"{error} ({frames[-1].filename}:{frames[-1].lineno})",
            advice="Install a torch from 2.11 to 2.15, or a newer Narrowcast.",
        ) from error


def __dir__() -> list[str]:
    return __all__
