"""A profile: what was measured on one device with one torch, and the file that it lives in.

Files are JSON, replaced at once, under a lock: two processes that write at the same time both keep what they measured.
A file that cannot be read is set aside under another name, never overwritten.
"""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from narrowcast.core.ops import CONV, GEMM
from narrowcast.core.policy.capabilities import EMULATED_RATIO, Ability
from narrowcast.errors import Origin, ProfileError, reason_of
from narrowcast.formats import Format, bf16, fp16, fp32
from narrowcast.output.files import cache_folder, is_there, replace_text, set_aside
from narrowcast.output.words import counted
from narrowcast.reports.results.result import Result
from narrowcast.reports.results.verdicts import MEASURED


@dataclass(frozen=True, slots=True)
class Device:
    """What a measured time holds for: device type, name, units that it has, threads, and torch's version."""

    type: str
    name: str
    units: tuple[str, ...]
    threads: int
    torch: str

    @property
    def fingerprint(self) -> str:
        """`cpu-2t-amd-epyc-1a2b3c4d-torch-2.13.0`: the name of the profile's file."""
        digest = hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:8]
        words = "".join(c if c.isalnum() else "-" for c in self.name.lower())
        short = "-".join(w for w in words.split("-") if w)[:32].strip("-")
        return f"{self.type}-{self.threads}t-{short}-{digest}-torch-{self.torch.partition('+')[0]}"

    def __str__(self) -> str:
        return f"{self.name} ({self.type}, {counted(self.threads, 'thread')}), torch {self.torch}"


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured call: median nanoseconds with quartiles over this many rounds, and the work that it does."""

    family: str
    format: str
    backward: bool
    flops: float
    moved_bytes: float
    elements: int
    ns: float
    lower_ns: float
    upper_ns: float
    rounds: int

    @property
    def spread(self) -> float:
        """Half of the quartiles' distance over the median."""
        return (self.upper_ns - self.lower_ns) / 2 / self.ns if self.ns else 0.0


@dataclass(frozen=True, slots=True)
class Emulated:
    """A family of ops that a device has no units for in a low format. ratio: its time over fp32's."""

    family: str
    format: str
    ratio: float


