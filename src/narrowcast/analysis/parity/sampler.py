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
_SAME = 1e-3
"""Shares of a distribution are one number within this."""


def sampled_from(rows: torch.Tensor, ids: Sequence[int], kept: Sequence[float]) -> Iterator[tuple[str, float]]:
    """Yield what may have been done to logits before the log-probabilities were taken, with the rms in nats that is
    left if it was. rows: logits [N, V]; ids, kept: N tokens and the log-probabilities that were kept of them.
    """
    with quietly():
        logits, chosen = rows.double(), torch.tensor(ids, device=rows.device)[:, None]
        wanted = torch.tensor(kept, dtype=torch.float64, device=rows.device)
        own = logits.log_softmax(-1)
        yield from _temperature(logits, chosen, wanted)
        shares = (own.gather(1, chosen)[:, 0] - wanted).exp()  # of the distribution that was kept
        yield from _largest(own.exp(), shares, chosen, wanted)
        yield from _vocabulary(own.exp(), shares, chosen, wanted)
        for name, dtype in _LOW.items():
            low = rows.to(dtype).log_softmax(-1).gather(1, chosen)[:, 0]
            yield f"log_softmax in {name}", _left(low, wanted)


def _left(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return distance_in_nats(found.double().tolist(), wanted.tolist()).rms


def _temperature(logits: torch.Tensor, chosen: torch.Tensor, wanted: torch.Tensor) -> Iterator[tuple[str, float]]:
    def left(temperature: float) -> float:
        return _left((logits / temperature).log_softmax(-1).gather(1, chosen)[:, 0], wanted)

    n = min(range(len(_TEMPERATURES)), key=lambda n: left(_TEMPERATURES[n]))
    low, high = _TEMPERATURES[max(0, n - 1)], _TEMPERATURES[min(len(_TEMPERATURES) - 1, n + 1)]
    for _ in range(40):  # golden section
        one, two = high - (high - low) * 0.618, low + (high - low) * 0.618
        low, high = (low, two) if left(one) < left(two) else (one, high)
    temperature = (low + high) / 2
    if not math.isclose(temperature, 1.0, abs_tol=1e-3):
        yield f"temperature {temperature:.4g}", left(temperature)


def _largest(
    p: torch.Tensor, shares: torch.Tensor, chosen: torch.Tensor, wanted: torch.Tensor
) -> Iterator[tuple[str, float]]:
    """Yield top-k and top-p: the share that was kept is that of the k largest, or the first beyond p."""
    ordered, _ = p.sort(-1, descending=True)
    sums = ordered.cumsum(-1)
    own, is_kept = p.gather(1, chosen)[:, 0].log(), wanted.isfinite()
    if not bool(is_kept.any()):
        return
    counts = (sums[is_kept] - shares[is_kept, None]).abs().argmin(-1)
    k = int(counts.median()) + 1
    if k < p.shape[1]:
        largest = own - sums[:, k - 1].log()
        is_out = own.exp() < ordered[:, k - 1] * (1 - _SAME)
        yield f"top-k {k}", _left(largest.masked_fill(is_out, -math.inf), wanted)
    sums, shares, own, wanted = sums[is_kept], shares[is_kept], own[is_kept], wanted[is_kept]
    is_whole = counts == p.shape[1] - 1
    before = sums.gather(1, (counts - 1).clamp(min=0)[:, None])[:, 0].masked_fill(counts == 0, 0.0)
    low, high = float(before[~is_whole].max()) if not bool(is_whole.all()) else 1.0, float(shares.min())
    if low < high + _SAME and high < 1 - _SAME:
        at = sums.gather(1, counts[:, None])[:, 0]
        yield f"top-p {(low + high) / 2:.2g}", _left(own - at.log(), wanted)


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
