"""What a region costs against fp32: time, in alternating pairs, with what it is spent on, and peak memory."""

from __future__ import annotations

import math
import statistics
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch

from narrowcast.output.collector import collector_paused
from narrowcast.reports.results.differences import Differences
from narrowcast.reports.results.explanation import Comparison
from narrowcast.runtime.devices.device import elapsed_ns, synchronize
from narrowcast.runtime.torch_bridge import tensors_in
from narrowcast.runtime.torch_surface.dispatch import DispatchMode, call_op, converts, storage_key
from narrowcast.runtime.torch_surface.dynamo import CompiledCode

Named = dict[str, float]
Run = Callable[[], Any]
_SECONDS = 10.0


def with_cost(
    differences: Differences,
    metrics: tuple[Named, Named],
    runs: tuple[Run, Run],
    weight_bytes: int,
    rewind: Callable[[], None] = lambda: None,
    repeats: int = 7,
) -> Comparison:
    """Return the differences with the model's metric, and what the region costs; metrics, runs: of fp32 and of the
    region. Both are run once observed, for peak memory and what time is spent on, then in alternating pairs for time:
    `repeats` of them, or after the third as many as fit into ten seconds. rewind: called before each run, untimed.
    """
    reference, region = runs
    observed = [[observe(run, rewind) for run in runs] for _ in range(2)][-1]  # what is set up at first is not counted
    times: list[tuple[float, float]] = []
    began = time.perf_counter()
    for number in range(repeats):
        if number >= 3 and time.perf_counter() - began > _SECONDS:
            break
        order = runs if number % 2 == 0 else runs[::-1]
        elapsed = {}
        for run in order:
            rewind()
            elapsed[run] = elapsed_ns(run) / 1e6
        times.append((elapsed[reference], elapsed[region]))
    ratios = sorted(b / a for a, b in times)
    peaks = [weight_bytes + each.peak_bytes for each in observed]
    return Comparison(
        differences=differences,
        metric_reference=metrics[0],
        metric_found=metrics[1],
        reference_ms=statistics.median(a for a, _ in times),
        region_ms=statistics.median(b for _, b in times),
        time_ratio=statistics.median(ratios),
        time_quartiles=(ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]),
        repeats=len(times),
        reference_peak_bytes=observed[0].peak_bytes,
        region_peak_bytes=observed[1].peak_bytes,
        memory_ratio=peaks[1] / peaks[0] if peaks[0] else math.nan,
        weight_bytes=weight_bytes,
        casts_ms=observed[1].casts_ns / 1e6,
        kernels_ms=observed[1].kernels_ns / 1e6,
        reference_kernels_ms=(observed[0].kernels_ns + observed[0].casts_ns) / 1e6,
    )


def observe(run: Run, rewind: Callable[[], None] = lambda: None) -> Observed:
    """Run and return the observation, op by op; compiled code as eager code. Python collects no cycles meanwhile, as in
    timeit: that takes time.
    """
    mode = Observed()
    rewind()
    with collector_paused(), CompiledCode(on=False), mode:
        mode.result = run()
    return mode


class Observed(DispatchMode):
    """The most bytes that tensors made during a run held at one time, and the time that its casts and kernels took.

    It adds up the storages of results while they live; what existed before is not counted. casts_ns: of conversions
    from one floating format to another, the user's own among them. kernels_ns: of all other ops.
    """

    def __init__(self) -> None:
        super().__init__()
        self.result: Any = None
        self.peak_bytes = self.casts_ns = self.kernels_ns = 0
        self._held = 0
        self._seen: dict[int, weakref.finalize[Any, Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {storage_key(t) for t in tensors_in(args, kwargs or {}) if t.layout is torch.strided}
        synchronize()
        began = time.perf_counter_ns()
        result = call_op(func, args, kwargs or {})
        synchronize()
        elapsed = time.perf_counter_ns() - began
        if converts(func, args) and args[0].is_floating_point() and result.is_floating_point():
            self.casts_ns += elapsed
        else:
            self.kernels_ns += elapsed
        for tensor in [t for t in tensors_in(result) if t.layout is torch.strided]:
            storage, key = tensor.untyped_storage(), storage_key(tensor)
            if key not in self._seen and key not in before:
                self._held += storage.nbytes()
                self._seen[key] = weakref.finalize(storage, self._release, key, storage.nbytes())
        self.peak_bytes = max(self.peak_bytes, self._held)
        return result

    def _release(self, key: int, size: int) -> None:
        if self._seen.pop(key, None) is not None:
            self._held -= size
