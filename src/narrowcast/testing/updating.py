"""Whether snapshots are to be written again: decided once for a whole run, in the environment."""

from __future__ import annotations

import os

VARIABLE = "NARROWCAST_UPDATE"
"""`1` where pytest was given --narrowcast-update; other test runners set it themselves."""


def is_updating() -> bool:
    """Return whether snapshots are to be written again."""
    return os.environ.get(VARIABLE, "") not in ("", "0")
