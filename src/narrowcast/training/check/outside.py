"""Inspects what runs outside of regions and should not: forwards, losses, evaluations of the model that is trained."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field

import torch

from narrowcast.analysis.record.advice import listed_kinds
from narrowcast.core.policy import NOWHERE, Kind, Site
from narrowcast.observation.observer.seen_call import SeenCall
from narrowcast.observation.statistics.arguments import tensors_by_name
from narrowcast.observation.statistics.by_storage import ByStorage, has_storage
from narrowcast.observation.trial.finiteness import is_finite, is_floating
from narrowcast.output.words import counted
from narrowcast.runtime.regions.stack import stack
from narrowcast.runtime.sites.python_stack import loop_line
from narrowcast.runtime.torch_bridge import FORMATS, LOW, tensors_in
from narrowcast.runtime.torch_surface import dispatch
from narrowcast.runtime.torch_surface.autograd import is_in_derivative, is_leaf, next_sequence_number
from narrowcast.runtime.torch_surface.state import autocast_nesting
from narrowcast.training.check.gradients import Found

_LOW = frozenset(FORMATS[dtype].name for dtype in LOW)
_OF_FUNC = -1
"""In the place of the autograd node of a call in a function that torch.func differentiates."""


@dataclass(slots=True)
class _Evaluated:
    """A model that was called for an evaluation, and its calls in regions and out of them: op and line. low: the first
    call in each low format.
    """

    model: torch.nn.Module
    inside: int = 0
    outside: list[tuple[str, Site]] = field(default_factory=list)
    low: dict[str, Site] = field(default_factory=dict)


class OutsideRegions:
    """Calls in regions and out of them. inside: how many a region decided about in training."""

    def __init__(self) -> None:
        self.inside = 0
        self._low: set[str] = set()  # the low formats of training
        self._outside: list[tuple[int, str, Site, bool]] = []  # in training: node, op, line, is of a model
        self._off: list[tuple[str, Site]] = []  # in training, in a region that is off, or for another device
        self._broken: list[tuple[str, Site]] = []  # losses that are not finite
        self._evaluated: dict[int, _Evaluated] = {}
        self._evaluation: _Evaluated | None = None
        self._model: torch.nn.Module | None = None  # the outermost one that is called in training
        self._called = NOWHERE  # the line of the loop that calls a model
        self._in_regions: dict[int, torch.nn.Module] = {}  # those of training of which a region decided about calls
        self._intentional: ByStorage[bool] = ByStorage()
        self._made_inside: ByStorage[bool] = ByStorage()

    @property
    def calls(self) -> dict[str, int]:
        """How many calls of a forward a region decided about, and how many ran outside that it would lower."""
        evaluated = self._evaluated.values()
        outside = len(self._outside) + sum(len(e.outside) for e in evaluated)
        return {"inside": self.inside + sum(e.inside for e in evaluated), "outside": outside}

    def calls_model(self, model: torch.nn.Module | None, is_evaluation: bool = False) -> None:
        """Note that a model is called, perhaps for an evaluation; None: that the call has ended."""
        self._model, self._evaluation = (None, None) if is_evaluation else (model, None)
        self._called = NOWHERE if model is None else loop_line()
        if model is not None and is_evaluation:
            self._evaluation = self._evaluated.setdefault(id(model), _Evaluated(model))

    # -- calls ---------------------------------------------------------------------------------------------------------

    def ran_inside(self, call: SeenCall) -> None:
        """Count a call that a region decided about."""
        low = [name for name in call.computes.split(",") if name in _LOW] if call.rule is not None else []
        if self._evaluation is None:
            self.inside += 1
            if self._model is not None:
                self._in_regions[id(self._model)] = self._model
            self._low.update(low)
            return
        self._evaluation.inside += 1
        for name in low:
            self._evaluation.low.setdefault(name, call.site)

    def ran_outside(self, call: SeenCall) -> None:
        """Record a call that no region decided about, if one would lower it."""
        floats = [t for _, t in tensors_by_name(call.facts, call.args, call.kwargs) if is_floating(t)]
        if not floats or any(t.dtype is not torch.float32 for t in floats):
            return
        if listed_kinds(floats[0].device.type).get(dispatch.op_name(call.facts.op)) is not Kind.LOWER:
            return
        if in_region():
            if self._evaluation is None and call.notes.get("trains"):
                self._off.append((call.id.op, self._line_of(call)))
            return
        if any(self._intentional.get(t) for t in floats):
            return
        if self._evaluation is not None:
            self._evaluation.outside.append((call.id.op, self._line_of(call)))
        elif call.notes.get("trains"):  # and not what prepares a batch, measures, or updates weights
            node = _OF_FUNC if is_in_derivative() else next_sequence_number() - 1
            is_of_model = self._model is not None and any(True for _ in self._model.parameters())
            reads_weight = any(_is_trained(t) and not self._made_inside.get(t) for t in floats)
            site = call.site if self.inside else self._line_of(call)
            self._outside.append((node, call.id.op, site, is_of_model or reads_weight))

    def _line_of(self, call: SeenCall) -> Site:
        """Return the line of the loop that calls the model around a call, which a region is to be opened around."""
        return self._called if self._called.file else call.site

    @property
    def follows(self) -> bool:
        """Whether there are values whose copies are to be reported to `copied`."""
        return bool(self._intentional)

    def goes_on_in_fp32(self, call: SeenCall) -> None:
        """Note values that are in fp32 on purpose: cast to it by the user, or computed from these outside a region."""
        if call.plan is not None:
            for tensor in call.results:  # perhaps a leaf later: a representation whose gradient is taken by itself
                self._made_inside.put(tensor, True)
            return
        inputs = tensors_in(call.args, call.kwargs)
        is_cast = call.facts.op is dispatch.TO_COPY
        if is_cast and inputs and inputs[0].dtype in LOW and call.result.dtype is torch.float32:
            self.are_intentional(call.results)
        self.copied(inputs, call.results)

    def copied(self, inputs: list[torch.Tensor], results: list[torch.Tensor]) -> None:
        """Note results that are computed, or copied, from values that are in fp32 on purpose."""
        if any(self._intentional.get(t) for t in inputs):
            self.are_intentional(results)

    def are_intentional(self, tensors: list[torch.Tensor]) -> None:
        """Note values that are in fp32 on purpose, as gradients that are differentiated are."""
        for tensor in tensors:
            self._intentional.put(tensor, True)

    # -- at the end ----------------------------------------------------------------------------------------------------

    def gives_loss(self, call: SeenCall) -> None:
        """Note a number that is computed outside of models with gradients on, if it is not finite."""
        one = call.results[0] if len(call.results) == 1 else None
        if one is not None and one.numel() == 1 and has_storage(one) and is_floating(one) and not is_finite(one):
            self._broken.append((call.id.op, call.site))

    def judge(self, differentiated: Set[int], trained: Set[int], has_backward: bool) -> list[Found]:
        """Return findings about calls outside of regions. differentiated: the autograd nodes of gradients that are
        differentiated themselves, as in a penalty, and in fp32 on purpose; trained: the parameters, by identity;
        has_backward: one has run.
        """
        findings: list[Found] = []
        if self._broken and not has_backward:
            op, site = self._broken[0]
            findings.append((
                "every step is skipped", f"no backward runs in these steps, and {op} gives a loss that is not finite",
                "nc.watch() names the first call that gives NaN or infinity. Compute the loss in fp32: "
                "loss_fn(output.float(), ...).", site,
            ))  # fmt: skip
        known = {_OF_FUNC, *differentiated}
        outside = [o for o in self._outside if not self.inside or (o[3] and o[0] not in known)]
        if outside:
            _, op, site, _ = outside[0]
            findings.append((
                "forward outside of the region",
                f"{counted(len(outside), 'call', 'run')} outside of the region that would lower such calls, the first "
                f"is {op}",
                "Move this code into the region, or close the region where fp32 is intended: "
                "nc.autocast(device, enabled=False).",
                site,
            ) if self.inside else (
                "no region", f"{counted(len(outside), 'call', 'run')} in fp32, first {op}, and none runs in a region",
                "Open nc.autocast(device, dtype) around the forward and the loss.", site,
            ))  # fmt: skip
        elif self._off and not self.inside:
            op, site = self._off[0]
            findings.append((
                "a region without effect",
                f"all {len(self._off)} calls that a region would lower, the first of them {op}, run in fp32: the "
                "region around them is switched off, or is for another type of device than their tensors are on",
                "Open it for the device of the model, and switched on: nc.autocast(device, dtype).", site,
            ))  # fmt: skip
        other = next(
            (e for e in self._of_trained(trained) if e.low and self._low and not self._low & e.low.keys()), None
        )
        if other is not None:
            (name, site), *_ = other.low.items()
            findings.append((
                "evaluation in another format",
                f"an evaluation computes in {name}, where training computes in {', '.join(sorted(self._low))}",
                "Open the same region around both: what is measured is then what was trained.", site,
            ))  # fmt: skip
        evaluated = next((e.outside for e in self._of_trained(trained) if e.outside and not e.inside), None)
        if evaluated:
            findings.append((
                "evaluation without the region",
                f"{counted(len(evaluated), 'call')} of an evaluation in fp32, where training runs in a region",
                "Open the same region around the evaluation: what is measured is then what was trained.",
                evaluated[0][1],
            ))  # fmt: skip
        return findings

    def _of_trained(self, trained: Set[int]) -> list[_Evaluated]:
        """Return the evaluations of models that are trained in a region. A teacher may have its own formats."""
        known = {id(p) for model in self._in_regions.values() for p in model.parameters()}
        wanted = known & trained if trained else known
        return [e for e in self._evaluated.values() if any(id(p) in wanted for p in e.model.parameters())]


def _is_trained(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a leaf of autograd, or a view of one, that requires a gradient, as weights are."""
    root = dispatch.base_of(tensor)
    root = tensor if root is None else root
    return root.requires_grad and is_leaf(root)


def in_region() -> bool:
    """Return whether a region is open here, torch's or ours."""
    return bool(autocast_nesting() or stack.innermost)
