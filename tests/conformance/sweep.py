"""The OpInfo sweep: every op of torch's op_db under native autocast and under ours, same dtypes and same bits.

    python tests/conformance/sweep.py [--samples N] [--ops NAME ...] [--json FILE]

Each sample input is run in fp32, bf16, fp16 and mixed (fp32 and bf16 in turn, then bf16 and fp16), under five regions:

    native     torch.autocast
    ours       nc.autocast under the policy native
    mirror     nc.autocast under native's rules carried out by our own kernels, torch's never called
    recorded   native, with a recording: each cast that `decide` plans must be seen, and no other
    passing    native, with kernels of ours on every op, which must pass every call on as if they were not there

and compared with the first: the same exception type or the same dtypes and bits. Differences are printed one by one.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from dataclasses import dataclass, field, replace

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import narrowcast as nc
from narrowcast.frontends.eager.registered import install_visiting, remove_visiting
from narrowcast.runtime.torch_bridge import ops_in

DTYPES = {
    "fp32": (torch.float32, torch.float32),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "fp16": (torch.float16, torch.float16),
    "mixed fp32/bf16": (torch.float32, torch.bfloat16),
    "mixed bf16/fp16": (torch.bfloat16, torch.float16),
}
# Results that differ from run to run, with autocast or without: uninitialised memory, or LAPACK's gelsy. Of these
# the dtypes are compared, not the bits.
NOT_REPEATABLE = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided",
                  "resize_", "resize_as_", "linalg.lstsq"}  # fmt: skip


def mirror() -> nc.Policy:
    """Native's rules, marked so that they are not taken for native's own: our kernels carry them out."""
    native = nc.Policy.native("cpu")
    return nc.Policy("mirror", (tuple(replace(rule, override=True) for rule in native.rules),), extends=("nothing",))


@dataclass
class Counts:
    """What a sweep saw."""

    ops: set[str] = field(default_factory=set)
    samples: int = 0
    raised: int = 0
    differences: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)


def cast_tree(tree, pair):
    """The tree with its floating tensors cast to the two dtypes in turn."""
    position = 0

    def one(value):
        nonlocal position
        if not torch.is_tensor(value) or not value.is_floating_point() or value.dtype is torch.float64:
            return value
        position += 1
        return value.detach().to(pair[(position - 1) % 2])

    return pytree.tree_map(one, tree)


def clone_tree(tree):
    return pytree.tree_map(lambda v: v.clone() if torch.is_tensor(v) else v, tree)


def run(op, inputs, region):
    """The result of the op on a copy of its inputs, or the exception."""
    args, kwargs = clone_tree(inputs)
    torch.manual_seed(0)
    try:
        with region:
            return op(*args, **kwargs)
    except Exception as error:
        return error


class DoNothing(TorchDispatchMode):
    """A dispatch mode that only passes on."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def run_in_mode(op, inputs, low):
    """Native autocast under a dispatch mode: torch itself then takes other paths in a few composite ops."""
    with DoNothing():
        return run(op, inputs, torch.autocast("cpu", low))


def same(a, b, bits_too=True) -> str:
    """Empty if the results have the same dtypes and bits; else what differs."""
    if isinstance(a, Exception) or isinstance(b, Exception):
        if isinstance(a, Exception) and isinstance(b, Exception):
            return "" if isinstance(b, type(a)) else f"{type(a).__name__} against {type(b).__name__}"
        return f"{_short(a)} against {_short(b)}"
    left, right = pytree.tree_leaves(a), pytree.tree_leaves(b)
    if len(left) != len(right):
        return f"{len(left)} results against {len(right)}"
    for x, y in zip(left, right, strict=True):
        if not torch.is_tensor(x):
            if x != y and x == x:
                return f"{x} against {y}"
            continue
        if x.dtype is not y.dtype:
            return f"{x.dtype} against {y.dtype}"
        if x.shape != y.shape:
            return f"shape {tuple(x.shape)} against {tuple(y.shape)}"
        if bits_too and x.layout is torch.strided and not x.is_quantized and not torch.equal(bits(x), bits(y)):
            return "bits differ"
    return ""


