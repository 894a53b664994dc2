"""The first value of a run that is not finite: which op gave it, and whether fp32 gives it, too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from narrowcast.report import NotFinite
from narrowcast.sites.python_stack import find_site
from narrowcast.torch_bridge import FORMATS, op_id, tensors_in
from narrowcast.torch_surface.dispatch import DispatchMode, OpOverload

Key = tuple[str, str, str, int, int]
"""A call: op, module path, file, line, and how many like it came before."""


def first_not_finite(reference: Callable[[], Any], region: Callable[[], Any]) -> tuple[NotFinite | None, str]:
    """The first call in the region that gives infinity or NaN where fp32 does not; and the first NaN of fp32 itself.

    Infinities that fp32 has at the same place are meant: masks are made of them. A call that fp32 lacks (a cast) counts
    if all that came to it was finite.
    """
    in_fp32 = _Finite({})
    with in_fp32:
        output = reference()
    has_nan = any(bool(torch.isnan(t).any()) for t in tensors_in(output) if t.is_floating_point())
    own = in_fp32.first_nan if has_nan else None
    in_region = _Finite(in_fp32.finite)
    with in_region:
        region()
    return in_region.found, "" if own is None else own.text


class _Finite(DispatchMode):
    """Looks at every result. expected: which calls gave finite results in fp32."""

    def __init__(self, expected: dict[Key, bool]) -> None:
        super().__init__()
        self.finite: dict[Key, bool] = {}
        self.found: NotFinite | None = None
        self.first_nan: NotFinite | None = None
        self._expected = expected
        self._calls: Counter[tuple[str, str, str, int]] = Counter()

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        were_finite = all(_is_finite(t) for t in tensors_in(args, kwargs))
        result = func(*args, **kwargs)
        results = tensors_in(result)
        is_finite = all(_is_finite(t) for t in results)
        site = find_site(with_names=False)
        call = (op_id(func), *site.at)
        key = (*call, self._calls[call])
        self._calls[call] += 1
        self.finite[key] = is_finite
        if not is_finite and (self.found is None or self.first_nan is None):
            has_nan = any(bool(torch.isnan(t).any()) for t in results if _counts(t))
            formats = ",".join(dict.fromkeys(str(FORMATS.get(t.dtype, t.dtype)) for t in results if _counts(t)))
            value = NotFinite(*call, formats, "nan" if has_nan else "infinity")
            if self.found is None and self._expected.get(key, were_finite):
                self.found = value
            if self.first_nan is None and has_nan:
                self.first_nan = value
        return result


def _is_finite(tensor: torch.Tensor) -> bool:
    return not _counts(tensor) or bool(torch.isfinite(tensor).all())


def _counts(tensor: torch.Tensor) -> bool:
    """Whether the tensor has floating values that can be looked at."""
    return tensor.is_floating_point() and tensor.layout is torch.strided and tensor.device.type != "meta"
