"""What this device can do: asked once, by the smallest call of each op, and kept in the device's profile.

The caller may be tracing, capturing, recording, in inference mode or in a region. So the device is asked on a thread
of its own, which has none of that, with tensors whose values need no random numbers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from narrowcast.core.ops import CONV, GEMM
from narrowcast.core.policy import Policy
from narrowcast.core.policy.capabilities import (
    EMULATED_RATIO,
    RAISES,
    RUNS,
    Ability,
    Capabilities,
    device_label,
    missing_kernels,
    one_format,
    shipped_capabilities,
)
from narrowcast.core.policy.settings import FULL
from narrowcast.errors import Origin, ProfileError
from narrowcast.formats import Format, bf16, fp16, fp32
from narrowcast.reports.results.profile import Device, Profile, load_profile
from narrowcast.runtime.devices.device import device_now, elapsed_ns, is_capturing, is_here, synchronize
from narrowcast.runtime.torch_bridge import DTYPES, op_id

T = TypeVar("T")
LOW = (bf16, fp16)
BACKWARD_KNOWN = ("aten.mm.default", "backward")
_known: dict[tuple[Device, bool, bool], Capabilities] = {}
_slow: dict[tuple[Device, bool, Format], dict[str, float]] = {}
_lock = threading.Lock()


def fitted(policy: Policy, device_type: str) -> Policy:
    """Return the policy resolved for a device type; fitted to what the device lacks as well, if it asks for that."""
    resolved = policy.resolve(device_type)
    if resolved.unsupported != FULL or resolved.lacks is not None:
        return resolved
    lacks = (*capabilities(device_type).lacks, *missing_kernels(device_type), *one_format())
    return resolved.remembered(lacks, lambda: resolved.without(lacks))


def for_target(policy: Policy, device_type: str, target: str = "") -> tuple[Policy, str]:
    """Return the policy for a program that is to run elsewhere, and the target's name: `cpu (avx2), torch 2.13.0`.

    target: file of that device's profile (`narrowcast profile --output`); empty for this machine. Raises ProfileError
    if it cannot be read, or is of another device type.
    """
    if not target:
        here = device_now(device_type)
        return policy, f"{device_label(device_type, here.units)}, torch {here.torch}"
    profile = Profile.read(Path(target))
    device = profile.device
    if device.type != device_type:
        raise ProfileError(
            asked=f"a program on {device_type}, made for the target {target}", found=f"that is {device}",
            where=(Origin(target),), advice="Give the profile of a device of that type.",
        )  # fmt: skip
    label = device_label(device.type, device.units)
    asked = Capabilities(label, tuple(profile.abilities.values()))
    known = asked if asked.abilities else shipped_capabilities(device.type, device.units)
    if policy.resolve(device_type).unsupported == FULL:
        policy = policy.without((*known.lacks, *missing_kernels(device_type), *one_format()))
    return policy, f"{label}, torch {device.torch}"


def capabilities(device_type: str, backward: bool = False) -> Capabilities:
    """Return what the device runs and refuses. Of one that is not here, what is known of its kind.

    backward: backwards are asked about, too, if the profile does not know of them; the first one takes a while.
    """
    device = device_now(device_type)
    key = (device, _uses_onednn(), backward)
    if not is_here(device_type) or (key not in _known and is_capturing()):
        return shipped_capabilities(device_type, device.units)
    if key not in _known:
        with _lock:
            if key not in _known:
                _known[key] = _ask(device, _uses_onednn(), backward)
    return _known[key]


def _uses_onednn() -> bool:
    return bool(torch.backends.mkldnn.enabled)


def _ask(device: Device, keeps: bool, backward: bool) -> Capabilities:
    """Return the abilities that the profile has, or else the device's answers."""
    label = device_label(device.type, device.units)
    profile = load_profile(device) if keeps else Profile(device)
    kept = [profile.abilities[key] for key in sorted(profile.abilities)]
    known = {(ability.op, ability.direction) for ability in kept}
    if known >= {(op_id(op), "forward") for op in _ops(device.type)} and (BACKWARD_KNOWN in known or not backward):
        return Capabilities(label, tuple(kept))
    unanswered: tuple[Ability, ...] = ()
    asked = _on_a_thread_of_its_own(lambda: tuple(_answers(device.type, backward)), unanswered)
    if keeps:
        profile.abilities.update({ability.key: ability for ability in asked})
        with suppress(ProfileError):  # what is asked costs little, and is asked again where nothing can be kept
            profile.write(patience_s=0.5)
    return Capabilities(label, asked)


