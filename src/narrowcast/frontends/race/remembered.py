"""Choices: which candidate was fastest, kept on disk per program, inputs and device, as autotuning keeps its own."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from narrowcast.output.files import cache_folder, is_there, replace_text, set_aside
from narrowcast.reports.results.profile import Device

SCHEMA = "narrowcast.choice/1"


@dataclass(frozen=True, slots=True)
class RememberedTimes:
    """What was found when candidates were timed: medians in nanoseconds by name, the spread of each, what it cost.

    seconds: that timing took, compiling the candidates apart. from_disk: it was found earlier. dropped: candidates that
    do not run here, with the first line of what they raise. formats: of the chosen one's choices; they name its
    placement, whatever the profile has learnt since.
    """

    chosen: str
    times_ns: dict[str, float]
    spreads: dict[str, float]
    rounds: int
    seconds: float
    from_disk: bool = False
    dropped: dict[str, str] = field(default_factory=dict)
    formats: tuple[str, ...] = ()


def choice_key(device: Device, *facts: str) -> str:
    """A name for what a choice was made about: the device, and texts that say the rest."""
    text = json.dumps([asdict(device), *facts])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def load_choice(key: str, names: Sequence[str] | None = None) -> RememberedTimes | None:
    """The choice that was made earlier; None if there is none, or none among candidates of these names.

    A file that cannot be read is set aside, with a warning.
    """
    path = _path(key)
    if not is_there(path):
        return None
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data.pop("schema") != SCHEMA:
            raise ValueError("another schema")
        found = RememberedTimes(**{**data, "from_disk": True, "formats": tuple(data.get("formats", ()))})
        return found if names is None or found.chosen in names else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        warnings.warn(f"narrowcast: a kept choice could not be read ({error}); it {set_aside(path)}", stacklevel=2)
        return None


def save_choice(key: str, choice: RememberedTimes) -> bool:
    """Keep a choice; whether that was possible. Nothing depends on it but the next process's time."""
    data = {"schema": SCHEMA, **asdict(choice)}
    del data["from_disk"]
    path = _path(key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps(data, indent=1) + "\n")
    except OSError:
        return False
    return True


def _path(key: str) -> Path:
    return cache_folder() / "choices" / f"{key}.json"
