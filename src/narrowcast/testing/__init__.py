"""Formats and numbers held in users' own tests: `from narrowcast.testing import assert_formats`.

`import narrowcast` does not import it, and what a name needs is imported when it is first asked for: the pytest plugin
lives here, which every run of pytest loads.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from narrowcast.testing.agreement import Agreement
    from narrowcast.testing.formats import assert_formats, assert_no_new_casts, check_formats, take_snapshot
    from narrowcast.testing.front_ends import assert_front_ends_agree
    from narrowcast.testing.numbers import assert_close_to, assert_finite
    from narrowcast.testing.parity import assert_invariant, assert_parity
    from narrowcast.testing.snapshot import CallFormats, Snapshot
    from narrowcast.testing.snapshot_changes import SnapshotCheck

_ROOMS = {
    "testing.agreement": ("Agreement",),
    "testing.snapshot": ("CallFormats", "Snapshot"),
    "testing.snapshot_changes": ("SnapshotCheck",),
    "testing.formats": ("assert_formats", "assert_no_new_casts", "check_formats", "take_snapshot"),
    "testing.front_ends": ("assert_front_ends_agree",),
    "testing.numbers": ("assert_close_to", "assert_finite"),
    "testing.parity": ("assert_invariant", "assert_parity"),
}

__all__ = [
    "Agreement",
    "CallFormats",
    "Snapshot",
    "SnapshotCheck",
    "assert_close_to",
    "assert_finite",
    "assert_formats",
    "assert_front_ends_agree",
    "assert_invariant",
    "assert_no_new_casts",
    "assert_parity",
    "check_formats",
    "take_snapshot",
]


def __getattr__(name: str) -> object:
    room = next((room for room, names in _ROOMS.items() if name in names), None)
    if room is None:
        raise AttributeError(f"module 'narrowcast.testing' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f"narrowcast.{room}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
