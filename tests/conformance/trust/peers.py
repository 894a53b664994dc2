"""What peers name of 24 common faults: torch's DebugMode and detect_anomaly, and hooks that look for NaN.

Each is used as its documents or its users have it, and is right by less than what is asked of Narrowcast, whose call,
line and advice are judged: DebugMode by the line of the first call that is not finite, or by the op of the first call
whose hash is another in a second run, of the right program in the same format; detect_anomaly by the line that its
traceback ends with; hooks by the module. msprobe comes with no package that is installed here.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import wrong_arguments
import wrong_kernels
import wrong_values
from planting import Between, Layers, Plant, lines_of, placed
from program import DEVICE, MISSED, PLACE, RIGHT, Said
from torch import Tensor, nn
from torch.utils._debug_mode import DebugMode
from torch.utils._pytree import tree_leaves

HERE = Path(__file__).parent
BF16, FP16 = torch.bfloat16, torch.float16
FORWARD = ("logarithm of zero", "root of less than zero", "zero by zero", "division by zero", "a row without a key",
           "product, fp16", "matrix product, fp16", "lost epsilon, fp16")  # fmt: skip
BACKWARD = ("backward of a root at zero", "backward of a power at zero", "backward of a logarithm under where",
            "backward of a length of zero")  # fmt: skip
KERNELS = (("silu", "is off by 5 %"), ("_softmax", "loses three bits"), ("bmm", "leaves its tail out"),
           ("sigmoid", "has a wrong sign in one row"), ("gelu", "always rounds away"),
           ("mm", "adds up in its format, one by one"))  # fmt: skip
ARGUMENTS = ("epsilon of a layer norm", "scale of attention", "a causal mask", "the axis of a softmax",
             "the temperature", "the bounds of a clamp")  # fmt: skip


class Program:
    """A faulty model to run in a region, or as it is, forward or with a backward."""

    def __init__(self, model: nn.Module, x: Tensor, dtype: torch.dtype, plant: Plant | None = None) -> None:
        self.model, self.x, self.dtype = model, x, dtype
        self.lines = lines_of(plant) if plant is not None else set()

    def run(self) -> Tensor:
        with torch.autocast(DEVICE, self.dtype):
            return self.model(self.x)

    def train(self) -> None:
        self.run().float().sum().backward()


def planted(kind: Callable[[Plant], nn.Module], plant: Plant, dtype: torch.dtype) -> Program:
    torch.manual_seed(0)
    return Program(kind(plant), torch.randn(64, 64) if kind is Between else torch.randn(8, 16), dtype, plant)


# -- what each says of a value that is not finite ---------------------------------------------------------------------


def frames(text: str) -> list[tuple[str, str]]:
    """The files and lines of a stack, innermost last; those of the faulty program alone."""
    found = re.findall(r'File "([^"]+)", line (\d+)', text) or re.findall(r"(\S+\.py):(\d+)", text)
    return [(file, line) for file, line in found if Path(file).parent == HERE and Path(file).name != "peers.py"]


def by_debug_mode(program: Program) -> Said:
    def look(func: Any, types: Any, args: Any, kwargs: Any, result: Any) -> dict[str, bool]:
        tensors = [t for t in (result if isinstance(result, tuple | list) else [result]) if isinstance(t, Tensor)]
        return {"finite": all(bool(t.isfinite().all()) for t in tensors if t.is_floating_point())}

    with DebugMode(record_stack_trace=True) as mode, DebugMode.dispatch_hooks(log_hook=look):
        program.train()
    for call in mode.operators:
        if call.log is not None and not call.log["finite"]:
            stacks = [frames(stack) for stack in (call.fwd_stack_trace or "", call.stack_trace or "")]
            return placed([lines[-1] for lines in stacks if lines], program.lines, f"{call}: {stacks}")
    return Said(MISSED)


def by_anomaly(program: Program) -> Said:
    with warnings.catch_warnings(record=True) as told, torch.autograd.detect_anomaly():
        warnings.simplefilter("always")
        try:
            program.train()
        except RuntimeError as error:
            if "nan" not in str(error):
                raise
            said = f"{error}\n{[str(one.message) for one in told]}"
            lines = [frames(str(one.message)) for one in told if "Traceback of forward call" in str(one.message)]
            return placed([of[-1] for of in lines if of] or [("", 0)], program.lines, said)
    return Said(MISSED)


def by_hooks(program: Program) -> Said:
    def look(path: str, module: nn.Module, given: Any, gave: Any) -> None:
        tensors = [t for t in tree_leaves((given, gave)) if isinstance(t, Tensor)]
        if not all(bool(t.isfinite().all()) for t in tensors):
            raise FloatingPointError(path)

    for path, module in program.model.named_modules():
        module.register_forward_hook(lambda module, args, gave, path=path: look(path, module, (), gave))
        module.register_full_backward_hook(partial(look, path))
    try:
        program.train()
    except FloatingPointError as error:
        return Said(RIGHT if str(error) == "plant" else PLACE, str(error))
    return Said(MISSED)


# -- what two runs say of a kernel, or an argument --------------------------------------------------------------------


def by_hashes(op: str, right: Callable[[], Any], wrong: Callable[[], Any]) -> Said:
    logs = []
    for run in (right, wrong):
        with DebugMode() as mode, DebugMode.log_tensor_hashes():
            run()
        logs.append(mode.logs)
    try:
        found = DebugMode.check_hash_mismatches(*logs)
    except ValueError as error:  # it compares runs of the same calls alone
        return Said(MISSED, str(error))
    if not found:
        return Said(MISSED)
    return Said(RIGHT if op in found[0]["call"] else PLACE, str(found[:2]))


def of_kernel(op: str, how: str) -> Said:
    """The run in fp32, where the kernel is right, is what there is to compare with."""
    program = planted(Between, wrong_kernels.OPS[op][1], BF16)
    with wrong_kernels.planted(op, how):
        return by_hashes(op, lambda: program.model(program.x), program.run)


def of_argument(pair: wrong_arguments.Pair) -> Said:
    right, wrong, x = pair.made()
    return by_hashes(pair.op, *(Program(model, x, pair.dtype).run for model in (right, wrong)))


def asked(peer: Callable[[Program], Said], program: Callable[[], Program], *kernel: str) -> Said:
    with wrong_kernels.planted(*kernel) if kernel else contextlib.nullcontext():
        return peer(program())


OF_VALUES = (("detect_anomaly", by_anomaly), ("hooks", by_hooks))
Row = tuple[str, str, str, Callable[[], Said]]


def trials() -> Iterator[Row]:
    """Peer, fault, kind of fault, and what asks."""
    for family, causes, table in (("values, forward", FORWARD, wrong_values.VALUES),
                                  ("values, backward", BACKWARD, wrong_values.BACKWARD)):  # fmt: skip
        for cause in causes:
            ops, plant = table[cause]
            backward = table is wrong_values.BACKWARD
            yield "Narrowcast", cause, family, partial(wrong_values.watched, Layers, plant, ops, backward, FP16)
            for name, peer in (("DebugMode", by_debug_mode), *OF_VALUES):
                yield name, cause, family, partial(asked, peer, partial(planted, Layers, plant, FP16))
    for kernel in KERNELS:
        yield "Narrowcast", " ".join(kernel), "kernels", partial(wrong_kernels.judged, *kernel, BF16)
        yield "DebugMode", " ".join(kernel), "kernels", partial(of_kernel, *kernel)
        program = partial(planted, Between, wrong_kernels.OPS[kernel[0]][1], BF16)
        for name, peer in OF_VALUES:
            yield name, " ".join(kernel), "kernels", partial(asked, peer, program, *kernel)
    pairs = {name: pair for name, _, pair in wrong_arguments.pairs()}
    for cause in ARGUMENTS:
        yield "Narrowcast", cause, "arguments", partial(wrong_arguments.compared_runs, pairs[cause])
        yield "DebugMode", cause, "arguments", partial(of_argument, pairs[cause])
        program = partial(planted, Between, wrong_arguments.ARGUMENTS[cause][2], BF16)
        for name, peer in OF_VALUES:
            yield name, cause, "arguments", partial(asked, peer, program)
