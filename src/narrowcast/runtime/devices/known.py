"""The profiles that this process uses: one per device, loaded when first asked for, saved when something was added."""

from __future__ import annotations

import threading
import warnings
from pathlib import Path

from narrowcast.errors import Origin, ProfileError
from narrowcast.output.progress import long_work
from narrowcast.reports.results.profile import Device, Profile, load_profile
from narrowcast.runtime.devices.device import device_now
from narrowcast.runtime.devices.measure import measure
from narrowcast.runtime.devices.sweep import basics

_profiles: dict[Device, Profile] = {}
_lock = threading.Lock()
_warned: set[Path] = set()


def known_profile(device_type: str) -> Profile:
    """The profile of this machine's device, with what a cost model needs at least; measured if it is not there."""
    device = device_now(device_type)
    with _lock:
        if device not in _profiles:
            _profiles[device] = load_profile(device)
        profile = _profiles[device]
        calls = list(basics(device_type))
        with long_work("measuring this device", len(calls)) as step:
            if measure(profile, calls, seconds=10, progress=step):
                keep(profile)
    return profile


def foreign_profile(path: str, device_type: str, verify: bool) -> Profile:
    """A profile to plan with. ProfileError if another device's is to be verified here."""
    profile = Profile.read(Path(path))
    here = device_now(device_type)
    if profile.device != here and verify:
        raise ProfileError(
            asked=f"formats planned for {profile.device}, and verified",
            found=f"this is {here}: times that are measured here say nothing of that device",
            where=(Origin(path),),
            advice="Give verify=False to plan, and verify on that device; or omit the profile.",
        )
    return profile


def keep(profile: Profile) -> None:
    """Save what was measured; a warning, once, where that is not possible."""
    try:
        profile.write()
    except ProfileError as error:
        path = profile.path or Path()
        if path not in _warned:
            _warned.add(path)
            warnings.warn(f"narrowcast: {error}", stacklevel=3)