def _on_a_thread_of_its_own(ask: Callable[[], T], otherwise: T) -> T:
    """Return `ask()`, run on a thread, or `otherwise` if it raises: such a device is taken to run everything."""
    answers = [otherwise]

    def run() -> None:
        with suppress(Exception):
            answers.append(ask())

    thread = threading.Thread(target=run, name="narrowcast-capabilities", daemon=True)
    thread.start()
    thread.join()
    return answers[-1]


def _ops(device_type: str) -> list[Any]:
    return [op for op in SMALLEST if device_type == "cpu" or op not in CPU_ALONE]


def _answers(device_type: str, backward: bool) -> Iterator[Ability]:
    """Yield abilities: each op in each low format, forward, and with its backward where fp32 has one."""
    for op in _ops(device_type):
        if _runs(op, fp32, device_type, False) is not None:
            continue  # not for this device at all
        has_backward = backward and _runs(op, fp32, device_type, True) is None
        for low in LOW:
            for direction in ("forward", "backward")[: 1 + has_backward]:
                error = _runs(op, low, device_type, direction == "backward")
                yield Ability(op_id(op), low.name, direction, RUNS if error is None else RAISES, 0.0, error or "")


def _runs(op: Any, format: Format, device_type: str, backward: bool) -> str | None:
    """Return None if the op's smallest call runs in this format; else the first line of what it raises."""

    def make(*shape: int) -> torch.Tensor:
        operand = torch.full(shape, 0.125, dtype=DTYPES[format], device=device_type)
        return operand.requires_grad_(backward)

    try:
        args = SMALLEST[op](make)
        with torch.set_grad_enabled(backward):
            result = op(*args)
        if backward:
            first = result if isinstance(result, torch.Tensor) else result[0]
            wanted = [a for a in args if isinstance(a, torch.Tensor)]
            torch.autograd.grad(first, wanted, torch.ones_like(first), allow_unused=True)
        synchronize()
    except torch.OutOfMemoryError:
        return None  # it says nothing of what the device can do
    except Exception as error:
        return str(error).strip().partition("\n")[0] or type(error).__name__
    return None


# -- how slow ----------------------------------------------------------------------------------------------------------


def slow_families(device_type: str, format: Format) -> dict[str, float]:
    """Return the families that this device only emulates in a format, with the ratio of their time to that of fp32:
    from its profile, or from what is known of its kind, or else from a short probe.
    """
    device = device_now(device_type)
    key = (device, _uses_onednn(), format)
    families = _slow.get(key)
    if families is None:
        shipped = shipped_capabilities(device_type, device.units)
        measured = load_profile(device).low_over_high(format) if is_here(device_type) else {}
        if not (measured or shipped.abilities) and is_here(device_type) and not is_capturing():
            measured = _on_a_thread_of_its_own(lambda: _probed(device_type, format), measured)
        ratios = {**shipped.emulated(format), **measured}
        families = _slow[key] = {family: ratio for family, ratio in ratios.items() if ratio > EMULATED_RATIO}
    return families


