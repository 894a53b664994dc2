"""Print what the installed torch has, as JSON: its aten ops, its autocast kernels, and what the cpu has no kernel for.

    python tools/read_torch.py > facts-2.15.json     once per supported version; generate_policies.py reads them all

Needs torch and the packages that torch's own test lists want (expecttest).
"""

from __future__ import annotations

import json
import re
import sys
import warnings
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

DEVICE_TYPES = ("cpu", "cuda", "xpu", "mps", "mtia", "maia")
LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}
# How a kernel says that it is not there, rather than that the arguments are wrong.
NO_KERNEL = re.compile(
    "not implemented for|Low precision dtypes not supported|support tensors of type|handle types other than"
    "|Expected both inputs to be Half, Float|floating-point or complex tensor, but got|float, double, cfloat"
)


def op_id(name: str) -> str:
    """`aten::softmax.int` -> `aten.softmax.int`; no overload means the default one."""
    name = name.replace("::", ".")
    return name if name.count(".") > 1 else f"{name}.default"


def autocast_kernels(device_type: str) -> list[str]:
    """Ops with a kernel at the device's Autocast key that is no fallthrough."""
    key = f"Autocast{device_type.upper()}"
    return sorted(
        op_id(name)
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::")
        and torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
        and not torch._C._dispatch_kernel_for_dispatch_key_is_fallthrough(name, key)
    )


class Culprit(TorchDispatchMode):
    """Keeps the first op that raises for want of a kernel."""

    found: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except RuntimeError as error:
            makes = not any(a.alias_info is not None for a in (*func._schema.arguments, *func._schema.returns))
            if self.found is None and makes and NO_KERNEL.search(str(error)):
                self.found = op_id(func._schema.name + "." + func._overloadname)
            raise


def cpu_lacks() -> dict[str, list[str]]:
    """For each low format the ops that run in fp32 and have no cpu kernel in it, seen on OpInfo's own samples."""
    from torch.testing._internal.common_methods_invocations import op_db

    lacks: dict[str, set[str]] = {name: set() for name in LOW}
    for info in op_db:
        try:
            samples = list(info.sample_inputs("cpu", torch.float32))[:6]
        except Exception:
            continue
        for sample in samples:
            try:
                info(sample.input, *sample.args, **sample.kwargs)
            except Exception:
                continue
            for name, dtype in LOW.items():
                args, kwargs = tree_map(
                    lambda v, dtype=dtype: v.to(dtype) if torch.is_tensor(v) and v.dtype is torch.float32 else v,
                    ((sample.input, *sample.args), sample.kwargs),
                )
                mode = Culprit()
                try:
                    with mode:
                        info(*args, **kwargs)
                except Exception:
                    if mode.found is not None:
                        lacks[name].add(mode.found)
    return {name: sorted(ops) for name, ops in lacks.items()}


def main() -> None:
    """Print them."""
    warnings.simplefilter("ignore")
    names = [op_id(name) for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    facts = {
        "torch": ".".join(torch.__version__.split(".")[:2]),
        "ops": sorted(names),
        "kernels": {device_type: autocast_kernels(device_type) for device_type in DEVICE_TYPES},
        "cpu_lacks": cpu_lacks(),
    }
    json.dump(facts, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
