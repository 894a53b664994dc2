"""What a call returned, cast as its plan says."""

from __future__ import annotations

from typing import Any

from narrowcast.core.decide import Plan
from narrowcast.frontends.eager.boundary import cast_tree
from narrowcast.runtime.torch_bridge import DTYPES


def cast_results(result: Any, plan: Plan) -> Any:
    """What an op returned, with the plan's casts of it made."""
    for wanted in plan.results:
        if wanted.format is None:
            continue
        dtype = DTYPES[wanted.format]
        if not wanted.part:
            result = cast_tree(result, dtype, wanted.exactly)
        elif isinstance(result, (tuple, list)):
            pairs = enumerate(result)
            result = type(result)(cast_tree(r, dtype, wanted.exactly) if str(n) == wanted.part else r for n, r in pairs)
    return result