def bits(x):
    """The tensor as integers; every NaN is one NaN."""
    x = x.detach().resolve_conj().resolve_neg()
    if x.is_complex():
        x = torch.view_as_real(x)
    if not x.is_floating_point():
        return x
    x = x.contiguous()
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return torch.where(torch.isnan(x), torch.full_like(x, torch.nan), x).view(kinds[x.element_size()])


def _short(value):
    return f"{type(value).__name__}: {str(value)[:80]}" if isinstance(value, Exception) else "a result"


def sweep(ops, samples_per_op: int | None, counts: Counts, low=torch.bfloat16) -> Counts:
    """Run the ops' samples in all dtypes and regions and collect the differences."""
    policy = mirror()
    everything = ops_in("aten")
    regions = {
        "ours": lambda: nc.autocast("cpu", low),
        "mirror": lambda: nc.autocast("cpu", low, policy=policy),
    }
    for info in ops:
        name = info.formatted_name
        repeatable = info.name not in NOT_REPEATABLE
        try:
            found = list(info.sample_inputs("cpu", torch.float32, requires_grad=False))[:samples_per_op]
        except Exception as error:
            counts.skipped.append(f"{name}: no fp32 samples on cpu ({type(error).__name__})")
            continue
        counts.ops.add(name)
        references = []
        for number, sample in enumerate(found):
            for label, pair in DTYPES.items():
                inputs = cast_tree(((sample.input, *sample.args), sample.kwargs), pair)
                counts.samples += 1
                reference = run(info.op, inputs, torch.autocast("cpu", low))
                counts.raised += isinstance(reference, Exception)
                references.append((number, label, inputs, reference))
                for region, make in regions.items():
                    difference = same(reference, run(info.op, inputs, make()), repeatable)
                    if difference:
                        counts.differences.append(f"{name} sample {number} {label} {region}: {difference}")
                with nc.record() as ledger:
                    result = run(info.op, inputs, torch.autocast("cpu", low))
                difference = same(reference, result, repeatable)
                if difference and same(reference, run_in_mode(info.op, inputs, low)):
                    counts.skipped.append(f"{name} sample {number} {label}: differs under any dispatch mode of torch")
                elif difference:
                    counts.differences.append(f"{name} sample {number} {label} recorded: {difference}")
                for cast in ledger.casts:
                    if cast.how != "copied" and not isinstance(result, Exception):
                        row = f"{cast.op} {cast.argument} {cast.src} -> {cast.dst} was planned and not seen"
                        counts.differences.append(f"{name} sample {number} {label} decide: {row}")
        install_visiting(everything, "cpu")
        try:
            for number, label, inputs, reference in references:
                difference = same(reference, run(info.op, inputs, torch.autocast("cpu", low)), repeatable)
                if difference:
                    counts.differences.append(f"{name} sample {number} {label} passing: {difference}")
        finally:
            remove_visiting("cpu")
    return counts


def main() -> int:
    """Run the sweep from the command line; exit code 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=None, help="samples per op (default: all)")
    parser.add_argument("--ops", nargs="*", help="only ops whose name starts with one of these")
    parser.add_argument("--part", default="0/1", help="K/N: every N-th op from K on, to run parts side by side")
    parser.add_argument("--json", help="write the counts there")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    part, parts = map(int, options.part.split("/"))
    chosen = [i for i in op_db if not options.ops or i.formatted_name.startswith(tuple(options.ops))][part::parts]
    start = time.time()
    counts = Counts()
    for low in (torch.bfloat16, torch.float16):
        sweep(chosen, options.samples, counts, low)
    for line in counts.differences:
        print("DIFFERS", line)
    print(
        f"torch {torch.__version__}: {len(counts.ops)} ops, {counts.samples} samples x 5 regions, "
        f"{counts.raised} samples that native refuses or the op rejects, {len(counts.differences)} differences, "
        f"{len(counts.skipped)} skipped, {time.time() - start:.0f} s"
    )
    if options.json:
        data = {"torch": torch.__version__, "ops": len(counts.ops), "samples": counts.samples, "raised": counts.raised,
                "differences": counts.differences, "skipped": counts.skipped}  # fmt: skip
        with open(options.json, "w", encoding="utf-8") as stream:  # noqa: PTH123
            json.dump(data, stream, indent=1)
    return 1 if counts.differences else 0


if __name__ == "__main__":
    sys.exit(main())
