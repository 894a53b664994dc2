"""What a script says of a region: read off the values that make it."""

from __future__ import annotations

from functools import cache
from typing import Any, Optional

import torch

from narrowcast.core.policy import DEVICE_TYPES, Policy, as_policy, known_policy
from narrowcast.errors import RegionError, ScriptError
from narrowcast.frontends.scripts.places import shown_at, shown_from
from narrowcast.runtime.torch_surface.jit import add_script_class

Value = Any  # torch._C.Value
Node = Any  # torch._C.Node

_CLASSES = tuple(f"torch.{home}amp.autocast_mode.autocast" for home in ("", "cpu.", "cuda."))
MADE = "made"
"""Among the attributes of a region object: the object itself, as what makes it gives it."""
POLICY = "narrowcast_policy"
"""The attribute of region objects that names a policy, by digest; torch's own have none."""


def region_class(value: Value) -> str | None:
    """Return the qualified name of a region's class, if the value is a region."""
    kind = value.type()
    if kind.kind() != "ClassType":
        return None
    name = str(kind.qualified_name()).removeprefix("__torch__.")
    return name if any(name == c or name.startswith(f"{c}_") for c in (*_CLASSES, REGION)) else None


REGION = "narrowcast.frontends.eager.region.autocast"


def number_of(dtype: torch.dtype) -> int:
    """Return the number that TorchScript writes for a dtype. RegionError for one in which no region computes."""
    if dtype not in _NUMBERS:
        asked, found = f"a region in a script in {dtype}", "autocast cannot use this dtype as its low format"
        raise RegionError(asked, found, advice="Give torch.bfloat16 or torch.float16.")
    return _NUMBERS[dtype]


DEFAULT_LOW = "aten::get_autocast_dtype"
_NUMBERS = {torch.float16: 5, torch.float32: 6, torch.float64: 7, torch.bfloat16: 15}  # c10/core/ScalarType.h
DTYPES = {number: dtype for dtype, number in _NUMBERS.items()}
_A_REGION = "a region in a script"
_WRITTEN = 'Write it where it is used, with torch.autocast("cpu", torch.bfloat16): ...'
_UNKNOWN = {  # by what gives the region: why its device type is not known, and what to write instead
    "prim::GetAttr": ("it is kept as an attribute, of which a script knows no device type", _WRITTEN),
    "aten::__getitem__": (
        "only the running script knows which region of the list or dict it is",
        f"{_WRITTEN}, one with statement for each region, chosen by an if.",
    ),
    "": (
        "only the running script knows its device type",
        "Write it where it is used, with torch.autocast(x.device.type): ..., in a function that narrowcast.script "
        "compiles: it does so for each device type.",
    ),
}


def makers_of(instance: Value, seen: set[int]) -> list[dict[str, Value]] | None:
    """Return the attributes of each object that a value may be; None if that is unknown."""
    if instance.unique() in seen:
        return []
    seen.add(instance.unique())
    node = instance.node()
    if node.kind() == "prim::CreateObject":
        attributes: dict[str, Value] = {MADE: instance}
        for use in instance.uses():
            if use.user.kind() == "prim::SetAttr" and use.offset == 0:
                name = use.user.s("name")
                if name in attributes:
                    return None
                attributes[name] = use.user.inputsAt(1)
        return [attributes]
    if node.kind() == "prim::Enter":  # `as`
        return makers_of(node.inputsAt(0), seen)
    if node.kind() == "prim::If":
        makers: list[dict[str, Value]] = []
        position = [o.unique() for o in node.outputs()].index(instance.unique())
        for block in node.blocks():
            of_block = makers_of(list(block.outputs())[position], seen)
            if of_block is None:
                return None
            makers += of_block
        return makers
    return None


def the_same(makers: list[dict[str, Value]] | None, name: str, missing: Any = None) -> Any:
    """Return the constant that an attribute has in every object; None if there is none."""
    constants = {constant(m[name]) if name in m else missing for m in makers or ()}
    return constants.pop() if len(constants) == 1 else None


def constant(value: Value) -> Any:
    """Return a constant's value, the device's default dtype included; None for anything else."""
    node = value.node()
    if node.kind() == "prim::Constant":
        return value.toIValue()
    if node.kind() == DEFAULT_LOW:
        device = constant(node.input())
        return number_of(torch.get_autocast_dtype(device)) if isinstance(device, str) else None
    return None


