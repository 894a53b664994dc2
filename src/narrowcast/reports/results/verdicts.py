"""The words in which results give their verdicts, and the table that gives a comparison's."""

from __future__ import annotations

EXACT, ROUND_OFF, FAULT, KERNEL, NONDETERMINISTIC, NOT_FINITE, PASSED_ON, UNKNOWN, NOT_JUDGED, NOT_COMPARED = (
    "exact", "round-off", "fault", "kernel", "nondeterministic", "not finite", "passed on", "not run alone",
    "not judged", "not compared",
)  # fmt: skip
"""Of a comparison, and of its calls: no difference; within what one unit in the last place of its formats explains;
outputs beyond that, or a call with other arguments than another model's; a kernel beyond what bounds its error; differs
between two runs of the reference itself; NaN or infinity, made where the reference has none; the same, passed on from a
call's inputs; random, so that it cannot be run alone; nothing bounds the error, and no rounding explains it; the
reference computes in the same low formats, or no value of two runs could be compared.
"""
ALIKE, FORMATS_DIFFER, VALUES_DIFFER = "alike", "formats differ", "values differ"
"""Of two runs, besides `ROUND_OFF` and `NOT_COMPARED`: equal wherever compared; other formats, and values within
what these explain; values beyond it.
"""
RAISES, EXPLAINED, RECORDED, REFUSED = "raises", "explained", "recorded", "refusals"
"""Of an explanation: it raises, and does not in fp32; nothing was compared. Of a ledger: whether calls were refused."""
FINITE, TREND, NOT_INSPECTED = "finite", "trend", "not inspected"
"""Of a run and of a watched one, besides `NOT_FINITE`; of a watched one alone: figures that grow towards it; looking
failed somewhere.
"""
FITS = {
    (True, True): "fits", (False, True): "fits bf16", (True, False): "fits fp16", (False, False): "fits neither",
}  # fmt: skip
"""Of headroom: whether every call fits fp16, and bf16."""
CLEAN, REPAIRED, OUT_OF_IDEAS, BEYOND = "nothing to repair", "repaired", "out of ideas", "not the policy's fault"
"""Of a repair: the policy was right as it is; it is with these rules; not all could be fixed; fp32 itself fails."""
SOUND, COSTS_TIME, WRONG = "sound", "costs time", "wrong"
SKIPPED, NONE_SKIPPED = "skipped steps", "no step skipped"
"""Of a training loop, and of a scaler's history."""
WEIGHTS, SAMPLER, TOKENS, FORMAT, ATTRIBUTE, CALLS, ROUTING, SHAPE, CACHE = (
    "weights", "sampler", "tokens", "format", "attribute", "calls", "routing", "batch shape", "cache or position",
)  # fmt: skip
CAUSES = (
    WEIGHTS,
    SAMPLER,
    TOKENS,
    FORMAT,
    ATTRIBUTE,
    CALLS,
    ROUTING,
    SHAPE,
    CACHE,
    KERNEL,
    ROUND_OFF,
    ALIKE,
    NOT_COMPARED,
)
"""Why two programs of one model differ: other weights; log-probabilities of other logits (a temperature, top-k, padded
vocabulary); other tokens; other formats; another attribute (an epsilon, a scale, a base of positions, a mask); calls
that one alone makes; another expert or index chosen; the same in batches of other shapes; a cache, or positions.
"""
INVARIANT, LEAK = "invariant", "shared"
"""Of a sample in a batch, besides `SHAPE` and `CACHE`: the same bits; results that depend on other samples, too."""
MEASURED = "measured"
"""Of a device's profile."""
VERDICTS = frozenset((
    EXACT, ROUND_OFF, FAULT, KERNEL, NONDETERMINISTIC, NOT_FINITE, NOT_JUDGED, NOT_COMPARED, ALIKE, FORMATS_DIFFER,
    VALUES_DIFFER, RAISES, EXPLAINED, RECORDED, REFUSED, FINITE, TREND, NOT_INSPECTED, *FITS.values(), CLEAN, REPAIRED,
    OUT_OF_IDEAS, BEYOND, SOUND, COSTS_TIME, WRONG, SKIPPED, NONE_SKIPPED, MEASURED, *CAUSES,
    INVARIANT, LEAK,
))  # fmt: skip
"""All that a result may say of itself as a whole."""
AT_FAULT = (NOT_FINITE, FAULT, KERNEL)
"""Verdicts that are reported to a program; the worst first."""


def verdict_of(is_beyond: bool, is_not_finite: bool, has_kernel: bool, differs: bool) -> str:
    """Return the verdict about a comparison: of three facts the worst decides, and without any whether it differs.

    is_beyond: outputs or gradients are beyond round-off. is_not_finite: something that ran is not, where the reference
    is. has_kernel: a kernel is beyond its bound, even if outputs are not.
    """
    facts = zip(AT_FAULT, (is_not_finite, is_beyond, has_kernel), strict=True)
    return next((word for word, holds in facts if holds), ROUND_OFF if differs else EXACT)
