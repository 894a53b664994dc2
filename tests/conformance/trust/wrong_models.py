"""Two runs of which one is of a wrong model; `nc.diff` must name the module.

Models of transformers have a fault in a module that is drawn (what it gives, its weight, its epsilon); decoders, a
wrong cache, mask, norm or head.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import published
import torch
from planting import Fault
from program import MISSED, PLACE, RIGHT, Said
from torch import Tensor, nn

import narrowcast as nc

sys.path.insert(0, str(Path(__file__).parents[2] / "analysis"))
import pairs_of_runs

ON_OUTPUT: dict[str, Callable[[Tensor], Tensor]] = {
    "scaled": lambda y: y * 1.2, "shifted": lambda y: y + 0.3 * y.std(), "rolled": lambda y: y.roll(1, 1),
}  # fmt: skip
CAN: dict[str, Callable[[nn.Module], bool]] = {
    "weights": lambda m: getattr(m, "weight", None) is not None, "epsilon": lambda m: hasattr(m, "eps"),
    **dict.fromkeys(ON_OUTPUT, lambda m: True),
}  # fmt: skip


def judged(pair: Any, where: str) -> Said:
    """Among the first calls that differ, or that only one run has."""
    found = nc.diff(*pair())
    named = [str(row.b[0]) for row in found.producers[:1]] + [str(one.id) for one in found.alone[:5]]
    if found.verdict != "values differ" or not named:
        return Said(MISSED, f"wanted {where}:\n{found}")
    return Said(RIGHT) if any(where in name for name in named) else Said(PLACE, f"wanted {where}:\n{found}")


def plant(module: nn.Module, fault: str) -> None:
    if fault in ON_OUTPUT:
        of = lambda y: ON_OUTPUT[fault](y) if isinstance(y, Tensor) and y.is_floating_point() else y
        module.register_forward_hook(lambda m, args, y: tuple(map(of, y)) if isinstance(y, tuple) else of(y))
    elif fault == "epsilon":
        module.eps = 0.1
    else:
        more = torch.randn(module.weight.shape, generator=torch.Generator().manual_seed(2), device="cpu")
        module.weight.data += 0.3 * module.weight.std().clamp(min=0.3) * more.to(module.weight)


@torch.no_grad()
def drawn(stem: str, formats: str, seed: int) -> tuple[Any, Any, str, bool]:
    """Two runs, the path of the module that is wrong in the second, and whether that moves the output beyond round-off.

    Only modules that are called, whose weights no other has: else the first call that differs is another's.
    """
    torch.manual_seed(0)
    made, draw = published.of_transformers(stem), random.Random(f"{stem} {formats} {seed}")
    called: set[nn.Module] = set()
    hooks = [m.register_forward_hook(lambda m, *_: called.add(m)) for m in made.model.modules()]
    right = made.model(*made.args)
    for hook in hooks:
        hook.remove()
    leaves = [(path, m) for path, m in made.model.named_modules() if m in called and not list(m.children())]
    shared = Counter(id(getattr(m, "weight", m)) for _, m in leaves)
    leaves = [(path, m) for path, m in leaves if shared[id(getattr(m, "weight", m))] == 1]
    leaves = [(path, m) for path, m in leaves if not isinstance(m, nn.Dropout | nn.Identity)]
    fault = draw.choice([fault for fault, can in CAN.items() if any(can(m) for _, m in leaves)])
    path, module = draw.choice([(path, m) for path, m in leaves if CAN[fault](m)])
    first, _, second = formats.rpartition(" and ")
    dtypes = [None if format == "fp32" else format for format in (first or second, second)]
    a = nc.capture(made.model, made.args, under=dtypes[0])
    plant(module, fault)
    b = nc.capture(made.model, made.args, under=dtypes[1])
    moved = (made.model(*made.args) - right).norm() / right.norm()
    return a, b, f"{path} ", bool(moved > (1e-4 if dtypes[0] == dtypes[1] else 0.02))


def of_drawn(stem: str, formats: str, seed: int) -> Said:
    a, b, where, _ = drawn(stem, formats, seed)
    return judged(lambda: (a, b), where)


def faults(seed: int) -> Iterator[Fault]:
    for name, (pair, where) in pairs_of_runs.FAULTS.items():
        yield Fault(name, name, "diff, models", partial(judged, pair, where), lambda: True)
    for stem in published.HERE:
        for formats in ("fp32", "bf16", "fp32 and bf16"):
            of = stem, formats, seed
            yield Fault(f"{stem}, {formats}, {seed}", f"a module of {stem}, {seed}", "diff, models",
                        partial(of_drawn, *of), lambda of=of: drawn(*of)[3])  # fmt: skip
