"""Facts of the machine that a result was taken on."""

import os
import platform
from pathlib import Path

import torch

from narrowcast.runtime.devices.device import LIMITS


def facts() -> dict[str, object]:
    """Processor, cores, memory, accelerator, versions, load."""
    cpu = platform.processor()
    info = Path("/proc/cpuinfo")
    flags: set[str] = set()
    if info.exists():
        for line in info.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                cpu = value.strip()
            elif key.strip() == "flags":
                flags = set(value.split())
    wanted = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16")
    return {
        "cpu": cpu,
        "limits": {name: os.environ[name] for name in LIMITS if name in os.environ},
        "units": [flag for flag in wanted if flag in flags],
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "load": os.getloadavg()[0],
    }
