"""Narrowcast: mixed precision for PyTorch that you can see, steer and trust."""

from __future__ import annotations

import importlib
import random
import traceback
from typing import TYPE_CHECKING

from narrowcast import errors, formats
from narrowcast.core.decide import Argument, Call, Plan, Region, decide
from narrowcast.core.goals import Goal, fast, memory
from narrowcast.core.ledger import Cast, Refusal
from narrowcast.core.policy import Action, Policy, Rule, Site, installed_torch, lint_policy
from narrowcast.formats import Format, is_exact, widest

if TYPE_CHECKING:
    from narrowcast.analysis.capture.capture import capture
    from narrowcast.analysis.compare.compare import compare
    from narrowcast.analysis.compare_runs.compare_runs import compare_runs
    from narrowcast.analysis.explain.explain import explain
    from narrowcast.analysis.record.record import record
    from narrowcast.analysis.repair.repair import repair
    from narrowcast.analysis.watch.watch import watch
    from narrowcast.frontends.compiled.compile import compile
    from narrowcast.frontends.eager import autocast, cache_info, carry, custom_bwd, custom_fwd, invalidate, pin, unpin
    from narrowcast.frontends.exported.export import export
    from narrowcast.frontends.scripts.script import convert, script, trace
    from narrowcast.frontends.target import target_of
    from narrowcast.observation.statistics.rounding import round_to
    from narrowcast.observation.trial.case import Case
    from narrowcast.reports.results.explanation import Explanation
    from narrowcast.reports.results.fit import fit
    from narrowcast.reports.results.ledger import Ledger
    from narrowcast.reports.results.mapping import RunMapping
    from narrowcast.reports.results.run import Run
    from narrowcast.reports.results.saved import load
    from narrowcast.training.check.check_training import check_training
    from narrowcast.training.scaler.scaler import Scaler

__version__ = "0.1.0.dev0"

# Imported when they are first asked for: the reports, which take a while, and the torch half, since policies and
# ledgers need no torch.
_PURE_HALF = {
    "reports.results.explanation": ("Explanation",),
    "reports.results.fit": ("fit",),
    "reports.results.ledger": ("Ledger",),
    "reports.results.mapping": ("RunMapping",),
    "reports.results.run": ("Run",),
    "reports.results.saved": ("load",),
    "analysis.compare_runs.compare_runs": ("compare_runs",),
}
_TORCH_HALF = {
    "frontends.compiled.compile": ("compile",),
    "frontends.exported.export": ("export",),
    "frontends.scripts.script": ("convert", "script", "trace"),
    "frontends.target": ("target_of",),
    "frontends.eager": ("autocast", "cache_info", "carry", "custom_bwd", "custom_fwd", "invalidate", "pin", "unpin"),
    "analysis.record.record": ("record",),
    "analysis.explain.explain": ("explain",),
    "observation.statistics.rounding": ("round_to",),
    "analysis.capture.capture": ("capture",),
    "analysis.compare.compare": ("compare",),
    "training.check.check_training": ("check_training",),
    "analysis.repair.repair": ("repair",),
    "observation.trial.case": ("Case",),
    "training.scaler.scaler": ("Scaler",),
    "analysis.watch.watch": ("watch",),
}

__all__ = [
    "Action",
    "Argument",
    "Call",
    "Case",
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
    "load",
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
        importlib.import_module("narrowcast.runtime.torch_surface.probes").check_version()
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
