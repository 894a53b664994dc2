"""Narrowcast: mixed precision for PyTorch that you can see, steer and trust."""

from __future__ import annotations

import importlib
import random
import traceback
from typing import TYPE_CHECKING

from narrowcast import errors, formats
from narrowcast.decide import Argument, Call, Plan, Region, decide
from narrowcast.formats import Format, is_exact, widest
from narrowcast.goals import Goal, fast, memory
from narrowcast.ledger import Cast, Ledger, Refusal
from narrowcast.policy import Action, Policy, Rule, Site, installed_torch, lint_policy

if TYPE_CHECKING:
    from narrowcast.api.compile import compile
    from narrowcast.api.export import export
    from narrowcast.api.script import convert, script, trace
    from narrowcast.api.target import target_of
    from narrowcast.eager import autocast, cache_info, carry, custom_bwd, custom_fwd, invalidate, pin, unpin
    from narrowcast.eager.record import record
    from narrowcast.explaining.explain import explain
    from narrowcast.loops.check_training import check_training
    from narrowcast.mending.repair import repair
    from narrowcast.report import Explanation
    from narrowcast.report.fit import fit
    from narrowcast.report.mapping import RunMapping
    from narrowcast.report.run import Run
    from narrowcast.runs.capture import capture
    from narrowcast.runs.compare import compare
    from narrowcast.runs.rounding import round_to
    from narrowcast.runs.subject import Subject
    from narrowcast.runs.watch import watch
    from narrowcast.scaling.scaler import Scaler
    from narrowcast.two_runs.compare import compare_runs

__version__ = "0.1.0.dev0"

# Imported when they are first asked for: the reports, which take a while, and the torch half, since policies and
# ledgers need no torch.
_PURE_HALF = {
    "report": ("Explanation",),
    "report.fit": ("fit",),
    "report.mapping": ("RunMapping",),
    "report.run": ("Run",),
    "two_runs.compare": ("compare_runs",),
}
_TORCH_HALF = {
    "api.compile": ("compile",),
    "api.export": ("export",),
    "api.script": ("convert", "script", "trace"),
    "api.target": ("target_of",),
    "eager": ("autocast", "cache_info", "carry", "custom_bwd", "custom_fwd", "invalidate", "pin", "record", "unpin"),
    "explaining.explain": ("explain",),
    "runs.rounding": ("round_to",),
    "runs.capture": ("capture",),
    "runs.compare": ("compare",),
    "loops.check_training": ("check_training",),
    "mending.repair": ("repair",),
    "runs.subject": ("Subject",),
    "scaling.scaler": ("Scaler",),
    "runs.watch": ("watch",),
}

__all__ = [
    "Action",
    "Argument",
    "Call",
    "Cast",
    "Explanation",
    "Format",
    "Goal",
    "Ledger",
    "Plan",
    "Policy",
    "Refusal",
    "Region",
    "Rule",
    "Run",
    "RunMapping",
    "Scaler",
    "Site",
    "Subject",
    "__version__",
    "autocast",
    "cache_info",
    "capture",
    "carry",
    "check_training",
    "compare",
    "compare_runs",
    "compile",
    "convert",
    "custom_bwd",
    "custom_fwd",
    "decide",
    "errors",
    "explain",
    "export",
    "fast",
    "fit",
    "formats",
    "invalidate",
    "is_exact",
    "lint_policy",
    "memory",
    "pin",
    "record",
    "repair",
    "round_to",
    "script",
    "target_of",
    "trace",
    "unpin",
    "watch",
    "widest",
]


def __getattr__(name: str) -> object:
    room = next((room for room, names in (_PURE_HALF | _TORCH_HALF).items() if name in names), None)
    if room is None:
        raise AttributeError(f"module 'narrowcast' has no attribute {name!r}")
    module, drawn = f"narrowcast.{room}", random.getstate()
    value: object = _load(module, name) if room in _TORCH_HALF else getattr(importlib.import_module(module), name)
    random.setstate(drawn)  # rich draws numbers where it is imported
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
