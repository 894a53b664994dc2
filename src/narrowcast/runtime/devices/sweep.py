"""The default sweep: calls of every family over sizes and formats, from which the model interpolates the rest."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from narrowcast.errors import Origin, ProfileError
from narrowcast.formats import Format, bf16, fp16, fp32
from narrowcast.output.progress import long_work
from narrowcast.reports.results.profile import Device, Profile, load_profile
from narrowcast.runtime.devices.device import device_now
from narrowcast.runtime.devices.measure import Measurable, MeasuredOperand, measure
from narrowcast.runtime.devices.signature import TINY_WITH_BACKWARD, Signature, cast_signature
from narrowcast.runtime.torch_bridge import DTYPES, op_id
from narrowcast.runtime.torch_surface.dispatch import TO_COPY

aten = torch.ops.aten
FORMATS: tuple[Format, ...] = (fp32, bf16, fp16)
Shape = tuple[int, ...]

_PRODUCTS = [(1, 1024, 1024), (1, 4096, 4096), (16, 512, 512), (128, 256, 256), (128, 384, 1536), (512, 512, 512),
             (1024, 1024, 1024)]  # fmt: skip
_CONVS = [  # input, weight, stride, groups
    ((1, 3, 224, 224), (32, 3, 3, 3), 2, 1),
    ((4, 32, 56, 56), (32, 1, 3, 3), 1, 32),
    ((1, 64, 56, 56), (64, 64, 3, 3), 1, 1),
    ((1, 256, 14, 14), (256, 256, 3, 3), 1, 1),
    ((4, 96, 28, 28), (24, 96, 1, 1), 1, 1),
]
_ATTENTION = [(1, 8, 64, 64), (4, 12, 128, 32), (1, 8, 512, 64)]
_ROWS = [(16, 64), (256, 256), (2048, 512), (8192, 1024)]
_SIZES = [16, 4096, 65_536, 1_048_576, 8_388_608]


def sweep(device_type: str, formats: Sequence[Format] = FORMATS) -> list[list[Measurable]]:
    """Return the calls, grouped so that the formats of one call are measured in turn; small ones first."""
    groups = [*_copies(device_type, formats)]
    for backward in (False, True):
        groups += [[make(f, backward) for f in formats] for make in _calls(device_type)]
    return sorted(groups, key=lambda group: group[0].signature.work.flops)


def basics(device_type: str) -> list[list[Measurable]]:
    """Return the calls that a cost model cannot do without: copies, casts, and calling anything with its backward."""
    tiny = MeasuredOperand(TINY_WITH_BACKWARD.result, (1,), fp32.name, device_type, gradient=True)
    return [*_copies(device_type, FORMATS[:2]), [Measurable(TINY_WITH_BACKWARD, aten.add.Tensor, (tiny, tiny), {})]]


def _copies(device: str, formats: Sequence[Format]) -> Iterator[list[Measurable]]:
    for size in _SIZES:
        calls = []
        for src in formats:
            for dst in formats:
                if fp32 in (src, dst):
                    operand = MeasuredOperand((size,), (1,), src.name, device)
                    op = torch.clone if src is dst else TO_COPY
                    kwargs = {} if src is dst else {"dtype": DTYPES[dst]}
                    calls.append(Measurable(cast_signature((size,), src, dst), op, (operand,), kwargs))
        yield calls


def _call(op: Any, shapes: Sequence[Shape], more: tuple[Any, ...], result: Shape, device: str) -> Any:
    """Return a function of format and direction that makes the call."""
    constants = ", ".join(map(str, more))

    def make(format: Format, backward: bool) -> Measurable:
        operands = tuple(
            MeasuredOperand(s, torch.empty(s, device="meta").stride(), format.name, device, backward) for s in shapes
        )
        types = (format.name,) * len(shapes)
        signature = Signature(op_id(op), types, tuple(shapes), result, format, constants, backward)
        return Measurable(signature, op, (*operands, *more), {})

    return make


def _calls(device: str) -> Iterator[Any]:
    """Yield calls: matrix multiplications, convolutions, attention, rows and elements."""
    for m, k, n in _PRODUCTS:
        yield _call(aten.mm.default, ((m, k), (k, n)), (), (m, n), device)
    for image, weight, stride, groups in _CONVS:
        pad = weight[-1] // 2
        side = (image[-1] + 2 * pad - weight[-1]) // stride + 1
        more = (None, [stride] * 2, [pad] * 2, [1, 1], groups)
        yield _call(aten.conv2d.default, (image, weight), more, (image[0], weight[0], side, side), device)
    for shape in _ATTENTION:
        yield _call(aten.scaled_dot_product_attention.default, (shape,) * 3, (), shape, device)
    for rows in _ROWS:
        yield _call(aten.softmax.int, (rows,), (-1,), rows, device)
        yield _call(aten.sum.dim_IntList, (rows,), ([-1],), rows[:1], device)
        yield _call(aten.layer_norm.default, (rows,), (list(rows[-1:]),), rows, device)
    for size in _SIZES:
        yield _call(aten.relu.default, ((size,),), (), (size,), device)
        yield _call(aten.gelu.default, ((size,),), (), (size,), device)
        yield _call(aten.add.Tensor, ((size,), (size,)), (), (size,), device)


# -- the profiles that this process uses: one per device, loaded when first asked for, saved when something was added --


_profiles: dict[Device, Profile] = {}
_lock = threading.Lock()
_warned: set[Path] = set()


def known_profile(device_type: str) -> Profile:
    """Return the profile of this machine's device, with what a cost model needs at least; measured if it is missing."""
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
    """Return a profile to plan with. Raise ProfileError if another device's is to be verified here."""
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
