"""Compare two runs of a model: outputs, metric, time and peak memory."""

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
from narrowcast.report import Comparison, NotFinite, OutputError
from narrowcast.torch_bridge import short_type, tensors_in
from narrowcast.torch_surface.dispatch import DispatchMode, keystr, storage_key, tree_flatten_with_path

Run = Callable[[], Any]
Find = Callable[[Run, Run], tuple[NotFinite | None, str]]


def sqnr_db(reference: torch.Tensor, found: torch.Tensor) -> float:
    """Signal to quantisation noise in dB: 10 log10(sum ref^2 / sum (ref - x)^2), in fp64.

    Any shapes, equal ones; infinity if the tensors are equal, NaN if one holds a NaN or infinity that the other lacks.
    """
    ref, x = reference.detach().double(), found.detach().double()
    noise = float(difference(ref, x).square().sum())
    signal = float(ref.nan_to_num(0.0, 0.0, 0.0).square().sum())
    if noise == 0.0:
        return math.inf
    if math.isnan(noise):
        return math.nan
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf


def relative_error(reference: torch.Tensor, found: torch.Tensor) -> float:
    """||x - ref|| / ||ref|| in fp64; 0 if equal, infinity if the reference is all zeros and x is not."""
    ref, x = reference.detach().double(), found.detach().double()
    noise = float(difference(ref, x).norm())
    size = float(ref.nan_to_num(0.0, 0.0, 0.0).norm())
    if noise == 0.0:
        return 0.0
    return noise / size if size > 0 else math.inf


def difference(ref: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """x - ref, zero where both are the same infinity or both NaN."""
    same = (ref == x) | (torch.isnan(ref) & torch.isnan(x))
    return torch.where(same, torch.zeros_like(ref), x - ref)


def output_errors(reference: Any, found: Any) -> tuple[OutputError, ...]:
    """One row per floating tensor in the outputs (nested in tuples, dicts, dataclasses that pytree knows). Of complex
    ones real and imaginary parts are compared.
    """
    rows = []
    pairs = zip(_named_tensors(reference), _named_tensors(found), strict=False)
    for (name, ref), (_, x) in pairs:
        shape = ref.shape
        is_real = ref.is_floating_point() and x.is_floating_point()
        if not (is_real or (ref.is_complex() and x.is_complex())) or ref.shape != x.shape:
            continue
        names = short_type(ref.dtype), short_type(x.dtype)
        ref, x = as_real(_dense(ref)), as_real(_dense(x))
        largest = difference(ref.detach().double(), x.detach().double()).abs()
        rows.append(
            OutputError(
                name=name,
                reference=f"{names[0]} {list(shape)}",
                found=names[1],
                sqnr_db=sqnr_db(ref, x),
                relative_error=relative_error(ref, x),
                largest_error=float(largest.max()) if largest.numel() else 0.0,
            )
        )
    return tuple(rows)


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """A complex tensor as its real and imaginary parts, [..., 2]; another as it is."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def _named_tensors(tree: Any) -> list[tuple[str, torch.Tensor]]:
    leaves, _ = tree_flatten_with_path(tree)
    return [(keystr(path).lstrip(".") or "output", leaf) for path, leaf in leaves if torch.is_tensor(leaf)]


def compare(
    reference: Run,
    region: Run,
    metric_reference: Mapping[str, float],
    metric_found: Mapping[str, float],
    repeats: int = 7,
    seconds: float = 10.0,
    find: Find | None = None,
) -> Comparison:
    """Run both: once for the outputs and peak memory each, then alternating pairs for time: `repeats` of them, or after
    the third as many as fit into these seconds. find: given both, says what first was not finite in the region alone,
    and the first NaN of the reference; asked where outputs are not finite.
    """
    reference_output, reference_peak = peak_bytes(reference)
    region_output, region_peak = peak_bytes(region)
    errors = output_errors(reference_output, region_output)
    not_finite, reference_not_finite = None, ""
    if find is not None and (any(math.isnan(error.sqnr_db) for error in errors) or _has_nan(reference_output)):
        not_finite, reference_not_finite = find(reference, region)
    del reference_output, region_output
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
        outputs=errors,
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
        not_finite=not_finite,
        reference_not_finite=reference_not_finite,
    )


def _has_nan(tree: Any) -> bool:
    return any(t.is_floating_point() and bool(torch.isnan(_dense(t)).any()) for t in tensors_in(tree))


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