def device_of(makers: list[dict[str, Value]] | None, instance: Value, node: Node) -> str:
    """Return the device type of a region, or raise ScriptError where it is not known or has no autocast."""
    device = the_same(makers, "device")
    if device is None:
        found, advice = _UNKNOWN.get(instance.node().kind(), _UNKNOWN[""])
        maker = instance.node()
        asked = f"a region in a script, self.{maker.s('name')}" if maker.kind() == "prim::GetAttr" else _A_REGION
        place = shown_at(maker)  # TorchScript has none for what a with statement finds by its name alone
        raise ScriptError(asked if place else f"{asked}, around this line", found, place or shown_from(node), advice)
    if device not in DEVICE_TYPES:
        found, advice = "no autocast lists are known for it", f"Give one of: {', '.join(DEVICE_TYPES)}."
        raise ScriptError(f"a region on device type {device!r}", found, shown_at(instance.node()), advice)
    return str(device)


def low_format(low: Any, instance: Value) -> Any:
    """Return the low format, where it is known as the number of a dtype; else what the script will know."""
    if not isinstance(low, int):
        return low
    if low not in DTYPES:
        asked, where = f"a region in a script with dtype number {low}", shown_at(instance.node())
        raise ScriptError(asked, "not a floating-point format", where, "Give torch.bfloat16 or torch.float16.")
    return DTYPES[low]


def remove_unused_objects(graph: Any) -> None:
    """Remove region objects that nothing reads, with the statements that fill them."""
    for node in graph.findAllNodes("prim::CreateObject"):
        users = [use.user for use in node.output().uses()]
        if region_class(node.output()) is not None and all(user.kind() == "prim::SetAttr" for user in users):
            for user in users:
                user.destroy()
            node.destroy()


# -- policies: a graph can hold a digest, and nothing more -------------------------------------------------------------


_in_scripts: dict[str, Policy] = {}  # by digest; torch never frees scripts either


def hold_policy(policy: Policy) -> str:
    """Hold a policy that a script is to name; its digest."""
    _in_scripts[policy.digest] = policy
    return policy.digest


def told_policy(name: str) -> Policy | None:
    """Return the policy that a script names, by digest, name or path; None for torch's own, which has no name."""
    policy = _in_scripts.get(name)
    if policy is None and name:
        policy = known_policy(name) or as_policy(name)
        _in_scripts[policy.digest] = policy
    return policy


# -- the class that `narrowcast.autocast` is in scripts: facts to be read off, with no effect of its own ---------------


class autocast:  # noqa: N801 (in scripts it has this name)
    """A region in a script: device type, low format, enabled and cache, as TorchScript can hold them."""

    def __init__(
        self,
        device_type: str,
        dtype: Optional[int] = None,  # noqa: UP045  # what TorchScript reads
        enabled: bool = True,
        cache_enabled: Optional[bool] = None,  # noqa: UP045
        policy: str = "native",
    ) -> None:
        self.device = device_type
        low = torch.get_autocast_dtype(device_type) if dtype is None else dtype
        self.fast_dtype = low
        # torch's own is off in any other format
        self._enabled = enabled and (policy != "" or dtype is None or low == 5 or low == 15)
        self.cached = -1 if cache_enabled is None else int(cache_enabled)  # as around it, or as its policy says
        self.narrowcast_policy = policy

    def __enter__(self):  # type: ignore[no-untyped-def]
        if self.cached > -2:  # where narrowcast.script has compiled it, no region is left to be entered
            raise RuntimeError(
                "narrowcast.autocast does nothing here: torch.jit.script compiled it, or __enter__ is called by hand. "
                "Write narrowcast.script(...) and with statements; a part of a script is converted by itself"
            )
        return self

    def __exit__(self, kind: Any, value: Any, traceback: Any):  # type: ignore[no-untyped-def]
        pass


@cache
def register_region(named: type) -> None:
    """Have TorchScript take this class where a script names `named`, which is `narrowcast.autocast`."""
    add_script_class(named, autocast, f"__torch__.{REGION}")