@dataclass(slots=True, repr=False)
class Profile(Result):
    """The samples of one device by signature text, and what it can do by op, format and direction.

    path: where it was read from or will be written; None in memory. load: how many processes were running or waiting
    when it was measured last.
    """

    WHAT: ClassVar[str] = "a profile"
    SCHEMA: ClassVar[str] = "narrowcast.profile/1"

    device: Device
    samples: dict[str, Sample] = field(default_factory=dict)
    path: Path | None = field(default=None, compare=False)
    abilities: dict[str, Ability] = field(default_factory=dict)
    load: float = 0.0

    @property
    def is_busy(self) -> bool:
        """Whether more was running than the device has threads for: times are too long then, and spread."""
        return self.load > self.device.threads

    @property
    def verdict(self) -> str:
        """`measured`."""
        return MEASURED

    def data(self) -> dict[str, Any]:
        """Return what is written as JSON."""
        return {
            "schema": self.SCHEMA,
            "device": asdict(self.device),
            "load": self.load,
            "abilities": [asdict(self.abilities[key]) for key in sorted(self.abilities)],
            "samples": {key: asdict(sample) for key, sample in sorted(self.samples.items())},
            "emulated": [asdict(row) for row in self.emulated()],  # for readers of the file
        }

    def low_over_high(self, format: Format) -> dict[str, float]:
        """Return a low format's time over fp32's, by family: the median over matrix multiplications and convolutions
        that were measured in both and take fp32 a millisecond or more.
        """
        ratios: dict[str, list[float]] = {}
        for text, sample in self.samples.items():
            if sample.format == fp32.name and sample.ns >= 1e6 and sample.family in (GEMM, CONV):
                low = self.samples.get(text.replace(f"{fp32.name}[", f"{format.name}["))
                if low is not None:
                    ratios.setdefault(sample.family, []).append(low.ns / sample.ns)
        return {family: sorted(of_family)[len(of_family) // 2] for family, of_family in ratios.items()}

    def emulated(self) -> list[Emulated]:
        """Return what the device only emulates."""
        ratios = [(low.name, *row) for low in (bf16, fp16) for row in self.low_over_high(low).items()]
        return [Emulated(family, low, ratio) for low, family, ratio in ratios if ratio > EMULATED_RATIO]

    @classmethod
    def of_data(cls, data: Mapping[str, Any]) -> Profile:
        """Return the profile of such data. KeyError, TypeError, ValueError or AttributeError for others."""
        device = dict(data["device"])
        device["units"] = tuple(device["units"])
        samples = {str(key): _sample(value) for key, value in data["samples"].items()}
        abilities = [Ability(**row) for row in data.get("abilities", ())]
        return Profile(Device(**device), samples, None, {a.key: a for a in abilities}, float(data.get("load", 0.0)))

    @staticmethod
    def from_json(text: str, file: str = "<string>") -> Profile:
        """Return the profile in a text. Raise ProfileError if it is none."""
        try:
            data = json.loads(text)
            if not isinstance(data, dict):
                raise _unreadable(file, f"it holds a {type(data).__name__}")
            if data.get("schema") != Profile.SCHEMA:
                raise _unreadable(file, f"its schema is {data.get('schema')!r}, not {Profile.SCHEMA!r}")
            return Profile.of_data(data)
        except ProfileError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise _unreadable(file, reason_of(error)) from error

    @staticmethod
    def read(path: Path) -> Profile:
        """Return the profile in a file. Raise ProfileError if there is none, or if it cannot be read."""
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise _unreadable(str(path), reason_of(error)) from error
        profile = Profile.from_json(text, str(path))
        profile.path = path
        return profile

    def write(self, path: Path | None = None, patience_s: float = 20.0) -> Path:
        """Save it, together with what another process saved there meanwhile. ProfileError if that is not possible.

        patience_s: how long to wait for a process that is saving, too.
        """
        from filelock import FileLock, Timeout  # regions that read no profile do not import it

        path = path or self.path or profile_path(self.device)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(str(path) + ".lock", timeout=patience_s):
                if path.exists():
                    self._take_over(path)
                replace_text(path, self.to_json(indent=1) + "\n")
        except (OSError, Timeout) as error:
            folder = "Set NARROWCAST_CACHE_DIR to a folder that can be written to."
            advice = f"What was measured holds for this process. {folder}"
            raise self._unsaved(reason_of(error), path, advice) from error
        self.path = path
        return path

    def _take_over(self, path: Path) -> None:
        try:
            there = Profile.read(path)
        except ProfileError as error:
            warnings.warn(f"narrowcast: {error.found}; {path} {set_aside(path)}, and is written again", stacklevel=4)
            return
        if there.device != self.device:
            raise self._unsaved(f"the file holds that of {there.device}", path, "Save it under another name.")
        self.samples = {**there.samples, **self.samples}
        self.abilities = {**there.abilities, **self.abilities}

    def _unsaved(self, found: str, path: Path, advice: str) -> ProfileError:
        return ProfileError(f"saving the profile of {self.device}", found, (Origin(str(path)),), advice)


def load_profile(device: Device) -> Profile:
    """Return the saved profile of a device; an empty one if there is none. A file that cannot be read is set aside."""
    path = profile_path(device)
    if not is_there(path):
        return Profile(device, path=path)
    try:
        profile = Profile.read(path)
    except ProfileError as error:
        warnings.warn(f"narrowcast: {error.found}; {path} {set_aside(path)}, and measuring starts again", stacklevel=3)
        return Profile(device, path=path)
    return profile if profile.device == device else Profile(device, path=path)


def profile_path(device: Device) -> Path:
    """Return the file of a device's profile."""
    return cache_folder() / "profiles" / f"{device.fingerprint}.json"


def _sample(data: dict[str, Any]) -> Sample:
    sample = Sample(**data)
    numbers = (sample.flops, sample.moved_bytes, sample.elements, sample.ns, sample.lower_ns, sample.upper_ns)
    is_right = all(isinstance(n, (int, float)) and math.isfinite(n) and n >= 0 for n in (*numbers, sample.rounds))
    if not is_right or sample.ns <= 0:
        raise ValueError(f"a sample with the numbers {numbers}, {sample.rounds}")
    return sample


def _unreadable(file: str, found: str) -> ProfileError:
    advice = "Give a file that `narrowcast profile` wrote, or measure again."
    return ProfileError("reading a profile", found, (Origin(file),), advice)
