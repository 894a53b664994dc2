"""What rules cost in time, by the profile of the device; nothing is measured for it."""

from __future__ import annotations

import math
from collections.abc import Iterable

from narrowcast.analysis.repair.looking import ForwardCall
from narrowcast.core.ledger.identity import CallId
from narrowcast.core.policy import Rule
from narrowcast.formats import Format, fp32
from narrowcast.reports.results.profile import Profile, load_profile
from narrowcast.runtime.devices.device import device_now
from narrowcast.runtime.devices.prices import CostModel
from narrowcast.runtime.devices.signature import Signature

UNPRICED = "No profile of this device prices the rules; `narrowcast profile` makes one."


def saved_profile(device_type: str) -> Profile | None:
    """This device's own, as far as it was measured; None if nothing was."""
    profile = load_profile(device_now(device_type))
    return profile if profile.samples else None


def cost_of(calls: Iterable[tuple[CallId, ForwardCall]], low: Format, profile: Profile | None) -> float:
    """Nanoseconds more in fp32 than in the low format, without casts; NaN where the profile does not say."""
    if profile is None:
        return math.nan
    model, total = CostModel(profile), 0.0
    for identity, call in calls:
        found = [model.estimate(_signature(identity, call, format)) for format in (fp32, low)]
        if any(estimate.source == "assumed" for estimate in found):
            return math.nan
        total += found[0].ns - found[1].ns
    return total


def by_rule(calls: Iterable[tuple[CallId, ForwardCall]]) -> dict[Rule, list[tuple[CallId, ForwardCall]]]:
    """The calls that each rule decided."""
    found: dict[Rule, list[tuple[CallId, ForwardCall]]] = {}
    for identity, call in calls:
        if call.rule is not None:
            found.setdefault(call.rule, []).append((identity, call))
    return found


def _signature(identity: CallId, call: ForwardCall, format: Format) -> Signature:
    return Signature(identity.op, (format.name,) * len(call.shapes), call.shapes, call.result, format)
