"""What the head of a policy may say besides its rules: what it extends, and its settings; and what a device cannot run,
as a policy knows it.
"""

from __future__ import annotations

from dataclasses import dataclass

from narrowcast.core.policy.rules import Action, Kind, Rule
from narrowcast.errors import PolicyError
from narrowcast.formats import Format

DEVICE_TYPES = ("cpu", "cuda", "xpu", "mps", "mtia", "maia")
BUILTIN = ("native", "safe", "ipex")
NOTHING = "nothing"
"""What a policy extends that has all its rules itself: ops that it does not name run as their inputs are."""
NO_ACTION = "follow"
"""The action of a rule that only allows what is not finite; nobody asks for it."""
SETTINGS = ("cache", "unsupported", "low", "training", "inner")
RAISE, FULL = "raise", "full"
UNSUPPORTED = (RAISE, FULL)
"""What becomes of a call that cannot run in the formats that come: the error; or fp32 and the promised result where
the device lacks the format, and one format where several come.
"""
ONE_FORMAT = "what torch raises for mixed formats"
"""The source of rules that align, and that no policy wrote."""
CACHES = ("native", "off")
LOW = ("bf16", "fp16")
INNER = ("native", "policy")


def check_settings(
    cache: str | None, unsupported: str | None, inner: str | None, low: str | None, training: tuple[str, ...]
) -> None:
    """Raise PolicyError for a value that a setting cannot have."""
    choices = (("cache", cache, CACHES), ("unsupported", unsupported, UNSUPPORTED), ("inner", inner, INNER))
    formats = (("low", low, LOW), *(("training", format, LOW) for format in training))
    for key, value, known in (*choices, *formats):
        if value is not None and value not in known:
            found = "not a low format of regions" if known is LOW else "not a choice"
            raise PolicyError(f"{key} {value!r}", found, advice=f"Write one of: {', '.join(known)}.")


def check_device_type(device_type: str) -> None:
    """Raise PolicyError unless there are native lists for this device type."""
    if device_type not in DEVICE_TYPES:
        asked, found = f"the native policy of device type {device_type!r}", "no autocast lists are known for it"
        raise PolicyError(asked, found, advice=f"Write one of: {', '.join(DEVICE_TYPES)}.")


def check_is_loaded(name: str, extends: tuple[str, ...], has_rules: bool) -> None:
    """Raise PolicyError for a policy without rules whose name is that of another one: it was to be loaded."""
    if not isinstance(name, str):
        raise PolicyError(f"Policy({name!r})", "its name is no text", advice='Write nc.Policy("mine"), for example.')
    is_file, is_builtin = name.endswith(".toml"), name in BUILTIN and extends != (name,)
    if not has_rules and (is_file or (is_builtin and name != "native")):
        found = "this makes a policy of that name, without rules"
        raise PolicyError(f"Policy({name!r})", found, advice=f"Write Policy.load({name!r}).")


def check_builtin_name(name: str) -> None:
    """Raise PolicyError unless `name` is native, native:DEVICE, safe or ipex."""
    family, colon, device_type = name.partition(":")
    if family == "native" and colon:
        check_device_type(device_type)
    elif name not in BUILTIN:
        advice = "Write native, native:DEVICE, safe, ipex, or the path of a policy file (ending in .toml)."
        advice += ' To extend nothing, write extends = "nothing" and nothing else.' if name == "nothing" else ""
        raise PolicyError(f"policy {name!r}", "no such built-in policy", advice=advice)


@dataclass(frozen=True, slots=True)
class Lack:
    """A device has no kernel for one op in one format; or, where the format is None, in several formats at once.

    reason: for a reader, `cpu (avx2) has no bf16 lstm`. inside: the op that lacks the kernel, where `op` calls it and
    no rule is about `op` itself: then what the policy says of the one inside counts. low_first: several formats run
    where the first tensor alone is low.
    """

    op: str
    format: Format | None
    reason: str
    inside: str = ""
    low_first: bool = False

    @property
    def rule(self) -> Rule:
        """The rule that represents it in plans, ledgers and explanations."""
        if self.format is None:
            return Rule(self.op, Action(Kind.ALIGN), reason=self.reason, source=ONE_FORMAT)
        return Rule(self.op, Action(Kind.FULL), reason=self.reason, source="capabilities of the device")
