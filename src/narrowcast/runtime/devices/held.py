"""The most bytes that a run holds at once, asked of the device's allocator.

On the cpu torch's profiler names every allocation, kernels' own included; an accelerator counts by itself. What a
library takes past torch is not seen.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from narrowcast.runtime.devices.device import accelerator_in_use
from narrowcast.runtime.torch_surface.state import is_profiled


def held_at_most(run: Callable[[], object]) -> int | None:
    """The most bytes that a run holds beyond what was there before it; None where somebody else profiles it."""
    if accelerator_in_use() is not None:
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
