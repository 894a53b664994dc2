"""What the head of a policy may say besides its rules: what it extends, and its settings."""

from __future__ import annotations

from narrowcast.core.policy.lacks import UNSUPPORTED
from narrowcast.errors import PolicyError

DEVICE_TYPES = ("cpu", "cuda", "xpu", "mps", "mtia", "maia")
BUILTIN = ("native", "safe", "ipex")
NOTHING = "nothing"
"""What a policy extends that has all its rules itself: ops that it does not name run as their inputs are."""
NO_ACTION = "follow"
"""The action of a rule that only allows what is not finite; nobody asks for it."""
SETTINGS = ("cache", "unsupported", "low", "training", "inner")
CACHES = ("native", "off")
LOW = ("bf16", "fp16")
INNER = ("native", "policy")


def check_settings(
    cache: str | None, unsupported: str | None, inner: str | None, low: str | None, training: tuple[str, ...]
) -> None:
    """PolicyError for a value that a setting cannot have."""
    for key, value, known in (
        ("cache", cache, CACHES),
        ("unsupported", unsupported, UNSUPPORTED),
        ("inner", inner, INNER),
    ):
        if value is not None and value not in known:
            raise PolicyError(f"{key} {value!r}", "no such choice", advice=f"Write one of: {', '.join(known)}.")
    for key, formats in (("low", (low,)), ("training", training)):
        for format in formats:
            if format is not None and format not in LOW:
                raise PolicyError(
                    f"{key} {format!r}", "no low format of regions", advice=f"Write one of: {', '.join(LOW)}."
                )


def check_device_type(device_type: str) -> None:
    """Raise PolicyError unless there are native lists for this device type."""
    if device_type not in DEVICE_TYPES:
        raise PolicyError(
            asked=f"the native policy of device type {device_type!r}",
            found="no autocast lists are known for it",
            advice=f"Write one of: {', '.join(DEVICE_TYPES)}.",
        )


def check_is_loaded(name: str, extends: tuple[str, ...], has_rules: bool) -> None:
    """PolicyError for a policy without rules whose name is that of another one: it was to be loaded."""
    is_file, is_builtin = name.endswith(".toml"), name in BUILTIN and extends != (name,)
    if not has_rules and (is_file or (is_builtin and name != "native")):
        raise PolicyError(
            asked=f"Policy({name!r})", found="this makes a policy of that name, without rules",
            advice=f"Write Policy.load({name!r}).",
        )  # fmt: skip


def check_builtin_name(name: str) -> None:
    """Raise PolicyError unless `name` is native, native:DEVICE, safe or ipex."""
    family, colon, device_type = name.partition(":")
    if family == "native" and colon:
        check_device_type(device_type)
    elif name not in BUILTIN:
        raise PolicyError(
            asked=f"policy {name!r}",
            found="no such built-in policy",
            advice="Write native, native:DEVICE, safe, ipex, or the path of a policy file (ending in .toml)."
            + (' To extend nothing, write extends = "nothing" and nothing else.' if name == "nothing" else ""),
        )
