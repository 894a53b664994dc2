"""Narrowcast: mixed precision for PyTorch that you can see, steer and trust."""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING

from narrowcast import errors, formats
from narrowcast.core.goals import Goal
from narrowcast.core.policy import Policy, Rule, installed_torch
from narrowcast.output.lazy import imported

if TYPE_CHECKING:
    from narrowcast.analysis.capture.capture import capture
    from narrowcast.analysis.compare.compare import compare
    from narrowcast.analysis.diff.diff import diff
    from narrowcast.analysis.explain.explain import explain
    from narrowcast.analysis.parity.invariance import check_invariance
    from narrowcast.analysis.parity.parity import parity
    from narrowcast.analysis.record.record import record
    from narrowcast.analysis.repair.repair import repair
    from narrowcast.analysis.watch.watch import watch
    from narrowcast.frontends.compiled.compile import compile
    from narrowcast.frontends.eager import autocast, carry, custom_bwd, custom_fwd, pin, unpin
    from narrowcast.frontends.exported.export import export
    from narrowcast.frontends.scripts.script import script, trace
    from narrowcast.reports.results.explanation import Explanation
    from narrowcast.reports.results.ledger import Ledger
    from narrowcast.reports.results.result import Result
    from narrowcast.reports.results.run import Run
    from narrowcast.reports.results.saved import load
    from narrowcast.runtime.torch_bridge.case import Case
    from narrowcast.training.check.check_training import check_training
    from narrowcast.training.scaler.scaler import Scaler
    from narrowcast.training.storage.check_storage import check_storage
    from narrowcast.training.storage.store import store

__version__ = "0.1.0"

# Imported when they are first asked for: the reports, which take a while, and the torch half, since policies and
# ledgers need no torch.
_PURE_HALF = {
    "reports.results.explanation": ("Explanation",),
    "reports.results.ledger": ("Ledger",),
    "reports.results.result": ("Result",),
    "reports.results.run": ("Run",),
    "reports.results.saved": ("load",),
    "analysis.diff.diff": ("diff",),
}
_TORCH_HALF = {
    "frontends.compiled.compile": ("compile",),
    "frontends.exported.export": ("export",),
    "frontends.scripts.script": ("script", "trace"),
    "frontends.eager": ("autocast", "carry", "custom_bwd", "custom_fwd", "pin", "unpin"),
    "analysis.record.record": ("record",),
    "analysis.explain.explain": ("explain",),
    "analysis.capture.capture": ("capture",),
    "analysis.compare.compare": ("compare",),
    "analysis.parity.invariance": ("check_invariance",),
    "analysis.parity.parity": ("parity",),
    "training.check.check_training": ("check_training",),
    "training.storage.check_storage": ("check_storage",),
    "training.storage.store": ("store",),
    "analysis.repair.repair": ("repair",),
    "runtime.torch_bridge.case": ("Case",),
    "training.scaler.scaler": ("Scaler",),
    "analysis.watch.watch": ("watch",),
}

__all__ = [
    "Case",
    "Explanation",
    "Goal",
    "Ledger",
    "Policy",
    "Result",
    "Rule",
    "Run",
    "Scaler",
    "__version__",
    "autocast",
    "capture",
    "carry",
    "check_invariance",
    "check_storage",
    "check_training",
    "compare",
    "compile",
    "custom_bwd",
    "custom_fwd",
    "diff",
    "errors",
    "explain",
    "export",
    "formats",
    "load",
    "parity",
    "pin",
    "record",
    "repair",
    "script",
    "store",
    "trace",
    "unpin",
    "watch",
]


if not TYPE_CHECKING:  # so that a misspelt name is an error in an editor

    def __getattr__(name: str) -> object:
        room = next((room for room, names in (_PURE_HALF | _TORCH_HALF).items() if name in names), None)
        if room is None:
            raise AttributeError(f"module 'narrowcast' has no attribute {name!r}")
        module = f"narrowcast.{room}"
        value: object = _load(module, name) if room in _TORCH_HALF else getattr(imported(module), name)
        globals()[name] = value
        return value


def _load(module: str, name: str) -> object:
    """Return a name of the torch half; raise SurfaceError where this torch differs from the supported ones."""
    try:
        imported("narrowcast.runtime.torch_surface.probes").check_version()
        return getattr(imported(module), name)
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
