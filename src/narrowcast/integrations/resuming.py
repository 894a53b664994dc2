"""What a checkpoint has about precision, and the warnings where a run goes on under another one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from narrowcast.core.policy import Policy
from narrowcast.errors import Origin, TrainingError, TrainingWarning, reason_of
from narrowcast.frontends.eager.region import autocast
from narrowcast.runtime.sites.python_stack import loop_line, warn_at
from narrowcast.runtime.torch_bridge import FORMATS

SCHEMA = "narrowcast.training/1"
RESUMING = "resuming the precision of a training run"
BARE_SCALER = {"scale", "growth_factor", "backoff_factor"}
"""What the state of torch's GradScaler has: frameworks save it alone."""
STATE_FILE = "narrowcast.pt"
"""In the folder of a checkpoint, where the framework writes the scaler's state into a file of its own: the rest."""
SHOWN = 3
"""How many rules that differ are named; and of digests, this many characters:"""
DIGITS = 12


def precision_state(policy: Policy, region: autocast, steps: int, scaler: dict[str, Any] | None) -> dict[str, Any]:
    """Return what goes into a checkpoint."""
    return {
        "schema": SCHEMA, "policy": policy.name, "digest": policy.digest, "rules": policy.to_toml(),
        "dtype": str(FORMATS[region.fast_dtype]), "steps": steps, "has_scaler": scaler is not None,
        "scaler": scaler,
    }  # fmt: skip


def take_up(
    state: dict[str, Any], policy: Policy, region: autocast, has_scaler: bool
) -> tuple[int | None, dict[str, Any] | None]:
    """Return steps and the scaler's state of a checkpoint, after a warning of what differs from it."""
    if not state:
        say(f"the checkpoint says nothing of precision; this run trains under {_words(policy, region)}")
        return None, None
    if state.keys() >= BARE_SCALER:
        say(f"the checkpoint has a scaler's state and no policy; this run trains under {_words(policy, region)}")
        say(_of_scaler(True, has_scaler))
        return None, state
    if state.get("schema") != SCHEMA:
        found = f"schema {state.get('schema')!r} where {SCHEMA!r} is known"
        raise TrainingError(RESUMING, found, advice="Give the state_dict() of a plugin, or resume without it.")
    low = str(FORMATS[region.fast_dtype])
    if state["digest"] != policy.digest or state["dtype"] != low:
        saved = f"{state['policy']} ({state['digest'][:DIGITS]}), {state['dtype']}"
        what = "policy" if state["digest"] != policy.digest else "low format"
        lines = [f"resumed under another {what}: saved under {saved}; now {_words(policy, region)}"]
        say("\n".join([*lines, *_changes(state["rules"], policy)]))
    say(_of_scaler(state["has_scaler"], has_scaler))
    return state["steps"], state["scaler"]


def save_precision(precision: Any, folder: str | Path) -> None:
    """Write the state into the checkpoint's folder, without the scaler's, which the framework writes."""
    torch.save({**precision.state_dict(), "scaler": None}, Path(folder) / STATE_FILE)


def load_precision(precision: Any, folder: str | Path) -> None:
    """Go on from a checkpoint's folder; one that a framework saved by itself has nothing about precision, and that is
    reported. TrainingError if the file cannot be read.
    """
    file = Path(folder) / STATE_FILE
    try:
        saved: dict[str, Any] = torch.load(file, weights_only=True) if file.exists() else {}
    except Exception as error:
        advice = "Resume from another checkpoint, or delete this file to go on without what it says."
        raise TrainingError(RESUMING, reason_of(error), (Origin(str(file)),), advice) from error
    precision.load_state_dict(saved)


def say(text: str) -> None:
    """Warn at the user's line that resumes, if there is a text."""
    if text:
        warn_at(f"narrowcast: {text}", loop_line(), TrainingWarning)


def _words(policy: Policy, region: autocast) -> str:
    return f"{policy.name} ({policy.digest[:DIGITS]}), {FORMATS[region.fast_dtype]}"


def _changes(rules: str, policy: Policy) -> list[str]:
    """Return the first rules that differ; a policy whose files are missing is compared by its digest alone."""
    try:
        changes = [str(change) for change in Policy.parse(rules, "<checkpoint>").diff(policy)]
    except (OSError, ValueError):
        return []
    more = [f"  ... {len(changes) - SHOWN} more"] if len(changes) > SHOWN else []
    return [f"  {line}" for line in changes[:SHOWN]] + more


def _of_scaler(was_there: bool, is_there: bool) -> str:
    if was_there and not is_there:
        return "the checkpoint has a scaler's state, which this run, without a scaler, does not use"
    return "the checkpoint has no scaler's state: the scale starts again" if is_there and not was_there else ""
