"""The device at hand: what it is, whether it is here and busy, its clock, and what a measurement leaves as it was."""

from __future__ import annotations

import json
import os
import platform
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.autograd.graph import saved_tensors_hooks

from narrowcast.reports.results.profile import Device
from narrowcast.runtime.torch_surface.autograd import has_saved_tensors_hooks
from narrowcast.runtime.torch_surface.state import is_profiled


@cache
def this_device(device_type: str, threads: int) -> Device:
    """Return the device of this machine on which models run, with that many threads."""
    if device_type == "cuda" and torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        cuda_units = (f"sm_{major}{minor}", f"fp32 products {torch.get_float32_matmul_precision()}")
        return Device("cuda", torch.cuda.get_device_name(), cuda_units, 1, torch.__version__)
    if device_type != "cpu":
        return Device(device_type, device_type, (), 1, torch.__version__)
    return Device("cpu", *_processor(), threads, torch.__version__)


LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")
"""Variables that keep libraries from using units that are there: what is measured under one is another device's."""
_UNITS = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16", "asimd", "bf16", "sve")


def _processor() -> tuple[str, tuple[str, ...]]:
    name, flags = platform.processor() or platform.machine(), set()
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                name = value.strip()
            elif key.strip() in ("flags", "Features"):
                flags = set(value.split())
    else:  # another system: what torch's own kernels use says as much as is needed
        flags = _TORCH_UNITS.get(torch.backends.cpu.get_cpu_capability(), set())
    limits = (f"{limit}={os.environ[limit]}" for limit in LIMITS if os.environ.get(limit))
    return name, (*(unit for unit in _UNITS if unit in flags), *limits)


_TORCH_UNITS = {"AVX512": {"avx2", "avx512f"}, "AVX2": {"avx2"}, "SVE256": {"sve"}, "NEON": {"asimd"}}


def device_now(device_type: str = "cpu") -> Device:
    """Return `this_device` with the number of threads that torch uses now."""
    return this_device(device_type, torch.get_num_threads())


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Restore random states at the end, torch's on the cpu and on the accelerator in use, numpy's and Python's, so that
    numbers drawn inside are not missing afterwards.
    """
    module, index = _generator_in_use()
    state = module.get_rng_state(*index) if hasattr(module, "get_rng_state") else None
    python, common = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(common)
            if state is not None:
                module.set_rng_state(state, *index)


def _generator_in_use() -> tuple[Any, tuple[int, ...]]:
    """Return the module of the accelerator in use, or None, and the arguments that name its generator."""
    device = accelerator_in_use()
    if device is None:
        return None, ()
    return torch.get_device_module(device), () if device.type == "mps" else (device.index or 0,)  # mps has one


def random_state() -> tuple[bytes, ...]:
    """Return torch's random states, on the cpu and on the accelerator in use."""
    module, index = _generator_in_use()
    states = [torch.get_rng_state()]
    if hasattr(module, "get_rng_state"):
        states.append(module.get_rng_state(*index))
    return tuple(state.numpy().tobytes() for state in states)


def accelerator_in_use() -> torch.device | None:
    """Return the accelerator of this process, with its current index; None where nothing has used it yet."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or not getattr(torch.get_device_module(accelerator), "is_initialized", lambda: True)():
        return None
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def is_here(device_type: str) -> bool:
    """Return whether this machine has such a device."""
    if device_type == "cpu" or not torch.accelerator.is_available():  # a build may know one that is not there
        return device_type == "cpu"
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == device_type


def is_capturing() -> bool:
    """Return whether a CUDA graph is being captured: then nothing may wait for the device."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def own_saved_tensors() -> Any:
    """Keep our saved tensors from whatever saves tensors in ways of its own, as a checkpoint around a call does.

    Where nothing does, nothing is changed: a graph with `torch.func.grad` in it takes no hooks.
    """
    return saved_tensors_hooks(lambda t: t, lambda t: t) if has_saved_tensors_hooks() else nullcontext()


def synchronize() -> None:
    """Wait for the accelerator, whichever it is, if it is in use."""
    if accelerator_in_use() is not None:
        torch.accelerator.synchronize()


def elapsed_ns(run: Callable[[], object], repeats: int = 1) -> float:
    """Return nanoseconds of all runs together, from an idle device until it is idle again."""
    synchronize()
    start = time.perf_counter_ns()
    for _ in range(repeats):
        run()
    synchronize()
    return float(time.perf_counter_ns() - start)


# -- the most bytes that a run holds at once ---------------------------------------------------------------------------
#
# On the cpu torch's profiler names every allocation, kernels' own included; an accelerator counts by itself. What a
# library takes past torch is not seen.


def held_at_most(run: Callable[[], object], device_type: str = "cpu") -> int | None:
    """Return the most bytes of a device that a run holds beyond those before it; None where another profiler is on."""
    if device_type != "cpu":
        torch.accelerator.synchronize()
        torch.accelerator.reset_peak_memory_stats()
        before = torch.accelerator.memory_allocated()
        run()
        torch.accelerator.synchronize()
        return int(torch.accelerator.max_memory_allocated() - before)
    if is_profiled():  # a second profiler would end the first
        run()
        return None
    from torch.profiler import ProfilerActivity, profile

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            run()
        seen.export_chrome_trace(str(file))
        events = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    changes = [(e["ts"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]"]
    held = most = 0
    for _, change in sorted(changes):
        held += change
        most = max(most, held)
    return most
