"""What a comparison keeps of a reference run: samples of what each call gave, and checksums."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from narrowcast.ledger.identity import CallId
from narrowcast.runs.arguments import others_as_text, tensors_by_name
from narrowcast.runs.finiteness import is_floating
from narrowcast.runs.observer import Observer, SeenCall
from narrowcast.runs.rerun import planned_arguments
from narrowcast.runs.statistics import checksum, sample_of
from narrowcast.torch_bridge import FORMATS, OpFacts, is_random
from narrowcast.torch_surface.dispatch import tree_map

WHOLE, SMALL = 1 << 16, 1 << 12
"""So many elements of each result are compared; the fewer when those kept take half of the bytes allowed."""


@dataclass(slots=True)
class Kept:
    """Of one call: its place, formats, arguments that are no tensors, and samples of its floating results, in fp64."""

    call: SeenCall
    dtypes: list[torch.dtype | None]
    given: tuple[tuple[str, str], ...]
    samples: list[torch.Tensor]
    checksums: tuple[int, ...]
    output: list[torch.dtype] = field(default_factory=list)


class Keep(Observer):
    """Keeps what each call of a run gave."""

    def __init__(self, policies: tuple[Any, ...], limit_bytes: int, checksums: bool) -> None:
        super().__init__(policies)
        self.calls: dict[CallId, Kept] = {}
        self._left = self._allowed = limit_bytes
        self._checksums = checksums

    def after(self, call: SeenCall) -> None:
        """What it gave."""
        if call.is_cast:
            return
        results = [t for t in call.results if is_floating(t)]
        if not results:
            return
        samples = [self._sample(t) for t in results]
        sums = tuple(checksum(t) for t in results) if self._checksums else ()
        self.calls[call.id] = kept_of(call, results, samples, sums)

    def _sample(self, tensor: torch.Tensor) -> torch.Tensor:
        wanted = WHOLE if self._left > self._allowed // 2 else SMALL
        sample = sample_of(tensor.detach(), wanted).clone()
        self._left -= sample.nbytes
        return sample


def kept_of(
    call: SeenCall, results: list[torch.Tensor], samples: list[torch.Tensor] | None = None, sums: tuple[int, ...] = ()
) -> Kept:
    """What is kept of a call: the formats that it reads and gives, and of its results what was taken."""
    light = _light(call)
    read = tensors_by_name(call.facts, *planned_arguments(light))
    given = others_as_text(call.facts, call.args, call.kwargs)
    return Kept(light, [t.dtype for _, t in read], given, samples or [], sums, [t.dtype for t in results])


def sample_like(tensor: torch.Tensor, kept: torch.Tensor) -> torch.Tensor | None:
    """The sample of a tensor at the places of another's, in fp64; None if the two are not of one size."""
    for elements in (WHOLE, SMALL):
        found = sample_of(tensor.detach(), elements)
        if found.shape == kept.shape:
            return found.double()
    return None


def _light(call: SeenCall) -> SeenCall:
    """The call without its tensors, of which dtypes alone are left."""
    return SeenCall(
        call.id, call.site, call.facts, *_emptied(call.args, call.kwargs), call.came, call.computes, call.plan,
        call.rule, call.forward, call.is_cast,
    )  # fmt: skip


def _emptied(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    def of(value: Any) -> Any:
        return torch.empty(0, dtype=value.dtype) if isinstance(value, torch.Tensor) else value

    found: tuple[Any, Any] = tree_map(of, (args, kwargs))
    return found


class Weights:
    """The weights of a model, put back as they were if a run has changed them."""

    def __init__(self, parameters: dict[str, torch.Tensor]) -> None:
        self._parameters = parameters
        self._sums = {name: checksum(p) for name, p in parameters.items()}
        self._copies: dict[str, torch.Tensor] | None = None

    def changed(self) -> list[str]:
        """The names of those that are not as they were."""
        return [name for name, p in self._parameters.items() if checksum(p) != self._sums[name]]

    def keep(self) -> None:
        """Take copies to go back to."""
        self._copies = {name: p.detach().clone() for name, p in self._parameters.items()}

    def put_back(self, names: list[str]) -> None:
        """Give these their values back."""
        with torch.no_grad():
            for name in names:
                if self._copies is not None:
                    self._parameters[name].copy_(self._copies[name])


class Moved(Observer):
    """A run in which each result moves by up to one unit in the last place of the format that the policy gives it."""

    def __init__(self, policies: tuple[Any, ...], units: dict[CallId, float], seed: int) -> None:
        super().__init__(policies)
        self._units, self._seed = units, seed
        self._generators: dict[torch.device, torch.Generator] = {}
        self.samples: dict[CallId, list[torch.Tensor]] = {}
        self.kept: dict[CallId, list[torch.Tensor]] = {}

    def gives(self, seen: SeenCall, facts: OpFacts, result: Any) -> Any:
        """The result, moved."""
        unit = self._units.get(seen.id, 0.0)
        if not unit or not facts.computes or is_random(facts.op):
            return result

        def moved(value: Any) -> Any:
            if not (isinstance(value, torch.Tensor) and value.dtype in FORMATS and value.layout is torch.strided):
                return value
            generator = self._generators.get(value.device)
            if generator is None:
                generator = torch.Generator(value.device).manual_seed(self._seed)
                self._generators[value.device] = generator
            try:
                noise = torch.rand(value.shape, generator=generator, device=value.device, dtype=value.dtype)
            except RuntimeError:  # inside vmap
                return value
            return value * (1 + (2 * noise - 1) * unit)

        return tree_map(moved, result)

    def after(self, call: SeenCall) -> None:
        """How far it is from the reference's."""
        reference = self.kept.get(call.id)
        if reference is None or call.is_cast:
            return
        results = [t for t in call.results if is_floating(t)]
        pairs = [(sample_like(t, r), r) for t, r in zip(results, reference, strict=False)]
        self.samples[call.id] = [found for found, _ in pairs if found is not None]
