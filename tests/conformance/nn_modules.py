"""Every module class of torch.nn in each front end, against eager code: outputs and gradients, in both modes.

    python tests/conformance/nn_modules.py [--only NAME ...] [--kinds compile ...]

The modules and inputs are those of PyTorch's own module database. Each runs in eager code in a region (bf16, native),
compiled (aot_eager), exported (forward), scripted, converted from a plain script, and traced in the region. What is not
the same is printed, unless torch gives something else, or raises, there without any region, too.
"""

from __future__ import annotations

import argparse
import collections
import sys
import warnings
from pathlib import Path

import torch
from torch.testing._internal.common_modules import module_db
from torch.utils import _pytree as pytree

import narrowcast as nc

sys.path.insert(0, str(Path(__file__).parent))
from front_ends import BF16, difference

AROUND = {"under": BF16}


def tensors(tree):
    return tuple(t for t in pytree.tree_leaves(tree) if isinstance(t, torch.Tensor))


def compiled(module, args, kwargs, around):
    torch._dynamo.reset()
    if around:
        return nc.compile(module, backend="aot_eager", **around), module
    return torch.compile(module, backend="aot_eager"), module


def exported(module, args, kwargs, around):
    made = nc.export(module, (args, kwargs), **around) if around else torch.export.export(module, args, kwargs)
    return made.module(), None


def scripted(module, args, kwargs, around):
    made = nc.script(module, **around) if around else torch.jit.script(module)
    return made, made


def converted(module, args, kwargs, around):
    made = torch.jit.script(module)
    made = nc.script(made, **around) if around else made
    return made, made


def traced(module, args, kwargs, around):
    if kwargs or not all(isinstance(a, torch.Tensor) for a in args):
        raise NotImplementedError("a trace takes tensors")
    made = nc.trace(module, args, check_trace=False, **around) if around else torch.jit.trace(module, args)
    return made, made


KINDS = {"compile": compiled, "export": exported, "script": scripted, "convert": converted, "trace": traced}


def run(call, module, args, kwargs):
    """Results, and gradients of parameters and inputs."""
    torch.manual_seed(0)
    fresh = [a.detach().clone().requires_grad_(a.is_floating_point()) if torch.is_tensor(a) else a for a in args]
    results = tensors(call(*fresh, **kwargs))
    if module is None:
        return list(results)
    floating = [r for r in results if r.requires_grad]
    if floating:
        sum(r.float().square().sum() for r in floating).backward()
    found = [*results, *(t.grad for t in fresh if torch.is_tensor(t)), *(p.grad for p in module.parameters())]
    module.zero_grad()
    return [t for t in found if t is not None]


def cases(only):
    """Modules with the arguments of a call, in both modes."""
    for info in module_db:
        if only and info.name not in only:
            continue
        for training in (True, False):
            try:
                inputs = info.module_inputs_func(
                    info, device="cpu", dtype=torch.float32, requires_grad=False, training=training
                )
            except Exception:
                continue
            for number, found in enumerate(inputs[:6]):
                made = found.constructor_input
                torch.manual_seed(0)
                try:
                    module = info.module_cls(*made.args, **made.kwargs).train(training)
                except Exception:
                    continue
                given = found.forward_input
                yield f"{info.name}[{number}]{'' if training else ' eval'}", module, given.args, given.kwargs


def main() -> int:
    """Run all; 0 if nothing differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=list(KINDS))
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    counts = collections.Counter()
    for name, module, args, kwargs in cases(chosen.only):
        for kind in chosen.kinds:
            try:
                reference = None if kind == "export" else module
                with nc.autocast("cpu", BF16):
                    expected = run(module, reference, args, kwargs)
            except Exception:
                counts["raises in eager code"] += 1
                break
            counts[kind] += 1
            what = compare(kind, module, args, kwargs, AROUND, expected)
            if what and torchs_own(kind, module, args, kwargs):
                counts["torch"] += 1
            elif what:
                counts["different"] += 1
                print(f"{kind} {name}: {what}", flush=True)
    print(", ".join(f"{kind}: {count}" for kind, count in counts.items()))
    return int(counts["different"] > 0)


def compare(kind, module, args, kwargs, around, expected):
    """What differs from eager code, or raises."""
    try:
        made, owner = KINDS[kind](module, args, kwargs, around)
        return difference(expected, run(made, owner, args, kwargs))
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[-1:]}"[:160]


def torchs_own(kind, module, args, kwargs):
    """Whether torch alone differs, or raises, without a region."""
    reference = None if kind == "export" else module
    try:
        expected = run(module, reference, args, kwargs)
    except Exception:
        return True
    return bool(compare(kind, module, args, kwargs, {}, expected))


if __name__ == "__main__":
    sys.exit(main())
