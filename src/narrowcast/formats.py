"""The floating formats as facts, and the two questions that are asked of them: is it exact, which is widest.

Sources: IEEE 754-2019 (fp64, fp32, fp16); bfloat16 and TF32 as NVIDIA's Ampere whitepaper gives them; e4m3fn and e5m2
from "FP8 Formats for Deep Learning" (arXiv 2209.05433); the fnuz forms from arXiv 2206.02915.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from narrowcast.errors import FormatError


@dataclass(frozen=True, slots=True, eq=False)
class Format:
    """A binary floating format as facts. Instances are the module's constants and compare by identity.

    `bits` is the size in memory; `exponent_bits` and `mantissa_bits` (explicit fraction bits, without the hidden one)
    say what the arithmetic keeps, so tf32 has 32 bits in memory and 10 mantissa bits.
    """

    name: str
    bits: int
    exponent_bits: int
    mantissa_bits: int
    bias: int
    has_inf: bool = True
    has_negative_zero: bool = True
    largest_exponent_codes_lost: int = 1
    top_mantissa_codes_lost: int = 0

    @property
    def max_exponent(self) -> int:
        """The exponent e of the largest finite value, 2**e <= max < 2**(e+1)."""
        return (1 << self.exponent_bits) - 1 - self.largest_exponent_codes_lost - self.bias

    @property
    def min_exponent(self) -> int:
        """The exponent of the smallest normal value."""
        return 1 - self.bias

    @property
    def max(self) -> float:
        """The largest finite value of the format."""
        fraction = (1 << self.mantissa_bits) - 1 - self.top_mantissa_codes_lost
        return float((1 << self.mantissa_bits) + fraction) * 2.0 ** (self.max_exponent - self.mantissa_bits)

    @property
    def smallest_normal(self) -> float:
        """The smallest positive value with full precision."""
        return 2.0**self.min_exponent

    @property
    def smallest(self) -> float:
        """The smallest positive value (subnormal)."""
        return 2.0 ** (self.min_exponent - self.mantissa_bits)

    @property
    def epsilon(self) -> float:
        """The distance from 1.0 to the next larger value."""
        return 2.0**-self.mantissa_bits

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"Format({self.name})"

    def __reduce__(self) -> str:
        return self.name  # a constant of this module: pickled by name, so that identity survives


fp64 = Format("fp64", 64, 11, 52, 1023)
fp32 = Format("fp32", 32, 8, 23, 127)
tf32 = Format("tf32", 32, 8, 10, 127)
bf16 = Format("bf16", 16, 8, 7, 127)
fp16 = Format("fp16", 16, 5, 10, 15)
# e4m3fn gives up only the code S.1111.111 (NaN): its top exponent still holds numbers.
e4m3fn = Format("e4m3fn", 8, 4, 3, 7, has_inf=False, largest_exponent_codes_lost=0, top_mantissa_codes_lost=1)
e5m2 = Format("e5m2", 8, 5, 2, 15)
# The fnuz forms have one NaN, where negative zero would be, and a bias one larger.
e4m3fnuz = Format("e4m3fnuz", 8, 4, 3, 8, has_inf=False, has_negative_zero=False, largest_exponent_codes_lost=0)
e5m2fnuz = Format("e5m2fnuz", 8, 5, 2, 16, has_inf=False, has_negative_zero=False, largest_exponent_codes_lost=0)

FORMATS: dict[str, Format] = {f.name: f for f in (fp64, fp32, tf32, bf16, fp16, e4m3fn, e5m2, e4m3fnuz, e5m2fnuz)}
_SPELLINGS = {
    "float64": fp64, "double": fp64, "float32": fp32, "float": fp32, "bfloat16": bf16, "float16": fp16, "half": fp16,
    "e4m3": e4m3fn, "float8_e4m3fn": e4m3fn, "float8_e5m2": e5m2,
    "float8_e4m3fnuz": e4m3fnuz, "float8_e5m2fnuz": e5m2fnuz,
}  # fmt: skip


def find_format(text: str) -> Format | None:
    """Return the format of that name, or of a dtype of torch's (`bfloat16`, `torch.bfloat16`)."""
    name = text.strip().removeprefix("torch.")
    return FORMATS.get(name) or _SPELLINGS.get(name)


def parse_format(text: str) -> Format:
    """Return the format of that name; torch's dtype names (`bfloat16`, `torch.bfloat16`) are understood too.

    Raises FormatError for anything else.
    """
    named = find_format(text)
    if named is None:
        raise FormatError(
            asked=f"format {text!r}", found="no such format", advice=f"Write one of: {', '.join(FORMATS)}."
        )
    return named


@cache
def is_exact(src: Format, dst: Format) -> bool:
    """Return whether every value of `src` (infinities and the sign of zero included) survives a cast to `dst`.

    NaN stays NaN in every format; payloads are not values.
    """
    return (
        src.mantissa_bits <= dst.mantissa_bits
        and src.max <= dst.max
        and src.smallest >= dst.smallest
        and (dst.has_inf or not src.has_inf)
        and (dst.has_negative_zero or not src.has_negative_zero)
    )


_PROMOTABLE = (bf16, fp16, fp32, fp64)


def widest(formats: Iterable[Format]) -> Format:
    """Return the narrowest format that holds every value of all `formats`: the join of torch.promote_types.

    Defined on bf16, fp16, fp32 and fp64, where bf16 with fp16 gives fp32. FormatError for the rest (torch promotes
    no fp8, and no tensor is stored as tf32) and for no formats at all.
    """
    names = list(formats)
    outside = [f.name for f in names if f not in _PROMOTABLE]
    if outside or not names:
        raise FormatError(
            asked=f"the widest of {[f.name for f in names]}",
            found=f"{outside[0]} takes no part in promotion" if outside else "no formats",
            advice='Cast with action = "to(...)" first; promotion knows bf16, fp16, fp32 and fp64.',
        )
    if fp64 in names:
        return fp64
    first = names[0]
    return first if all(f is first for f in names) else fp32
