"""What an optimizer loses by the formats of its weights and states, asked of what it does: weights and states of a few
elements, beside the same in fp32.

Judged by what moves, never by the optimizer's class: stochastic rounding, a compensation (Kahan) and masters move on
average, or over many steps, as weights in fp32 do.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from narrowcast.training.storage.masters import units_of
from narrowcast.training.storage.store import slot_of
from narrowcast.training.storage.twins import Settings, Twin, part_of_parameter

_RATES = ("lr", "initial_lr", "max_lr", "min_lr", "foreach", "fused", "capturable")
"""Settings that say nothing of how formats are kept."""
_STEPS, _PART, _FITS = 192, 1 / 16, (1 / 64, 1 / 3)
"""How many steps are made of a part of a unit in the last place each, so that they add up to many units; within which
bounds that part has to be.
"""
_FOLLOWS, _FAR, _ALIKE, _LARGER = 0.5, 2.0, 0.1, 256.0
"""What has moved by this part of what fp32 has is not lost; what has by more than the next says nothing. Updates are
the same within this where gradients are larger by that factor.
"""
_WARM, _IDLE, _DECAYS = 16, 512, 0.03
"""Steps with gradients, and without; a state that falls by this part in fp32 decays."""


@dataclass(slots=True)
class ProbedStates:
    """What a probe of the weights of one group and format found.

    update: the size of an update of an element, the median; None where it depends on gradients that are not there.
    keeps_updates: whether updates below half a unit add up. still: names of states that decay in fp32 and do not as
    they are kept. rounded: names of states that `load_state_dict` rounds, with both formats. state_bytes: of all
    states, for an element; None of what is no plain tensor. lost: where updates depend on gradients, the share of them
    that each parameter loses, by identity.
    """

    update: float | None = None
    keeps_updates: bool | None = None
    still: list[str] = field(default_factory=list)
    rounded: dict[str, tuple[torch.dtype, torch.dtype]] = field(default_factory=dict)
    state_bytes: float | None = None
    lost: dict[int, float] = field(default_factory=dict)


_Make = Callable[[Sequence[torch.Tensor]], Twin]
"""What makes a twin of weights: as they are kept, or in fp32."""


class Probes:
    """Probes of the groups of one optimizer. Groups whose settings are the same but for the learning rate are asked
    once for what does not depend on it.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._known: dict[Any, ProbedStates] = {}

    def of(self, settings: Settings, parameters: Sequence[torch.Tensor]) -> ProbedStates:
        """Probe some parameters of one group and format. Raises what the optimizer's class raises."""
        largest = max(parameters, key=lambda one: one.numel())
        weight, slot = part_of_parameter(largest), slot_of(self._optimizer, largest)
        wide = partial(Twin, self._optimizer, settings)
        own = partial(wide, as_stored=slot)
        found, drawn, gradient = ProbedStates(), _drawn(weight), None
        found.update = _update_of_any(wide, weight)
        if found.update is None:
            given = {id(one): (one, g) for one in parameters if (g := _gradient_of(one)) is not None}
            if given:
                gradient = max((g for _, g in given.values()), key=lambda one: one.numel())
                found.update, found.lost = _updates_of_these(wide, given)
        others = {name: value for name, value in settings.items() if name not in _RATES}
        key = repr(others), slot and slot.kept, weight.dtype, weight.dim(), bool(found.update), gradient is None
        known = self._known.get(key)
        if known is not None:
            return replace(known, update=found.update, lost=found.lost)
        if found.update and weight.dtype is not torch.float32:
            push = 1.0 if gradient is None else float(gradient[gradient != 0].abs().mean())
            found.keeps_updates = _keeps_updates(own, wide, drawn.to(weight.dtype), found.update, push)
        found.still = _still(own, wide, weight, drawn)
        found.rounded, found.state_bytes = _rounded(own, weight, drawn)
        self._known[key] = found
        return found


def _drawn(weight: torch.Tensor) -> torch.Tensor:
    """Return gradients about 1, none of them near zero, the same ones each time."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    drawn = torch.randn(weight.shape, generator=generator, device="cpu", dtype=torch.float32)
    return (drawn.sign() * (drawn.abs() + 0.5)).to(weight.device)


def _gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient that is there, of the same elements; None without one that says something."""
    gradient = parameter.grad
    if gradient is None or gradient.is_sparse or not bool(gradient.isfinite().all()) or not bool(gradient.any()):
        return None
    return part_of_parameter(gradient).float() if gradient.shape == parameter.shape else None


def _update_of_any(wide: _Make, weight: torch.Tensor) -> float | None:
    """Return the median size of an update in fp32, if the size of gradients does not matter."""
    drawn, sizes = _drawn(weight), []
    for one in (drawn, drawn * _LARGER):
        twin = wide([weight.float()])
        twin.step([one], _WARM)
        before = twin.values()
        twin.step([one])
        sizes.append(float((twin.values() - before).abs().median()))
    return sizes[0] if math.isclose(sizes[0], sizes[1], rel_tol=_ALIKE) else None


