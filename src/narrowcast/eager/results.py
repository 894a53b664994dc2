"""What a call returned, cast as its plan says."""

from __future__ import annotations

from typing import Any

import torch

from narrowcast.decide import Plan
from narrowcast.torch_bridge import DTYPES, cast


def cast_results(result: Any, plan: Plan) -> Any:
    """What an op returned, with the plan's casts of it made."""
    for wanted in plan.results:
        if wanted.format is None:
            continue
        dtype = DTYPES[wanted.format]
        if not wanted.part:
            result = _cast_result(result, dtype, wanted.exactly)
        elif isinstance(result, (tuple, list)):
            pairs = enumerate(result)
            result = type(result)(
                _cast_result(r, dtype, wanted.exactly) if str(n) == wanted.part else r for n, r in pairs
            )
    return result


def _cast_result(result: Any, dtype: torch.dtype, exactly: bool) -> Any:
    if isinstance(result, torch.Tensor):
        fits = result.is_floating_point() and (exactly or result.dtype is not torch.float64)
        return cast(result, dtype) if fits else result
    if isinstance(result, (tuple, list)):
        return type(result)(_cast_result(item, dtype, exactly) for item in result)
    return result
