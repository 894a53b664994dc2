"""How a weight in a low format and what is kept besides it make a number of fp32, and how they are made of one.

Of tensors, element by element, without a branch: as well in compiled code.
"""

from __future__ import annotations

import hashlib

import torch

from narrowcast.core.policy.storage import FP32, KAHAN, NONE, REMAINDER, STOCHASTIC, KeptFormats

PLAIN = "plain"
_LOW_HALF, _HALF, _NAN = 0xFFFF, 0x8000, 0x7FC00000
SPREAD = 0x9E3779B1 - 2**32, 0x21F0AAAD, 0xD35A2D97 - 2**32
"""Odd numbers by which a hash multiplies: 2**32 over the golden ratio, and two of the best of "hash-prospector"
(Wellons, 2018).
"""


def way_of(kept: KeptFormats) -> str:
    """Return by which of the ways here a weight is kept: its master, or else its rounding; `plain` is in fp32."""
    if kept.weight == FP32:
        return PLAIN
    return kept.master if kept.master != NONE else kept.rounding


def joined(way: str, weight: torch.Tensor, rest: torch.Tensor | None) -> torch.Tensor:
    """Return the number in fp32 that a weight and what is kept besides it are. What does not round to the weight gives
    way to it, since somebody wrote to the weight; a remainder completes almost any weight, to half a unit.
    """
    own = weight.float()
    if way == FP32 and rest is not None:
        return torch.where(own == rounded(rest, weight.dtype), rest, own)
    if way == REMAINDER and rest is not None:
        wide = (own.view(torch.int32) + rest.to(torch.int32)).view(torch.float32)
        return torch.where(wide == wide, wide, own)
    if way == KAHAN and rest is not None:
        half = torch.finfo(weight.dtype).eps / 2  # of a unit, relative; by 1 % more, since it is rounded itself
        least = torch.finfo(weight.dtype).smallest_normal * half
        return torch.where(rest.float().abs() <= own.abs() * (half * 1.01) + least, own + rest.float(), own)
    return own


def parted(
    way: str, wide: torch.Tensor, dtype: torch.dtype, words: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return a weight in fp32 that a dtype holds, and what is kept besides it. words: random ones, of 16 bits.

    `fp32` and `nearest` round to nearest even, `kahan` too, and keeps what is left in the weight's dtype. `remainder`
    rounds half away from zero, and keeps the difference of the bits, which 16 bits hold: both together are the number
    exactly, a NaN but for its payload. `stochastic` adds a word to the bits below the weight's, and cuts them.
    """
    if way == REMAINDER:
        bits = _bits(wide)
        high = (bits + _HALF) & ~_LOW_HALF
        return high.view(torch.float32), bits - high
    if way == STOCHASTIC and words is not None:
        return ((_bits(wide) + words) & ~_LOW_HALF).view(torch.float32), None
    weight = rounded(wide, dtype)
    if way != KAHAN:
        return weight, wide if way == FP32 else None
    left = wide - weight
    return weight, rounded(torch.where(left.isfinite(), left, 0.0), dtype)


def rounded(wide: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return numbers of fp32 rounded to nearest even, in fp32: by their bits, since compilers leave out a conversion
    to bf16 and back.
    """
    if dtype is not torch.bfloat16:
        return wide.to(dtype).float()
    bits = _bits(wide)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & ~_LOW_HALF).view(torch.float32)


def rounded_state(value: torch.Tensor, dtype: torch.dtype, keyed: torch.Tensor | None, salt: int) -> torch.Tensor:
    """Return a state in the dtype that it is kept in: in bf16 rounded at random, since a moment that loses a thousandth
    of itself in a step would stay where it is.
    """
    if keyed is not None and dtype is torch.bfloat16:
        return parted(STOCHASTIC, value, dtype, words(keyed, salt))[0].to(dtype)
    return value.to(dtype)


def _bits(wide: torch.Tensor) -> torch.Tensor:
    """Return the bits of numbers of fp32, all NaN as one."""
    return torch.where(wide == wide, wide.view(torch.int32), _NAN)


def sum_of_bits(weight: torch.Tensor) -> torch.Tensor:
    """Return a sum (mod 2**32) that is another one where a weight in 16 bits is, in practice."""
    bits = weight.view(torch.int16).reshape(-1).to(torch.int32)
    bits = bits + numbered(torch.arange(bits.numel(), dtype=torch.int32, device=bits.device))
    return ((bits ^ ((bits >> 15) & 0x1FFFF)) * SPREAD[1]).sum() & 0xFFFFFFFF


def key_of(seed: int, update: int, name: str) -> int:
    """Return 32 bits, as a signed number, of a seed, the number of an update and a parameter's name."""
    digest = hashlib.sha256(f"{seed}|{update}|{name}".encode()).digest()
    return int.from_bytes(digest[:4], "little", signed=True)


def numbered(places: torch.Tensor) -> torch.Tensor:
    """Return numbers of elements in their whole parameter (int32) as `words` takes them, without the key."""
    return places * SPREAD[0]


def words(keyed: torch.Tensor, salt: int = 0) -> torch.Tensor:
    """Return a random word of 16 bits for each number, in int32. keyed: `numbered` places and a key, added.

    salt: 0 for weights, another one for each of the states: 1, 2.
    """
    spread = keyed
    for number in range(2 + salt):  # a logical shift by 15, of a signed number
        spread = (spread ^ ((spread >> 15) & 0x1FFFF)) * SPREAD[1 + number % 2]
    return (spread >> 16) & _LOW_HALF
