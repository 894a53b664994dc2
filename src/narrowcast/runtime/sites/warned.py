"""Warnings at the user's line, once for each."""

from __future__ import annotations

import warnings
from typing import Any

from narrowcast.core.policy import Site
from narrowcast.errors import RegionWarning

_said: dict[str, dict[Any, Any]] = {}  # by file: Python's memory of what was shown, which keeps it to once per line


def warn_at(text: str, site: Site, category: type[Warning] = RegionWarning) -> None:
    """A warning at a place, which Python's filters show once there."""
    file = site.file or "<unknown>"
    warnings.warn_explicit(text, category, file, site.line, registry=_said.setdefault(file, {}))
