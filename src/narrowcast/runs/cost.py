"""What a region costs against fp32: time, in alternating pairs, and peak memory."""

from __future__ import annotations

import gc
import math
import statistics
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from narrowcast.profiles.clock import elapsed_ns
from narrowcast.report import Comparison
from narrowcast.report.differences import Differences
from narrowcast.torch_bridge import tensors_in
from narrowcast.torch_surface.dispatch import DispatchMode, storage_key

Run = Callable[[], Any]


def with_cost(
    differences: Differences,
    metric_reference: Mapping[str, float],
    metric_found: Mapping[str, float],
    reference: Run,
    region: Run,
    repeats: int = 7,
    seconds: float = 10.0,
) -> Comparison:
    """The differences with the model's metric, and what the region costs. Both are run once for peak memory, then in
    alternating pairs for time: `repeats` of them, or after the third as many as fit into these seconds.
    """
    _, reference_peak = peak_bytes(reference)
    _, region_peak = peak_bytes(region)
    times: list[tuple[float, float]] = []
    began = time.perf_counter()
    for number in range(repeats):
        if number >= 3 and time.perf_counter() - began > seconds:
            break
        order = (reference, region) if number % 2 == 0 else (region, reference)
        elapsed = {run: elapsed_ns(run) / 1e6 for run in order}
        times.append((elapsed[reference], elapsed[region]))
    ratios = sorted(b / a for a, b in times)
    return Comparison(
        differences=differences,
        metric_reference=dict(metric_reference),
        metric_found=dict(metric_found),
        reference_ms=statistics.median(a for a, _ in times),
        region_ms=statistics.median(b for _, b in times),
        time_ratio=statistics.median(ratios),
        time_quartiles=(ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]),
        repeats=len(times),
        reference_peak_bytes=reference_peak,
        region_peak_bytes=region_peak,
        memory_ratio=region_peak / reference_peak if reference_peak else math.nan,
    )


def peak_bytes(run: Run) -> tuple[Any, int]:
    """The result of `run()`, and the most bytes that tensors made during it held at one time."""
    gc.collect()
    mode = _PeakMemory()
    with mode:
        result = run()
    return result, mode.peak


class _PeakMemory(DispatchMode):
    """Adds up the storages of results while they live; what existed before is not counted."""

    def __init__(self) -> None:
        super().__init__()
        self.held = 0
        self.peak = 0
        self._seen: dict[int, weakref.finalize[Any, Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        before = {storage_key(t) for t in tensors_in(args, kwargs or {}) if t.layout is torch.strided}
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            if tensor.layout is not torch.strided:
                continue
            storage = tensor.untyped_storage()
            key = storage_key(tensor)
            if key in self._seen or key in before:
                continue
            size = storage.nbytes()
            self.held += size
            self._seen[key] = weakref.finalize(storage, self._release, key, size)
        self.peak = max(self.peak, self.held)
        return result

    def _release(self, key: int, size: int) -> None:
        if self._seen.pop(key, None) is not None:
            self.held -= size
