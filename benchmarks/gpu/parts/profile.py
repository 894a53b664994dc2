"""The device's profile, as `narrowcast profile --device cuda` measures it; kept beside the results, to be shipped."""

from __future__ import annotations

import statistics

from context import Context

from narrowcast.output.files import replace_text
from narrowcast.reports.documents.words import without_format
from narrowcast.reports.results.profile import Profile, Sample
from narrowcast.runtime.devices.device import device_now
from narrowcast.runtime.devices.measure import measure
from narrowcast.runtime.devices.sweep import sweep


def run(context: Context) -> None:
    """Measure as much as there is time for, and say what low formats take beside fp32."""
    seconds = 3.0 if context.small else min(240.0, context.left_s - 30)
    profile = Profile(device_now(context.device))
    groups = sweep(context.device)
    with context.attempt("measured"):
        count = measure(profile, groups, seconds)
        wanted = sum(len(group) for group in groups)
        known = sum(call.signature.text in profile.samples for group in groups for call in group)
        context.data |= {"device": str(profile.device), "measured": count, "wanted": wanted}
        enough = known >= (1 if context.small else 0.9 * wanted)
        context.check("measured", "" if enough else f"{known} of {wanted} calls have a time")
    context.data["low over fp32"] = ratios(profile)
    replace_text(context.folder / "device-profile.json", profile.to_json())


def rows_of(profile: Profile) -> dict[str, list[dict[str, Sample]]]:
    """The samples of each call, by family and format."""
    by_call: dict[tuple[str, str], dict[str, Sample]] = {}
    for text, sample in profile.samples.items():
        by_call.setdefault((sample.family, without_format(text, sample.format)), {})[sample.format] = sample
    rows: dict[str, list[dict[str, Sample]]] = {}
    for (family, _), samples in by_call.items():
        rows.setdefault(family, []).append(samples)
    return rows


def ratios(profile: Profile) -> dict[str, dict[str, float]]:
    """By family: the median over calls of a low format's time over fp32's, without and with the backward."""
    found: dict[str, dict[str, float]] = {}
    for family, calls in rows_of(profile).items():
        for low in ("bf16", "fp16"):
            for backward in (False, True):
                pairs = [
                    s[low].ns / s["fp32"].ns for s in calls if {low, "fp32"} <= set(s) and s[low].backward == backward
                ]
                if pairs:
                    label = f"{low}, with backward" if backward else low
                    found.setdefault(family, {})[label] = round(statistics.median(pairs), 3)
    return found
