"""Log-probabilities of other logits: of a temperature, of the largest alone, of another vocabulary, in a low format.

What an engine kept, one number a token, is compared with what logits give that were changed so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from narrowcast.reports.results.parity import distance_in_nats
from narrowcast.runtime.torch_surface.dispatch import quietly

_TEMPERATURES = [0.02 * 1.05**n for n in range(160)]  # 0.02 to 47
_LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}
_USUAL, _USUAL_K = [n / 100 for n in range(10, 200) if n != 100], (10, 20, 30, 40, 50, 64, 100, 200)
"""Temperatures and k as people write them."""
_ROWS, _FEWEST, _ELEMENTS = 32, 8, 1 << 20
"""How many tokens are asked for a temperature, at most and at least, and how many logits these have together."""
_SAME, _WELL = 1e-3, 1e-2
"""Shares of a distribution are one number within this; what explains a distance well leaves this part of a limit."""


def sampled_from(
    rows: torch.Tensor, ids: Sequence[int], kept: Sequence[float], limit: float
) -> tuple[str, float] | None:
    """Return what was done to logits before the log-probabilities were taken, with the rms in nats that is left with
    that; None if nothing leaves at most this limit. Two changes have to explain it far better than one.

    rows: logits [N, V]; ids, kept: N tokens and the log-probabilities that were kept of them.
    """
    with quietly():
        logits, chosen = rows.double(), torch.tensor(ids, device=rows.device)[:, None]
        wanted = torch.tensor(kept, dtype=torch.float64, device=rows.device)
        left, what = min((left, what) for what, left in _one_change(rows, logits, chosen, wanted))
        if left > limit * _WELL:
            two, both = min(
                ((left, what) for what, left in _divided_and_cut(logits, chosen, wanted)), default=(left, what)
            )
            left, what = (two, both) if two < left * _WELL else (left, what)
        return (what, left) if left <= limit else None


def _one_change(
    rows: torch.Tensor, logits: torch.Tensor, chosen: torch.Tensor, wanted: torch.Tensor
) -> Iterator[tuple[str, float]]:
    yield from _temperature(logits, chosen, wanted)
    own = logits.log_softmax(-1)
    of_chosen = own.gather(1, chosen)[:, 0]
    yield from _cut(logits.sort(-1, descending=True)[0], of_chosen, wanted)
    yield from _vocabulary(own.exp(), (of_chosen - wanted).exp(), chosen, wanted)
    for name, dtype in _LOW.items():
        yield f"log_softmax in {name}", _left(rows.to(dtype).log_softmax(-1).gather(1, chosen)[:, 0], wanted)


def _some(logits: torch.Tensor) -> slice:
    """Return the rows, evenly spaced, that a search asks."""
    wanted = max(_FEWEST, min(_ROWS, _ELEMENTS // logits.shape[1]))
    return slice(None, None, -(-len(logits) // wanted))


def _left(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return distance_in_nats(found.double().tolist(), wanted.tolist()).rms


def _temperature(logits: torch.Tensor, chosen: torch.Tensor, wanted: torch.Tensor) -> Iterator[tuple[str, float]]:
    some = _some(logits)

    def left(temperature: float, of: slice = some) -> float:
        return _left((logits[of] / temperature).log_softmax(-1).gather(1, chosen[of])[:, 0], wanted[of])

    n = min(range(len(_TEMPERATURES)), key=lambda n: left(_TEMPERATURES[n]))
    low, high = _TEMPERATURES[max(0, n - 1)], _TEMPERATURES[min(len(_TEMPERATURES) - 1, n + 1)]
    for _ in range(40):  # golden section
        one, two = high - (high - low) * 0.618, low + (high - low) * 0.618
        low, high = (low, two) if left(one) < left(two) else (one, high)
    temperature = (low + high) / 2
    if not math.isclose(temperature, 1.0, abs_tol=1e-3):
        yield f"temperature {temperature:.4g}", left(temperature, slice(None))


def _cut(ordered: torch.Tensor, own: torch.Tensor, wanted: torch.Tensor) -> Iterator[tuple[str, float]]:
    """Yield top-k, top-p and both, with the rms that is left: the share that was kept is that of the k largest, of the
    first beyond p, or of the first beyond p of the k largest.

    ordered: logits, the largest first [N, V]; own: log-probabilities of the tokens that these give [N].
    """
    is_kept = wanted.isfinite()
    if not bool(is_kept.any()):
        return
    p = ordered.softmax(-1)
    sums = p.cumsum(-1)
    counts = (sums[is_kept] - (own - wanted)[is_kept, None].exp()).abs().argmin(-1)
    k = int(counts.median()) + 1
    if k < p.shape[1]:
        is_out = own.exp() < p[:, k - 1] * (1 - _SAME)
        yield f"top-k {k}", _left((own - sums[:, k - 1].log()).masked_fill(is_out, -math.inf), wanted)
    sums, own, wanted = sums[is_kept], own[is_kept], wanted[is_kept]
    left = _left(own - sums.gather(1, counts[:, None])[:, 0].log(), wanted)
    least, size = int(counts.max()) + 1, p.shape[1]
    for most in (size, *sorted({least, *(k for k in _USUAL_K if least < k < size)})):
        of_all = sums / sums[:, most - 1 : most]
        at, is_whole = of_all.gather(1, counts[:, None])[:, 0], counts == most - 1
        before = of_all.gather(1, (counts - 1).clamp(min=0)[:, None])[:, 0].masked_fill(counts == 0, 0.0)
        low, high = float(before[~is_whole].max()) if not bool(is_whole.all()) else 1.0, float(at.min())
        if low < high + _SAME and high < 1 - _SAME:
            yield f"{f'top-k {most} and ' if most < size else ''}top-p {(low + high) / 2:.2g}", left
            return


def _divided_and_cut(logits: torch.Tensor, chosen: torch.Tensor, wanted: torch.Tensor) -> Iterator[tuple[str, float]]:
    """Yield what `_cut` does for logits that were divided by a temperature, the one that explains some tokens best."""
    ordered = logits.sort(-1, descending=True)[0]

    def cut(temperature: float, some: slice) -> dict[str, float]:
        own = (logits[some] / temperature).log_softmax(-1).gather(1, chosen[some])[:, 0]
        return dict(_cut(ordered[some] / temperature, own, wanted[some]))

    some = _some(logits)
    left = {one: min(cut(one, some).values(), default=math.inf) for one in _USUAL}
    best = min(left, key=lambda one: left[one])
    if len(logits) >= _FEWEST and left[best] < math.inf:
        yield from ((f"temperature {best:g} and {what}", rms) for what, rms in cut(best, slice(None)).items())


def _vocabulary(
    p: torch.Tensor, shares: torch.Tensor, chosen: torch.Tensor, wanted: torch.Tensor
) -> Iterator[tuple[str, float]]:
    """Yield the first tokens alone, where the others only pad the vocabulary."""
    sums = p.cumsum(-1)
    size = int((sums - shares[:, None]).abs().mean(0).argmin()) + 1
    if size < p.shape[1] and size > int(chosen.max()):
        yield (
            f"vocabulary of {size}, not {p.shape[1]}",
            _left(p.gather(1, chosen)[:, 0].log() - sums[:, size - 1].log(), wanted),
        )
