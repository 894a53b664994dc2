"""That two programs of one model give the same numbers, and one sample the same in every batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from narrowcast.analysis.parity.invariance import check_invariance
from narrowcast.analysis.parity.parity import Side, parity
from narrowcast.errors import CheckError
from narrowcast.frontends.eager.asked import Under
from narrowcast.reports.results.invariance import Invariance
from narrowcast.reports.results.mapping import RunMapping
from narrowcast.reports.results.parity import Parity
from narrowcast.reports.results.result import Result
from narrowcast.reports.results.verdicts import INVARIANT
from narrowcast.runtime.torch_bridge.case import Case
from narrowcast.runtime.torch_bridge.inputs import Inputs


def assert_parity(
    a: Side,
    b: Side,
    inputs: Inputs = (),
    *,
    max_nats: float | None = None,
    under: Under | tuple[Under, Under] = None,
    tokens: torch.Tensor | None = None,
    mapping: RunMapping | str | Path | None = None,
) -> Parity:
    """Assert that two programs of one model give the same numbers: a trainer and the engine that serves it.

    a, b, inputs, under, tokens, mapping: as for `nc.parity`. max_nats: the largest rms of the differences of
    log-probabilities, in nats; of models of other things the largest relative error. Without it whatever is more than
    round-off fails.

    Returns what `nc.parity` found. CheckError, an AssertionError, names the cause, its module and its line.
    """
    __tracebackhide__ = True
    found = parity(a, b, inputs, max_nats=max_nats, under=under, tokens=tokens, mapping=mapping)
    if found.is_over:
        raise _wrong(f"parity of {found.a} and {found.b}", found)
    return found


def assert_invariant(
    model: Callable[..., Any] | Case,
    inputs: Inputs = (),
    *,
    under: Under = None,
    batches: Sequence[int] = (2, 8, 17),
    dim: int = 0,
    bits: bool = False,
) -> Invariance:
    """Assert that the numbers of one sample do not depend on who shares its batch, on padding, chunks and caches.

    model, inputs, under, batches, dim: as for `nc.check_invariance`. bits: the same bits; else within round-off, since
    kernels depend on the shape of a batch.

    Returns what was found. CheckError, an AssertionError, names the way in which the sample ran, and the first call.
    """
    __tracebackhide__ = True
    found = check_invariance(model, inputs, under=under, batches=batches, dim=dim)
    if not found or (bits and found.verdict != INVARIANT):
        raise _wrong(f"one sample of {found.model} in any batch", found)
    return found


def _wrong(asked: str, found: Result) -> CheckError:
    return CheckError(asked, "\n" + found.to_text(), advice="Save it, or open its page: .save(path), .to_html().")
