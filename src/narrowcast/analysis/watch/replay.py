"""A call as a script of its own, with its inputs: runs without the model, in any format, on any device."""

from __future__ import annotations

import tempfile
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from narrowcast.errors import Origin, RunError, reason_of
from narrowcast.observation.observer.seen_call import SeenCall
from narrowcast.observation.trial.rerun import planned_dtypes
from narrowcast.reports.results.findings import Finding
from narrowcast.runtime.torch_bridge import op_id
from narrowcast.runtime.torch_surface.dispatch import tree_map


@dataclass(frozen=True, slots=True)
class Replay:
    """The op and copies of its inputs on the cpu, before the casts that a policy planned, which are kept, too."""

    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @staticmethod
    def of(call: SeenCall) -> Replay:
        """Make one of a call that still has its arguments."""
        dtypes = iter(planned_dtypes(call))

        def kept(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            return _CastTensor(value.detach().cpu().clone(), next(dtypes, None))

        args, kwargs = tree_map(kept, (call.args, call.kwargs))
        return Replay(op_id(call.facts.op), args, kwargs)

    def save(self, folder: Path, finding: Finding) -> Path:
        """Write `repro.py` and its inputs; return the script's path. RunError if the folder cannot be written, which is
        then unchanged.
        """
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            prefix = f".{folder.name}."
            with tempfile.TemporaryDirectory(dir=folder.parent, prefix=prefix, ignore_cleanup_errors=True) as name:
                temporary = Path(name)
                text = _SCRIPT.format(
                    title=str(finding.id), place=f"{finding.file}:{finding.line}",
                    sentence=textwrap.fill(finding.sentence.replace('"', "'"), 100), op=self.op,
                    arguments=_text(list(self.args), temporary), named=_text(dict(self.kwargs), temporary),
                )  # fmt: skip
                (temporary / "repro.py").write_text(text, encoding="utf-8")
                folder.mkdir(exist_ok=True)
                for file in temporary.iterdir():
                    file.replace(folder / file.name)
        except OSError as error:
            raise RunError(
                f"saving a call into {folder}", reason_of(error), (Origin(str(folder)),),
                "Give a folder that can be written to and has room.",
            ) from error  # fmt: skip
        return folder / "repro.py"


@dataclass(frozen=True, slots=True)
class _CastTensor:
    """An input tensor, and the dtype that it is cast to; None for no cast."""

    tensor: torch.Tensor
    dtype: torch.dtype | None


def _text(value: Any, folder: Path) -> str:
    """Return a value as Python text; write tensors into files in the folder."""
    if isinstance(value, _CastTensor):
        tensor, name = value.tensor, f"tensor{len(list(folder.iterdir()))}.npy"
        raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy() if tensor.numel() else np.empty(0, np.uint8)
        np.save(folder / name, raw, allow_pickle=False)
        text = f"load({name!r}, {tensor.dtype}, {list(tensor.shape)}, {list(tensor.stride())})"
        return text if value.dtype is None else f"cast({text}, {value.dtype})"
    if isinstance(value, list | tuple):
        inside = ", ".join(_text(v, folder) for v in value)
        return f"[{inside}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_text(v, folder)}" for key, v in value.items()) + "}"
    if isinstance(value, float):
        return f"float({str(value)!r})" if value != value or abs(value) == float("inf") else repr(value)
    if isinstance(value, torch.device):
        return "DEVICE"
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        return str(value)
    return repr(value) if isinstance(value, int | bool | str | complex | type(None)) else "None"


_SCRIPT = '''"""{title}
of {place}:
{sentence}

Found by Narrowcast. Needs torch and numpy alone.
python repro.py [--format fp32|fp64|bf16|fp16] [--device cpu|cuda|...]
"""

import argparse
from pathlib import Path

import numpy as np
import torch

FORMATS = {{"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}}
parser = argparse.ArgumentParser()
parser.add_argument("--format", choices=FORMATS, help="in place of the formats that the call had")
parser.add_argument("--device", default="cpu")
options = parser.parse_args()
DEVICE = torch.device(options.device)


def load(name, dtype, shape, stride):
    raw = torch.from_numpy(np.load(Path(__file__).parent / name, allow_pickle=False))
    values = (raw.view(dtype) if raw.numel() else torch.empty(0, dtype=dtype, device="cpu")).reshape(shape)
    if all(stride):
        values = torch.empty_strided(shape, stride, dtype=dtype).copy_(values)
    return values.to(DEVICE)


def converted(value, dtype):
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, torch.dtype) and value.is_floating_point:
        return dtype
    if isinstance(value, list):
        return [converted(v, dtype) for v in value]
    return {{k: converted(v, dtype) for k, v in value.items()}} if isinstance(value, dict) else value


def call(dtype=None):
    """The op, on copies of its inputs as they came, cast as they were; or all in one format."""

    def cast(tensor, planned):
        return tensor.to(planned if dtype is None else dtype)

    args = {arguments}
    kwargs = {named}
    if dtype is not None:
        args, kwargs = converted(args, dtype), converted(kwargs, dtype)
    result = torch.ops.{op}(*args, **kwargs)
    return [r for r in (result if isinstance(result, (list, tuple)) else [result]) if isinstance(r, torch.Tensor)]


def main():
    found = call(FORMATS[options.format] if options.format else None)
    try:
        exact = call(torch.float64)
    except (RuntimeError, NotImplementedError) as error:
        print("no fp64 to compare with:", str(error).splitlines()[0])
        exact = [None] * len(found)
    for number, (x, reference) in enumerate(zip(found, exact)):
        if not x.is_floating_point():
            continue
        text = f"result {{number}}: {{x.dtype}} {{list(x.shape)}}, {{int(x.isnan().sum())}} nan, "
        text += f"{{int(x.isinf().sum())}} infinite"
        if reference is not None:
            error = (x.double() - reference).norm() / reference.norm()
            text += f", relative error {{float(error):.3g}}, largest of fp64 {{float(reference.abs().max()):.6g}}"
        print(text)


main()
'''