def _probed(device_type: str, format: Format) -> dict[str, float]:
    """Time a matrix multiplication of a millisecond in each format, smaller ones first. One that takes less in both
    says nothing: what is measured then is how calls are launched, and by whom else the device is used.
    """
    for size in (64, 128, 256, 512, 1024, 2048, 4096):
        times = []
        for each in (fp32, format):
            x = torch.full((size, size), 0.125, dtype=DTYPES[each], device=device_type)
            times.append(min(elapsed_ns(partial(torch.mm, x, x)) for _ in range(3)) / 1e9)  # the first one warms up
        if max(times) >= 1e-3:
            return {GEMM: times[1] / times[0]}
    return {}


_WORDS = {GEMM: "matrix multiplications", CONV: "convolutions"}


def slow_note(device_type: str, format: Format) -> str:
    """Return a sentence on what a low format costs here, and what to do about it; empty where it is fast."""
    slow = slow_families(device_type, format)
    if not slow:
        return ""
    label = device_label(device_type, device_now(device_type).units)
    parts = " and ".join(f"{_WORDS[family]} take about {ratio:.0f} times" for family, ratio in slow.items())
    return (
        f"{label} has no fast units for {format}: {parts} fp32's time. "
        'goal="fast" (nc.compile, nc.export) chooses formats by time.'
    )


# -- what it is asked: the smallest calls of ops that policies lower ---------------------------------------------------


aten = torch.ops.aten
Make = Callable[..., torch.Tensor]
"""A tensor of this shape, in the format and on the device that are asked about, that requires grad."""


def _lstm(make: Make) -> tuple[Any, ...]:
    inputs, hidden = 8, 8
    weights = (make(4 * hidden, inputs), make(4 * hidden, hidden), make(4 * hidden), make(4 * hidden))
    states = (make(2, hidden), make(2, hidden))
    mode, layers = 2, 1
    return (make(3, 2, inputs), *weights, *states, False, [], mode, hidden, layers, True, False, False, True)


def _of(*shapes: tuple[int, ...]) -> Callable[[Make], tuple[Any, ...]]:
    """Return a function that makes the arguments of a call, tensors of these shapes."""
    return lambda make: tuple(make(*shape) for shape in shapes)


_line, _image = _of((1, 4, 8), (4, 4, 3)), _of((1, 4, 8, 8), (4, 4, 3, 3))
_volume = _of((1, 4, 5, 5, 5), (4, 4, 3, 3, 3))

SMALLEST: Mapping[Any, Callable[[Make], tuple[Any, ...]]] = {
    aten.mm.default: _of((8, 8), (8, 8)),
    aten.mv.default: _of((8, 8), (8,)),
    aten.addmm.default: _of((8,), (8, 8), (8, 8)),
    aten.bmm.default: _of((2, 8, 8), (2, 8, 8)),
    aten.baddbmm.default: _of((2, 8, 8), (2, 8, 8), (2, 8, 8)),
    aten.addbmm.default: _of((8, 8), (2, 8, 8), (2, 8, 8)),
    aten.linear.default: _of((2, 8, 8), (8, 8), (8,)),
    aten.matmul.default: _of((2, 8, 8), (8, 8)),
    aten.linalg_vecdot.default: _of((2, 8), (2, 8)),
    aten.conv1d.default: _line,
    aten.conv2d.default: _image,
    aten.conv3d.default: _volume,
    aten.conv_transpose1d.default: _line,
    aten.conv_transpose2d.input: _image,
    aten.conv_transpose3d.input: _volume,
    aten.conv_tbc.default: _of((4, 2, 4), (3, 4, 4), (4,)),
    aten.prelu.default: _of((2, 4, 4), (4,)),
    aten.scaled_dot_product_attention.default: _of((1, 2, 8, 8), (1, 2, 8, 8), (1, 2, 8, 8)),
    aten.mkldnn_rnn_layer.default: _lstm,
}
"""By op, the arguments of its smallest call."""

CPU_ALONE = frozenset([aten.mkldnn_rnn_layer.default])
"""Ops that only the cpu has."""
