"""Follows the loss scale: to which power of it each value is proportional, and what mixes scaled and unscaled values.
The power of a result is measured: the op is run again with its scaled arguments multiplied by another scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from narrowcast.core.ops.facts import named
from narrowcast.core.policy import NOWHERE, Site
from narrowcast.observation.restore.process import written
from narrowcast.observation.statistics.by_storage import ByStorage, has_storage
from narrowcast.observation.trial.rerun import run_wide
from narrowcast.runtime.torch_bridge import OpFacts, is_random, tensors_in
from narrowcast.runtime.torch_surface import dispatch
from narrowcast.runtime.torch_surface.autograd import next_sequence_number
from narrowcast.runtime.torch_surface.dispatch import quietly
from narrowcast.training.check.kept import KeptMemory

_EXACT = 1e-9
"""How far apart results in fp64 may lie, relative to their largest element, and still be proportional."""
_EPSILON = 1e-4
"""Up to here, a term that is added to scaled values only prevents a division by zero."""
_FAR = 2.0**20
"""The factor of a scale that shows a limit which is not reached yet."""
_WRITTEN, _TINY = (1e-3, 1e3), 1e-5
"""Numbers of two digits in between are factors in a loss, and those up to the second only prevent a division by zero:
neither is a scale.
"""
MIXES, LIMITS, HIDES, ASKS = "mixes", "limits", "hides", "asks"


@dataclass(frozen=True, slots=True)
class Power:
    """The power of the loss scale in a value. power: None if unknown; site: the line that made the value, none in a
    backward. does: what `op` does at that line: it MIXES, in a sum, scaled and unscaled values; it LIMITS gradients, so
    that they no longer grow with the scale; it HIDES from a scaler that some are not finite; it ASKS whether they are
    finite. of_gradients: and not of the loss that is scaled. is_kept: unknown, as the value is kept from before the
    steps.
    """

    power: float | None
    site: Site = NOWHERE
    op: str = ""
    does: str = ""
    of_gradients: bool = False
    is_kept: bool = False

    @property
    def is_mixed(self) -> bool:
        """Whether the value is a sum of scaled and unscaled values."""
        return self.does == MIXES

    @property
    def is_gradient(self) -> bool:
        """Whether the value is computed from gradients, and grows or falls with the scale."""
        return self.of_gradients and bool(self.power)


PLAIN, UNKNOWN, KEPT = Power(0.0), Power(None), Power(None, is_kept=True)


class Powers:
    """Which values are multiplied by a scale, outside of backwards. mixed: the autograd nodes of losses, or parts of
    them, that are computed from scaled gradients and unscaled values.
    """

    def __init__(self, kept: KeptMemory) -> None:
        self._kept = kept
        self._values: ByStorage[Power] = ByStorage()
        self._read: set[float] = set()  # the scales that the host has read
        self.met: set[float] = set()  # those that losses were multiplied by
        self._has_read = False  # the host knows numbers that a scale, or what is scaled, went into
        self._begun_with = kept.scales()  # scales at the step's start; later ones may be read unseen
        self._weights: set[int] | None = None
        self.mixed: dict[int, Power] = {}

    # -- what is known -------------------------------------------------------------------------------------------------

    def of(self, tensor: torch.Tensor) -> Power:
        """Return the power of a tensor."""
        if not has_storage(tensor):
            return UNKNOWN
        if dispatch.storage_key(tensor) in self._kept.scales():
            return Power(1.0)
        if self.is_weight(tensor):
            return PLAIN
        known = self._values.get(tensor)
        if known is None and tensor.requires_grad:
            return PLAIN
        if known is None and self._kept.was_there(tensor):
            return KEPT
        return known or (UNKNOWN if self._has_read and tensor.numel() == 1 else PLAIN)  # made of a number, perhaps

    @property
    def has_scales(self) -> bool:
        """Whether there is a scaler."""
        return bool(self._kept.scales())

    def is_weight(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor shares the memory of a model's weight."""
        if self._weights is None:
            self._weights = set(self._kept.names())
        return dispatch.storage_key(tensor) in self._weights

    def put(self, tensor: torch.Tensor, power: Power, is_new: bool = False) -> None:
        """Record the power of the memory of a tensor: unknown if that is only a part of memory that is not new."""
        if has_storage(tensor):
            is_all = is_new or tensor.numel() * tensor.itemsize == tensor.untyped_storage().nbytes()
            self._values.put(tensor, power if is_all else UNKNOWN)

    def unscaled(self, tensor: torch.Tensor) -> None:
        """Note that a scaler divides a tensor by its scale."""
        known = self._values.get(tensor)
        if known is not None and known.power is not None:
            self.put(tensor, replace(known, power=known.power - 1))

    def forget(self) -> None:
        """Forget where weights lie, as they may have moved."""
        self._weights = None

    def end_of_step(self) -> None:
        """Begin another step."""
        self._begun_with = self._kept.scales()

    def answers(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor holds whether gradients are finite."""
        return self._answer([tensor]) is not None

    def number_read(self, tensor: torch.Tensor) -> None:
        """Note that the host reads a number: what it multiplies by numbers later may be multiplied by a scale."""
        known = self.of(tensor)
        if known.power != 0 and known != KEPT:
            self._has_read = True
            if dispatch.storage_key(tensor) in self._kept.scales():
                self._read.add(float(tensor))

    # -- ops -----------------------------------------------------------------------------------------------------------

    def runs(
        self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any], site: Callable[[], Site]
    ) -> list[Power]:
        """Return the powers of the results of an op that is about to run: one for each, or one for all of them."""
        floats = _read(facts, args, kwargs)
        known = [self.of(t) for t in floats]
        mixed = next((power for power in known if power.is_mixed), None)
        if mixed is not None:
            return [mixed]
        numbers = [self._of_number(number) for number in _numbers(args, kwargs)]
        is_scaled = any(power.power for power in known) or any(n != 0 for n in numbers)
        may_know = self._has_read or bool(self._kept.scales() - self._begun_with)
        may_scale = may_know and any(map(_may_be_computed, _numbers(args, kwargs)))
        is_unsure = None in numbers or (may_scale and 0 in numbers)
        asks = self._answer(tensors_in(args, kwargs))
        if any(power.is_gradient for power in known) and (asks is not None or _name(facts) in named("finite.replaces")):
            return [Power(1.0, site(), facts.id, HIDES, of_gradients=True)]
        if any(map(math.isinf, _numbers(args, kwargs))) and self._is_infinite(facts, args, kwargs):
            return [PLAIN]  # whatever the scale is, as where a norm is limited by no number
        if any(power == UNKNOWN for power in known) or (is_scaled and is_unsure):
            return [UNKNOWN]
        if not is_scaled:
            does = [power.does for power in known]
            limited = known[does.index(LIMITS)] if LIMITS in does else asks if {*does} <= {ASKS} else None
            divided = next((p for p in known if p.of_gradients and p.power == 0 and p.site is not NOWHERE), None)
            return [limited or divided or self._unscaled(facts, args, kwargs, may_scale and 0 in numbers)]
        if self._asks_alone(facts, args, kwargs, known):
            return [Power(0.0, site(), facts.id, ASKS)]
        is_moved = _name(facts) in named("computation.none") and len(floats) == 1
        is_sum = _name(facts) in named("backward.linear") and len(set(known)) == 1 and not numbers
        if is_moved or is_sum:
            return known[:1]
        by_scale = any(power.power and not power.of_gradients for power in known) or any(numbers)
        exponents = self._measured(facts, args, kwargs)
        return [self._given(exponent, known, site(), facts.id, by_scale) for exponent in exponents]

    def _answer(self, tensors: list[torch.Tensor]) -> Power | None:
        """Return the power of the first tensor that holds whether gradients are finite; None if there is none."""
        known = [self._values.get(t) for t in tensors if has_storage(t)]
        return next((power for power in known if power is not None and power.does == ASKS), None)

    @staticmethod
    def _given(exponent: float | None, known: list[Power], site: Site, op: str, by_scale: bool) -> Power:
        """Return the power of a result. exponent: as measured; by_scale: a scale itself is among the inputs."""
        of_gradients = any(power.of_gradients for power in known)
        if exponent is None or exponent == math.inf:
            return UNKNOWN if exponent else Power(None, site, op, MIXES, of_gradients)
        before = next((power for power in known if power.does in (HIDES, LIMITS)), None)
        if before is not None and (before.does == HIDES or not by_scale):
            return replace(before, power=exponent)
        limits = exponent == 0 and not by_scale and any(power.is_gradient for power in known)
        return Power(exponent, site, op, LIMITS if limits else "", of_gradients)

    def _unscaled(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any], may_scale: bool) -> Power:
        """Return the power of the results where no input is known to be scaled: KEPT if one is kept, and not added to
        unscaled values; else PLAIN. may_scale: the host knows a scale, and may have computed a number of it.
        """
        floats = _read(facts, args, kwargs)
        known = [self.of(t) for t in floats]
        if not floats or not (KEPT in known or may_scale) or any(t.requires_grad for t in floats):
            return PLAIN
        is_sum = PLAIN in known and [None] in self._powers_of(facts, args, kwargs, [(2.0, 1.0)])
        return PLAIN if is_sum else KEPT

    def moved_weights(self) -> list[Power]:
        """Return the powers of weights whose memory is a sum with scaled gradients, as after `weight.data = ...`."""
        known = [self._values.get(weight) for weight in self._kept.weights()]
        return [power for power in known if power is not None and power.is_mixed and power.of_gradients]

    def gave(self, results: list[torch.Tensor], powers: list[Power], trains: bool, are_new: bool = True) -> None:
        """Record the powers of the results of an op that has run. trains: it has an autograd node; a part of a loss is
        PLAIN, whatever it is computed from. are_new: the results have memory of their own.
        """
        powers = powers * len(results) if len(powers) == 1 else powers
        for result, power in zip(results, powers, strict=False):
            if trains and power.is_mixed and power.of_gradients:
                self.mixed[next_sequence_number() - 1] = power
                power = PLAIN
            self.put(result, power, are_new)

    def _of_number(self, number: float) -> float | None:
        """Return the power of a scale that a number is; None if it is unknown: it equals a scale whose reading was not
        observed, or is a power of two times one.
        """
        for scale in self._read | self.met:
            is_scale, is_inverse = abs(number - scale) <= 1e-6 * scale, abs(number * scale - 1) <= 1e-6
            if scale != 1 and (is_scale or is_inverse):
                return None if scale not in self._read else 1.0 if is_scale else -1.0
        for scale in self._read if _may_be_computed(number) else ():  # times what is written beside it
            for power, factor in ((1.0, number / scale), (-1.0, number * scale)):
                if math.isfinite(factor) and not _may_be_computed(factor):
                    return power
            if math.frexp(abs(number))[0] == math.frexp(scale)[0]:  # a power of two apart: perhaps divided by 8
                return None
        return 0.0

    def _measured(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[float | None]:
        """Return the power of each result; None: it is a mixed sum, or has a limit; infinity: unknown."""
        is_known = all(self.of(t) != KEPT for t in tensors_in(args, kwargs))
        pairs = self._powers_of(facts, args, kwargs, [(2.0, 0.0), (_FAR, 0.0) if is_known else (2.0, 1.0)])
        if is_known:  # where both say something, they have to agree
            return [one if two in (one, math.inf) else two if one == math.inf else None for one, two in pairs]
        return [one if one is not None else two if two is not None else math.inf for one, two in pairs]

    def _powers_of(
        self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any], rows: list[tuple[float, float]]
    ) -> list[list[float | None]]:
        """Return the powers of each result, one for each row: a factor of the scale, and the power of kept values."""
        tensors = tensors_in(args, kwargs)
        if facts.op.namespace != "aten" or is_random(facts.op) or not all(map(has_storage, tensors)):
            return [[math.inf] * len(rows)]
        room = _EPSILON if all(self.of(t).power for t in tensors if t.is_floating_point()) else 0.0
        with quietly():
            once, *others = (self._run(facts, args, kwargs, *row) for row in [(1.0, 0.0), *rows])
        if once is None or any(other is None or len(other) != len(once) for other in others):
            return [[math.inf] * len(rows)]
        factors = [factor for factor, _ in rows]
        return [
            [_exponent(first, other, factor, room) for other, factor in zip(results, factors, strict=True)]
            for first, *results in zip(once, *filter(None, others), strict=True)
        ]

    def _is_infinite(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether all results are infinite, also where finite numbers are in the place of what is not."""
        with quietly():
            results = self._run(facts, args, kwargs, 1.0, 0.0, of_finite=True)
        return bool(results) and all(t.is_floating_point() and bool(t.isinf().all()) for t in results or ())

    def _asks_alone(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any], known: list[Power]) -> bool:
        """Return whether an op checks whether gradients are finite: neither sizes nor signs change its results."""
        if _name(facts) not in named("result.counts") or any(power.power not in (0.0, 1.0) for power in known):
            return False
        with quietly():
            factors = (1.0, 2.0, -1.0, math.inf, math.nan)
            runs = [self._run(facts, args, kwargs, by, 0.0, of_finite=True) for by in factors]
        answers = [run[0] for run in runs if run]
        if len(answers) < len(runs) or not answers[0].numel() or answers[0].dtype is not torch.bool:
            return False
        once, *others = answers
        changes = [not torch.equal(other, once) for other in others]
        return bool((once == once.flatten()[0]).all()) and not any(changes[:2]) and any(changes)

    def _run(
        self,
        facts: OpFacts,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        factor: float,
        unknown: float,
        of_finite: bool = False,
    ) -> list[torch.Tensor] | None:
        """Return the results of an op in fp64 with the scale times a factor. unknown: the power of unknown values;
        of_finite: ones take the place of what is not finite.
        """

        def scaled(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                power = self.of(value).power
                wide = value.detach().double()
                wide = wide.nan_to_num(1.0, 1.0, 1.0) if of_finite else wide
                return wide * factor ** (unknown if power is None else power)
            return value * factor ** (self._of_number(value) or 0.0) if isinstance(value, float) else value

        scaled_args, scaled_kwargs = dispatch.tree_map(scaled, (args, kwargs))
        return run_wide(facts, scaled_args, scaled_kwargs, torch.float64)


def _read(facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the floating tensors whose values an op reads: not those that it overwrites, or reads the shape of."""
    name = _name(facts)
    if name.endswith("_like") or name.startswith("new_"):
        return []
    unread = written(facts, args, kwargs) if name in named("finite.written_unread") else []
    return [t for t in tensors_in(args, kwargs) if t.is_floating_point() and not any(t is u for u in unread)]


def _name(facts: OpFacts) -> str:
    return dispatch.op_name(facts.op).removesuffix("_")


def _numbers(args: Any, kwargs: Any) -> Iterator[float]:
    """Yield the floats among arguments, in lists, too."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, float):
            yield value
        elif isinstance(value, list | tuple):
            yield from _numbers(value, {})


def _may_be_computed(number: float) -> bool:
    """Return whether a number may be computed from a scale, or a norm: one that is short to write is written so."""
    is_of_size = abs(number) <= _TINY or _WRITTEN[0] <= abs(number) <= _WRITTEN[1]
    return number != 0 and not (is_of_size and math.isclose(float(f"{number:.2g}"), number, rel_tol=1e-12))


def _exponent(once: torch.Tensor, other: torch.Tensor, factor: float, room: float) -> float | None:
    """Return the power of a factor by which a result has grown, in halves; None if its elements have grown differently;
    infinity if a norm is zero, infinite or NaN. room: how far apart they may lie.
    """
    if not once.is_floating_point() or once.shape != other.shape or not once.numel():
        return math.inf
    before, after = float(once.norm()), float(other.norm())
    if not (math.isfinite(before) and math.isfinite(after) and before and after):
        return math.inf
    exponent = round(2 * math.log(after / before, factor)) / 2
    apart = float((other * factor**-exponent - once).abs().max())
    return exponent if apart <= max(_EXACT * float(once.abs().max()), room if exponent else 0.0) else None
