"""OpInfo through the other front ends: each op compiled, exported, scripted and converted, against eager code.

    python tests/conformance/front_ends.py [--samples N] [--ops NAME ...] [--kinds compile ...] [--dtype bfloat16]

Each sample input is run in eager code in a region (bf16, the policy native) and in each front end in the same region:
`compile` (aot_eager), `export`, `convert` (of a plain torch.jit.trace), `script` (one that calls the trace in a
region), `trace` (nc.trace in the region). The dtypes and bits must be the same. What differs is printed one by one,
unless torch gives something else, or raises, there without any region, too; differences that docs/limits.md explains
are in `KNOWN`. Both are counted.
"""

from __future__ import annotations

import argparse
import collections
import sys
import warnings

import torch
from torch import nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

import narrowcast as nc

BF16 = torch.bfloat16
KINDS = ("compile", "export", "convert", "script", "trace")
# Ops that draw random numbers, or give memory as it is.
NOT_REPEATABLE = (
    "rand", "dropout", "multinomial", "bernoulli", "normal", "empty", "cauchy", "exponential", "geometric", "uniform",
    "rrelu", "resize", "poisson", "log_normal", "linalg.lstsq", "svd_lowrank", "pca_lowrank",
)  # fmt: skip
CLOSED = "its kernel calls ops that a script does not see; a warning says so (docs/limits.md)"
CLOSED_OPS = ("linalg.pinv", "nn.functional.bilinear", "nn.functional.linear_cross_entropy")
SCALED = "on the cpu its kernel calls a product that eager autocast casts; a warning says so (docs/limits.md)"
SCALED_OPS = ("torch._scaled_mm", "torch._scaled_mm_v2")
KNOWN: dict[str, dict[str, str]] = {
    "compile": dict.fromkeys(SCALED_OPS, SCALED),
    "export": dict.fromkeys(SCALED_OPS, SCALED) | {"tensor_split": "its places are a tensor (docs/limits.md)"},
    **{kind: dict.fromkeys((*CLOSED_OPS, *SCALED_OPS), CLOSED) for kind in ("convert", "script", "trace")},
}
"""By front end, by op: why it differs."""


class Calls(nn.Module):
    """A script that calls a trace in a region."""

    def __init__(self, trace):
        super().__init__()
        self.trace = trace

    def forward(self, tensors: list[torch.Tensor]):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.trace(tensors)


class Op(nn.Module):
    """A sample of an op as a function of its tensors."""

    def __init__(self, op, sample):
        super().__init__()
        self.op = op
        leaves, self.structure = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
        self.leaves = tuple(leaves)
        self.tensors = [leaf.detach().clone() for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def forward(self, *tensors):
        given = iter(tensors)
        leaves = [next(given) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves]
        first, args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        return tuple(t for t in pytree.tree_leaves(self.op(first, *args, **kwargs)) if isinstance(t, torch.Tensor))

    def inputs(self):
        """New copies of the tensors, before the same random numbers."""
        torch.manual_seed(0)
        return tuple(tensor.clone() for tensor in self.tensors)


def compiled(op):
    torch._dynamo.reset()
    return nc.compile(op, under=nc.autocast("cpu", BF16), backend="aot_eager")(*op.inputs())


def exported(op):
    return nc.export(op, op.inputs(), under=nc.autocast("cpu", BF16)).module()(*op.inputs())


def plain_trace(op):
    return torch.jit.trace(lambda *tensors: op(*tensors), op.inputs(), check_trace=False)


def converted(op):
    return nc.script(plain_trace(op), under=BF16)(*op.inputs())


def scripted(op):
    traced = torch.jit.trace(lambda tensors: op(*tensors), (list(op.inputs()),), check_trace=False)
    return nc.script(Calls(traced))(list(op.inputs()))


def traced(op):
    made = nc.trace(lambda *tensors: op(*tensors), op.inputs(), under=nc.autocast("cpu", BF16), check_trace=False)
    return made(*op.inputs())


def without_region(kind, op):
    """The same form of torch alone, without a region; nothing where eager code gives the same."""
    try:
        expected = op(*op.inputs())
        if kind == "compile":
            torch._dynamo.reset()
            found = torch.compile(op, backend="aot_eager")(*op.inputs())
        elif kind == "export":
            found = torch.export.export(op, op.inputs()).run_decompositions({}).module()(*op.inputs())
        else:
            found = plain_trace(op)(*op.inputs())
    except Exception:
        return "raises"
    return difference(expected, found)


RUNS = dict(zip(KINDS, (compiled, exported, converted, scripted, traced), strict=True))


def difference(expected, found) -> str:
    """What differs in dtype, shape or bits; empty if nothing does."""
    if len(expected) != len(found):
        return f"{len(expected)} results against {len(found)}"
    for a, b in zip(expected, found, strict=True):
        if a.dtype is not b.dtype:
            return f"{a.dtype} against {b.dtype}"
        if a.shape != b.shape:
            return f"{tuple(a.shape)} against {tuple(b.shape)}"
        if a.layout is torch.strided and not a.is_quantized and not torch.equal(bits(a), bits(b)):
            return f"bits of {a.dtype}"
    return ""


def bits(tensor):
    """The bits of a tensor, all NaNs alike."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if not tensor.is_floating_point():
        return tensor
    return torch.where(tensor.isnan(), torch.full_like(tensor, float("nan")), tensor).reshape(-1).view(torch.uint8)


def samples_of(op, count, dtype):
    """The first samples of an op that run in eager code in the region, with what they give."""
    try:
        found = [s for _, s in zip(range(count), op.sample_inputs("cpu", torch.float32), strict=False)]
    except Exception:  # some need packages that are not here
        return
    for sample in found:
        made = Op(op.op, sample)
        made.tensors = [t.to(dtype) if t.dtype is torch.float32 else t for t in made.tensors]
        if not made.tensors:
            continue
        try:
            with nc.autocast("cpu", BF16):
                expected = made(*made.inputs())
        except Exception:
            continue
        yield made, expected


def sweep(kinds, ops, count, shard=(0, 1), dtype=torch.float32):
    """Prints what differs; the numbers of samples, of known and of unknown differences."""
    counts = collections.Counter()
    for number, op in enumerate(op_db):
        name = f"{op.name}.{op.variant_test_name}".strip(".")
        wanted = not ops or op.name in ops
        if number % shard[1] != shard[0] or not wanted or any(word in op.name for word in NOT_REPEATABLE):
            continue
        for made, expected in samples_of(op, count, dtype):
            for kind in kinds:
                counts[kind] += 1
                try:
                    what = difference(expected, RUNS[kind](made))
                except Exception as error:
                    what = f"{type(error).__name__}: {str(error).strip().splitlines()[-1:]}"[:160]
                if what:
                    known = op.name in KNOWN.get(kind, {})
                    counts[why := "known" if known else "torch" if without_region(kind, made) else "different"] += 1
                    if why == "different":
                        print(f"{kind} {name}: {what}", flush=True)
    return counts


def main() -> int:
    """Run the sweep; 0 if nothing unknown differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--ops", nargs="*", default=[])
    parser.add_argument("--kinds", nargs="*", default=KINDS, choices=KINDS)
    parser.add_argument("--shard", default="0/1")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    sys.setrecursionlimit(5000)
    number, of = map(int, chosen.shard.split("/"))
    counts = sweep(chosen.kinds, chosen.ops, chosen.samples, (number, of), getattr(torch, chosen.dtype))
    print(", ".join(f"{kind}: {count}" for kind, count in counts.items()))
    return int(counts["different"] > 0)


if __name__ == "__main__":
    sys.exit(main())
