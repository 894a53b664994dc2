"""What ours adds: to entering a region, to an op in it, to an eager forward, to a compiled call. Bounds are reported,
not checked: a machine that is shared misses them by chance.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable

import subjects
import torch
from clock import Side, alternate, ratio, synchronize, told
from context import Context
from same import CUSTOM, quiet_dynamo

import narrowcast as nc

BF16 = torch.bfloat16
BOUNDS = {"nc native": 1.01, "nc custom": 1.10, "nc recording": 3.0}


def run(context: Context) -> None:
    """Regions and ops by the clock of the cpu, which launches them; forwards and compiled calls by events."""
    for part in (_regions, _ops, _forwards, _compiled_calls):
        with context.attempt(part.__name__.strip("_")):
            context.data[part.__name__.strip("_")] = part(context)
            context.check(part.__name__.strip("_").replace("_", " "))


def _microseconds(sides: dict[str, Callable[[], object]], calls: int, rounds: int, device: str) -> dict[str, float]:
    """Of one call, by the cpu's clock: what is launched is waited for between rounds only."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    shuffled = random.Random(0)
    for call in sides.values():
        call()
    for _ in range(rounds):
        for name in shuffled.sample(list(sides), len(sides)):
            synchronize(device)
            start = time.perf_counter()
            for _ in range(calls):
                sides[name]()
            times[name].append((time.perf_counter() - start) * 1e6 / calls)
    synchronize(device)
    return {name: round(statistics.median(found), 3) for name, found in times.items()}


def _regions(context: Context) -> dict[str, float]:
    device = context.device

    def entering(make: Callable[[], object]) -> Callable[[], None]:
        def call() -> None:
            with make():
                pass

        return call

    ours, custom = nc.autocast(device, BF16), nc.autocast(device, BF16, policy=CUSTOM)
    sides = {
        "torch.autocast": entering(lambda: torch.autocast(device, BF16)),
        "nc native": entering(lambda: nc.autocast(device, BF16)),
        "nc native, made before": entering(lambda: ours),
        "nc custom": entering(lambda: nc.autocast(device, BF16, policy=CUSTOM)),
        "nc custom, made before": entering(lambda: custom),
    }
    return _microseconds(sides, 200, 5 if context.small else 21, device)


def _ops(context: Context) -> dict[str, float]:
    """One mm of a cached weight; one relu, which the custom policy casts, and native does not know."""
    device = context.device
    x, weight = torch.randn(16, 16, device=device), torch.randn(16, 16, device=device, requires_grad=True)

    def inside(region: object, op: Callable[[], object], calls: int = 100) -> Callable[[], None]:
        def call() -> None:
            with region, torch.no_grad():
                for _ in range(calls):
                    op()

        return call

    regions = {
        "torch.autocast": torch.autocast(device, BF16), "nc native": nc.autocast(device, BF16),
        "nc custom": nc.autocast(device, BF16, policy=CUSTOM),
        "nc checked cache": nc.autocast(device, BF16, cache_enabled="checked"),
    }  # fmt: skip
    sides = {f"mm, {name}": inside(region, lambda: torch.mm(x, weight)) for name, region in regions.items()}
    sides |= {f"relu, {name}": inside(region, lambda: torch.relu(x)) for name, region in regions.items()}
    found = _microseconds(sides, 3, 5 if context.small else 21, device)
    return {name: round(us / 100, 3) for name, us in found.items()}


def _forwards(context: Context) -> dict[str, object]:
    device = context.device
    model, args = subjects.make("encoder", subjects.SMALL if context.small else subjects.MIDDLE, device)

    def inside(make: Callable[[], object]) -> Callable[[], object]:
        def call() -> object:
            with make():
                return model(*args)

        return call

    def recorded() -> object:
        with nc.record(), nc.autocast(device, BF16):
            return model(*args)

    sides = [
        Side("torch.autocast", inside(lambda: torch.autocast(device, BF16))),
        Side("torch.autocast, again", inside(lambda: torch.autocast(device, BF16))),
        Side("nc native", inside(lambda: nc.autocast(device, BF16))),
        Side("nc custom", inside(lambda: nc.autocast(device, BF16, policy=CUSTOM))),
        Side("nc recording", recorded),
    ]
    with torch.no_grad():
        alternate(sides, 5 if context.small else 31, device, 60)
    return {
        side.name: told(side) | {"over torch.autocast": ratio(side, sides[0]), "bound": BOUNDS.get(side.name)}
        for side in sides
    }


def _compiled_calls(context: Context) -> dict[str, object]:
    """A model so small that the call itself is what takes time."""
    device = context.device
    model, args = subjects.make("mlp", subjects.SMALL, device)
    with quiet_dynamo(), torch.no_grad():
        plain, ours = torch.compile(model), nc.compile(model, under=nc.autocast(device, BF16))

        def native() -> object:
            with torch.autocast(device, BF16):
                return plain(*args)

        sides = {
            "torch.compile, native": native,
            "nc.compile": lambda: ours(*args),
            "torch.compile, fp32": lambda: plain(*args),
        }
        for call in sides.values():
            call()
            call()
        return _microseconds(sides, 50, 5 if context.small else 21, device)
