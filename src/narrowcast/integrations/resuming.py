"""What a checkpoint says of precision, and what is said where a run goes on under another one."""

from __future__ import annotations

import warnings
from typing import Any

from narrowcast.eager.region import autocast
from narrowcast.errors import TrainingError, TrainingWarning
from narrowcast.policy import Policy
from narrowcast.torch_bridge import FORMATS

SCHEMA = "narrowcast.training/1"
BARE_SCALER = {"scale", "growth_factor", "backoff_factor"}
"""What the state of torch's GradScaler has: frameworks save it alone."""
SHOWN = 3
"""How many rules that differ are named; and of digests, so many characters:"""
DIGITS = 12


def precision_state(policy: Policy, region: autocast, steps: int, scaler: dict[str, Any] | None) -> dict[str, Any]:
    """What goes into a checkpoint."""
    return {
        "schema": SCHEMA, "policy": policy.name, "digest": policy.digest, "rules": policy.to_toml(),
        "dtype": str(FORMATS[region.fast_dtype]), "steps": steps, "has_scaler": scaler is not None,
        "scaler": scaler,
    }  # fmt: skip


def take_up(
    state: dict[str, Any], policy: Policy, region: autocast, has_scaler: bool
) -> tuple[int | None, dict[str, Any] | None]:
    """Steps and the scaler's state of what was saved, after saying what is not as it was."""
    if not state:
        say(f"the checkpoint says nothing of precision; this run trains under {_words(policy, region)}")
        return None, None
    if state.keys() >= BARE_SCALER:
        say(f"the checkpoint has a scaler's state and no policy; this run trains under {_words(policy, region)}")
        say(_of_scaler(True, has_scaler))
        return None, state
    if state.get("schema") != SCHEMA:
        raise TrainingError(
            "resuming the precision of a training run", f"schema {state.get('schema')!r} where {SCHEMA!r} is known",
            advice="Give what state_dict() of a plugin gave, or resume without it.",
        )  # fmt: skip
    low = str(FORMATS[region.fast_dtype])
    if state["digest"] != policy.digest or state["dtype"] != low:
        saved = f"{state['policy']} ({state['digest'][:DIGITS]}), {state['dtype']}"
        what = "policy" if state["digest"] != policy.digest else "low format"
        lines = [f"resumed under another {what}: saved under {saved}; now {_words(policy, region)}"]
        say("\n".join([*lines, *_changes(state["rules"], policy)]))
    say(_of_scaler(state["has_scaler"], has_scaler))
    return state["steps"], state["scaler"]


def say(text: str) -> None:
    """TrainingWarning at the line of the framework or of the user that resumes, if there is something to say."""
    if text:
        warnings.warn(f"narrowcast: {text}", TrainingWarning, stacklevel=4)


def _words(policy: Policy, region: autocast) -> str:
    return f"{policy.name} ({policy.digest[:DIGITS]}), {FORMATS[region.fast_dtype]}"


def _changes(rules: str, policy: Policy) -> list[str]:
    """The first rules that differ; a policy that stands on files which are gone is told by its digest alone."""
    try:
        found = [str(change) for change in Policy.parse(rules, "<checkpoint>").diff(policy)]
    except (OSError, ValueError):
        return []
    more = [f"  ... {len(found) - SHOWN} more"] if len(found) > SHOWN else []
    return [f"  {line}" for line in found[:SHOWN]] + more


def _of_scaler(was_there: bool, is_there: bool) -> str:
    if was_there and not is_there:
        return "the checkpoint has a scaler's state, which this run, without a scaler, does not use"
    return "the checkpoint has no scaler's state: the scale starts anew" if is_there and not was_there else ""
