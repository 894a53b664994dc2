"""Facts of the machine, for every result file; asked for in another process, so that the runner holds no device."""

from __future__ import annotations

import shutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import machine
from results import commit


def facts(device: str) -> dict[str, Any]:
    """Everything that is known, and in `missing` why nothing can be run on this device type; empty if it can."""
    found: dict[str, Any] = {"device_type": device, "missing": missing(device)}
    found |= machine.facts()
    found |= {"cuda": torch.version.cuda, "hip": torch.version.hip, "date": _now(), **commit()}
    if device == "cuda" and not found["missing"]:
        found |= _gpu()
    found["flags"] = flags()
    return found


def missing(device: str) -> str:
    """Why nothing can be run on this device type."""
    if device != "cuda":
        return ""
    if torch.cuda.is_available():
        return ""
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} of {sys.executable} is a build without CUDA"
    return f"torch {torch.__version__} (CUDA {torch.version.cuda}) finds no GPU"


def _gpu() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(0)
    found = {
        "gpu": properties.name,
        "gpus": torch.cuda.device_count(),
        "gpu_memory_gib": round(properties.total_memory / 2**30, 1),
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "cudnn": torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None,
        "triton": _triton(),
    }
    fields = "driver_version,power.limit,clocks.max.sm,clocks.max.mem,ecc.mode.current,mig.mode.current"
    program = shutil.which("nvidia-smi")
    if program is not None:
        try:
            done = subprocess.run(
                [program, f"--query-gpu={fields}", "--format=csv,noheader"], capture_output=True, text=True, check=True,
                timeout=30,
            )  # fmt: skip
            found |= zip(fields.split(","), map(str.strip, done.stdout.splitlines()[0].split(",")), strict=False)
        except (OSError, subprocess.SubprocessError, IndexError):
            pass
    return found


def _triton() -> str | None:
    try:
        import triton
    except Exception:  # a broken one is none
        return None
    return str(triton.__version__)


def flags() -> dict[str, Any]:
    """torch's switches that decide what fp32 means; a switch that this torch lacks, or refuses to tell, is left out."""
    found: dict[str, Any] = {}
    for name, ask in (
        ("float32_matmul_precision", torch.get_float32_matmul_precision),
        ("cudnn.allow_tf32", lambda: torch.backends.cudnn.allow_tf32),
        ("cudnn.benchmark", lambda: torch.backends.cudnn.benchmark),
        ("matmul.allow_bf16_reduced", lambda: torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction),
        ("matmul.allow_fp16_reduced", lambda: torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction),
    ):
        try:
            found[name] = str(ask())
        except Exception:
            continue
    return found


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