def _updates_of_these(
    wide: _Make, given: Mapping[int, tuple[torch.Tensor, torch.Tensor]]
) -> tuple[float, dict[int, float]]:
    """Return the median size of the updates that gradients make in fp32, and which share of them each parameter's
    format loses; given: parameters and their gradients, by identity.
    """
    weights = [part_of_parameter(one) for one, _ in given.values()]
    gradients = [gradient for _, gradient in given.values()]
    twin = wide([weight.float() for weight in weights])
    twin.step(gradients, _WARM)
    before = [weight.detach().clone() for weight in twin.weights]
    twin.step(gradients)
    moved = [(now.detach() - then).abs() for now, then in zip(twin.weights, before, strict=True)]
    lost = {}
    for key, weight, by in zip(given, weights, moved, strict=True):
        if bool(by.any()):
            lost[key] = float((by < units_of(weight) / 2)[by != 0].float().mean())
    sizes = torch.cat([by[by != 0].flatten().cpu() for by in moved])
    return float(sizes.median()) if sizes.numel() else 0.0, lost


def _keeps_updates(own: _Make, wide: _Make, drawn: torch.Tensor, update: float, push: float) -> bool | None:
    """Return whether many updates of a part of a unit move weights as they do in fp32. The weights are chosen for
    that, all within one power of two; None where the updates of such weights are others. drawn: in the weights' shape
    and format; push: the size of gradients.
    """
    eps, dtype = torch.finfo(drawn.dtype).eps, drawn.dtype
    drawn = drawn.float()
    pushes = drawn.sign() * push
    exponent = round(math.log2(update / _PART / eps))
    for _ in range(2):
        unit = eps * 2.0**exponent
        start = (drawn.sign() * (1.25 + 0.5 * drawn.abs() / drawn.abs().max()) * 2.0**exponent).to(dtype)
        low, beside = own([start]), wide([start.float()])
        beside.step([pushes], _STEPS)
        moved = beside.values() - start.double().flatten()
        part = float(moved.abs().median()) / _STEPS / unit
        if _FITS[0] < part < _FITS[1]:
            break
        if not part or not math.isfinite(part):
            return None
        exponent += round(math.log2(part / _PART))
    else:
        return None
    low.step([pushes], _STEPS)
    follows = float(((low.values() - start.double().flatten()) * moved).sum() / moved.square().sum())
    return follows > _FOLLOWS if follows < _FAR else None  # NaN is neither


def _still(own: _Make, wide: _Make, weight: torch.Tensor, drawn: torch.Tensor) -> list[str]:
    """Return the names of the states that fall without gradients in fp32, and not as they are kept."""
    falls: list[dict[str, float]] = []
    nothing = torch.zeros_like(drawn)
    for twin in (own([weight]), wide([weight.float()])):
        twin.step([drawn], _WARM)
        before = _norms(twin.states())
        twin.step([nothing], _IDLE)
        after = _norms(twin.states())
        falls.append({name: 1 - after[name] / size for name, size in before.items() if size and name in after})
    kept, in_fp32 = falls
    return [name for name, fall in kept.items() if in_fp32.get(name, 0.0) > _DECAYS and fall < in_fp32[name] / 3]


def _norms(states: Mapping[tuple[int, str], torch.Tensor]) -> dict[str, float]:
    floats = {name: value for (_, name), value in states.items() if _is_plain(value) and value.dim()}
    return {name: float(value.detach().double().norm()) for name, value in floats.items()}


def _is_plain(value: torch.Tensor) -> bool:
    """Return whether a state is numbers of one format: blocks with scales are what a library makes of them."""
    return type(value) is torch.Tensor and value.is_floating_point()


def _rounded(
    own: _Make, weight: torch.Tensor, drawn: torch.Tensor
) -> tuple[dict[str, tuple[torch.dtype, torch.dtype]], float | None]:
    """Return the states that are others after they were saved and loaded, with their formats before and after; and how
    many bytes of state an element has.
    """
    twin = own([weight])
    twin.step([drawn], _WARM)
    other = own([twin.weights[0].detach()])
    other.optimizer.load_state_dict(copy.deepcopy(twin.optimizer.state_dict()))
    before, after = twin.states(), other.states()
    found = {
        name: (value.dtype, after[key].dtype)
        for key, value in before.items()
        if (name := key[1]) and key in after and not _is_equal(value, after[key])
    }
    are_plain = all(type(value) is torch.Tensor for value in before.values())
    size = sum(value.nbytes for value in before.values() if value.dim())
    return found, size / weight.numel() if are_plain else None


def _is_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two states are the same numbers, in whichever formats; also of what a library makes of them."""
    if type(a) is not torch.Tensor or type(b) is not torch.Tensor:
        return True
    return a.shape == b.shape and bool((a.double() == b.double()).all())
