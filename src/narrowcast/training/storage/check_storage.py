"""`nc.check_storage`: in which formats a model and its optimizer keep what they train, and what is lost by that, before
a step is made.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn.parameter import UninitializedParameter

from narrowcast.core.ledger import Advice
from narrowcast.core.policy.storage import FP32, REMAINDER
from narrowcast.errors import RunError, first_line
from narrowcast.observation.restore.memory import in_memory
from narrowcast.output.words import and_more, counted, number_text
from narrowcast.reports.results.storage import KEPT, LOST, StorageCheck, StoredGroup
from narrowcast.reports.results.verdicts import NOT_JUDGED
from narrowcast.runtime.devices.device import random_state_kept
from narrowcast.runtime.torch_bridge import FORMATS, LOW, values_of
from narrowcast.runtime.torch_surface.dispatch import quietly
from narrowcast.runtime.torch_surface.dynamo import CompiledCode
from narrowcast.runtime.torch_surface.modules import has_step_hooks, optimized_by, without_wrapper
from narrowcast.training.storage.checkpoints import entries_of, losses_of
from narrowcast.training.storage.masters import Master, masters_of, units_of
from narrowcast.training.storage.probes import ProbedStates, Probes
from narrowcast.training.storage.store import slot_of, stored_of
from narrowcast.training.storage.twins import Settings, settings_of

UPDATES, STATES, RESUMED, APART = (
    "updates lost in rounding",
    "a state that does not decay",
    "a resume rounds the state",
    "masters apart from their weights",
)
_OF_ALL, _OF_ONE = 0.01, 0.5
"""The share of all elements of a group, or of those of one parameter, whose updates are lost so that it is reported."""
_MOMENTS = "betas"


def check_storage(
    model: torch.nn.Module, optimizer: Any, *, checkpoint: Any = None, lr: float | None = None
) -> StorageCheck:
    """Find what training will lose by the formats of its weights, masters, gradients and moments, before a step is
    made.

    model, optimizer: as you train them; wrappers (DDP, torch.compile, FSDP2, Accelerate's) may be around them. Neither
            is changed: a few elements of each group's weights are copied, and an optimizer of the same class, with the
            same settings, steps them beside the same in fp32.
    checkpoint: also, what you save for a resume: nested dicts of tensors, or a file of torch.save or safetensors, or a
            folder of torch.distributed.checkpoint, of which nothing is executed.
    lr:     the learning rate to judge, as the last one of a schedule; without it the highest that a group had.

    Reported, with what to write instead: updates below half a unit in the last place of their weights, which rounding
    to nearest loses, with the share of elements (of about the size that the optimizer makes of any gradient; where its
    scale matters, as with SGD, from the gradients that are there, else nothing is said); states that no longer decay;
    states that `load_state_dict` rounds; masters that are no longer their weights in more digits; a checkpoint that
    keeps less than training does, or more than the model can read. Judged by what moves, not by the optimizer's class:
    stochastic rounding, Kahan's compensation and masters lose nothing. `check_training` judges a step that runs.

    With several ranks call it on all of them: some optimizers communicate in their steps.

    Returns a StorageCheck, true if nothing is lost. Raises RunError for what is no model, no optimizer, or no file.
    """
    optimizer = _optimizer_of(optimizer)
    if lr is not None and not (isinstance(lr, int | float) and 0 < lr < math.inf):
        raise RunError(f"check_storage(lr={lr!r})", "it is no learning rate", advice="Give a number above 0.")
    if not isinstance(model, torch.nn.Module):
        advice = "Give the model, and then the optimizer that trains it."
        raise RunError(f"check_storage({type(model).__name__}, ...)", "it is no torch.nn.Module", advice=advice)
    stored = stored_of(optimizer)
    weights = {without_wrapper(name): weight for name, weight in model.named_parameters()}
    empty = next((n for n, w in weights.items() if isinstance(w, UninitializedParameter) or w.is_meta), None)
    if empty is not None:
        advice = "Call the model once before, if it has lazy layers; load its weights, if they are on the meta device."
        raise RunError("check_storage", f"{empty} has no values", advice=advice)
    with quietly(), CompiledCode(on=False), random_state_kept(), torch.no_grad():
        masters, stepped = masters_of(weights, optimizer), {*map(id, optimized_by(optimizer))}
        if not masters and stepped.isdisjoint(map(id, weights.values())):
            advice = "Give the optimizer that was made of this model's parameters."
            raise RunError("check_storage", "the optimizer steps none of the model's parameters", advice=advice)
        entries = [] if checkpoint is None else entries_of(checkpoint)
        result = StorageCheck(type(model).__name__, type(optimizer).__name__)
        probes = Probes(optimizer)
        for number, group in enumerate(optimizer.param_groups):
            settings = settings_of(group, lr)
            for (dtype, _), parameters in _alike(group["params"], optimizer).items():
                _judge_group(
                    result, number, dtype, _OneGroup(optimizer, settings, parameters, weights, masters), probes
                )
        result.findings = [*_one_of_each(result.findings), *_of_masters(masters)]
        if checkpoint is not None:
            kept = {} if stored is None else {slot.name: slot.way for slot in stored.slots if slot.rest is not None}
            result.findings += losses_of(entries, weights, masters, kept, result.notes)
    left = sum(id(weight) not in stepped and weight.requires_grad for weight in weights.values())
    if left and not masters:
        result.notes.append(f"{counted(left, 'parameter', 'are')} trained by no group of this optimizer.")
    if stored is not None:
        result.bytes_before = sum(before for before, _ in stored.sizes().values())
        result.notes += stored.notes
    return result


def _one_of_each(findings: Sequence[Advice]) -> Iterator[Advice]:
    """Yield the first finding of each kind, and say how many more groups have it."""
    for kind in dict.fromkeys(finding.kind for finding in findings):
        first, *others = (finding for finding in findings if finding.kind == kind)
        more = f"; so in {counted(len(others), 'more group')}" if others else ""
        yield replace(first, what=first.what + more)


class _OneGroup:
    """The parameters of one group in one format."""

    def __init__(
        self,
        optimizer: Any,
        settings: Settings,
        parameters: list[torch.Tensor],
        weights: Mapping[str, torch.Tensor],
        masters: Mapping[str, Master],
    ) -> None:
        self.optimizer, self.settings, self.parameters, self.masters = optimizer, settings, parameters, masters
        names = {id(weight): name for name, weight in weights.items()}
        names |= {id(master.value): name for name, master in masters.items()}
        self.names = {id(one): names.get(id(one), f"parameter {n}") for n, one in enumerate(parameters)}
        self.stands_for = {id(master.value): weights[name] for name, master in masters.items() if not master.where}

    def stored(self, number: int, dtype: torch.dtype) -> StoredGroup:
        """Return what is kept of them, in bytes."""
        values = [values_of(one.detach()) for one in self.parameters]
        kept = StoredGroup(number, str(FORMATS.get(dtype, dtype)), len(values), sum(v.numel() for v in values))
        for parameter, value in zip(self.parameters, values, strict=True):
            weight = self.stands_for.get(id(parameter))
            own = parameter if weight is None else weight
            kept.master_bytes += 0 if weight is None else value.nbytes
            kept.weight_bytes += values_of(own.detach()).nbytes
            gradient = getattr(own, "grad_dtype", None) or own.dtype
            kept.gradient_bytes += value.numel() * gradient.itemsize if own.requires_grad else 0
            master = self.masters.get(self.names[id(parameter)])
            slot = slot_of(self.optimizer, parameter)
            if slot is not None:
                kept.master_bytes += 0 if slot.rest is None else slot.rest.nbytes
            for name, state in self.optimizer.state.get(parameter, {}).items():
                size = sum(one.nbytes for one in in_memory(state))
                if master is not None and master.where == name:
                    kept.master_bytes += size
                else:
                    kept.state_bytes += size
        return kept


def _judge_group(result: StorageCheck, number: int, dtype: torch.dtype, group: _OneGroup, probes: Probes) -> None:
    """Enter what is kept of a group, and what a probe of it shows."""
    kept = group.stored(number, dtype)
    result.groups.append(kept)
    trained = [one for one in group.parameters if one.requires_grad and values_of(one.detach()).numel()]
    if dtype not in LOW or not trained:
        kept.updates = KEPT
    if not trained or dtype not in (*LOW, torch.float32):
        return
    if has_step_hooks(group.optimizer):
        why = "hooks on its steps may change them; nc.check_training judges a step"
        result.notes.append(f"group {number} was not probed: {why}.")
        return
    try:
        found = probes.of(group.settings, trained)
    except Exception as error:  # what another class takes, and does, is its own
        result.notes.append(f"group {number} could not be probed: {first_line(error)}")
        return
    kept.rate = float(group.settings["lr"]) if "lr" in group.settings else None
    kept.update = found.update
    has_all = kept.state_bytes or (kept.master_bytes and stored_of(group.optimizer) is None)
    if found.state_bytes is not None and not has_all:  # as they will be
        kept.state_bytes = round(found.state_bytes * sum(one.numel() for one in trained))
    still = list(_of_still(number, found))
    if dtype is torch.float32 or found.keeps_updates:
        kept.updates = KEPT
        result.notes += [advice.what for advice in still]  # steps are shorter, and nothing of the weights is lost
    elif found.keeps_updates is None:
        result.notes.append(f"group {number}: {_why_not(found, kept)}")
        result.findings += still
    else:
        result.findings += [*_lost_updates(kept, group, found, trained, dtype), *still]
    result.findings += _of_rounded(number, found)


def _lost_updates(
    kept: StoredGroup, group: _OneGroup, found: ProbedStates, trained: Sequence[torch.Tensor], dtype: torch.dtype
) -> Iterator[Advice]:
    """Yield that updates are lost, if there are many, and enter how many into what is kept of the group."""
    update = kept.update or 0.0
    trained = [one for one in trained if id(one) in found.lost] if found.lost else trained
    shares = found.lost or {id(one): _lost(one, update) for one in trained}
    total = sum(one.numel() for one in trained)
    kept.updates, kept.lost = LOST, sum(shares[id(one)] * one.numel() for one in trained) / total
    kept.lost_from = _rate_of_half(trained, update, kept.rate)
    kept.lost_at_least = _at_largest(group, trained, update)
    worst = max(trained, key=lambda one: (shares[id(one)], one.numel()))
    share, name = shares[id(worst)], group.names[id(worst)]
    if kept.lost < _OF_ALL and share < _OF_ONE:
        kept.updates = NOT_JUDGED  # of this size none are lost; of a training that converges they become smaller
        return
    at = f" (lr={kept.rate:g})" if kept.rate is not None else ""
    what = f"updates of {number_text(update)}{at} are below half a unit in the last place of {kept.lost:.1%} of the "
    what += f"elements of group {kept.group} in {FORMATS[dtype]}, of {share:.0%} of {name}"
    if kept.lost_at_least is not None and kept.lost_at_least < kept.lost:
        what += f"; of {kept.lost_at_least:.1%} where they are the largest that its betas allow"
    todo = "Keep weights in fp32 and compute in a region; or what completes them: nc.store(model, optimizer, "
    todo += f'{{"master": "{REMAINDER if dtype is torch.bfloat16 else FP32}"}}).'
    yield Advice(UPDATES, what, todo, name, "", 0)


def _why_not(found: ProbedStates, kept: StoredGroup) -> str:
    if found.update == 0:
        return f"weights in fp32 do not move at lr={kept.rate}: give lr=, one of the schedule's."
    if found.update is None:
        return "updates depend on the size of gradients, and none that is finite and dense is there: run a backward."
    if not math.isfinite(found.update):
        return "weights, or updates, are not finite."
    return f"whether updates of {found.update:.1e} are lost was not found out; nc.check_training judges a step."


def _of_still(number: int, found: ProbedStates) -> Iterator[Advice]:
    for name in found.still:
        what = f"{name} of group {number} stays where it is without gradients: its format rounds each decay away"
        todo = f"Keep {name} in fp32, as with weights in fp32, or lower its beta: 0.99 decays in bf16."
        yield Advice(STATES, what, todo, "", "", 0)


def _of_rounded(number: int, found: ProbedStates) -> Iterator[Advice]:
    for name, (before, after) in found.rounded.items():
        formats = f"{FORMATS.get(before, before)} to {FORMATS.get(after, after)}"
        what = f"{name} of group {number} is another after optimizer.load_state_dict(optimizer.state_dict()): {formats}"
        if before == after:
            what = f"{name} of group {number} is another after optimizer.load_state_dict(optimizer.state_dict())"
        todo = "After load_state_dict put it back as it was saved: "
        todo += f"for p in optimizer.state: optimizer.state[p][{name!r}] = saved[p]."
        yield Advice(RESUMED, what, todo, "", "", 0)


def _of_masters(masters: Mapping[str, Master]) -> Iterator[Advice]:
    apart = {name: master for name, master in masters.items() if not master.matches}
    if apart:
        name = max(apart, key=lambda name: apart[name].apart)
        of = f"{apart[name].apart:.2%} of {name}{and_more(len(apart) - 1, 'weight')}"
        what = f"{of} are no longer the master, rounded: the next step writes the master's values over them"
        todo = "After weights are loaded or changed, copy them into the masters: master.copy_(weight)."
        yield Advice(APART, what, todo, name, "", 0)


def _lost(parameter: torch.Tensor, update: float) -> float:
    """Return the share of the elements of which an update is below half a unit in the last place."""
    return float((units_of(values_of(parameter.detach())) / 2 > update).float().mean())


def _rate_of_half(trained: Sequence[torch.Tensor], update: float, rate: float | None) -> float | None:
    """Return the learning rate below which updates are lost of half of the elements but zeros; updates grow with it."""
    if not rate or not update:
        return None
    some = [values_of(one.detach()).flatten()[:: max(1, one.numel() // 65536)] for one in trained]
    units = torch.cat([units_of(one[one != 0]).cpu() for one in some])
    return float(units.median()) / 2 / update * rate if units.numel() else None


def _at_largest(group: _OneGroup, trained: Sequence[torch.Tensor], update: float) -> float | None:
    """Return the share that is lost where updates are as large as Adam's can be: lr (1 - beta1) / sqrt(1 - beta2)."""
    betas = group.settings.get(_MOMENTS)
    if not isinstance(betas, tuple | list) or len(betas) != 2 or not 0 <= float(betas[1]) < 1:
        return None
    largest = update * max(1.0, (1 - float(betas[0])) / math.sqrt(1 - float(betas[1])))
    return sum(_lost(one, largest) * one.numel() for one in trained) / sum(one.numel() for one in trained)


def _alike(parameters: Sequence[torch.Tensor], optimizer: Any) -> dict[tuple[Any, Any], list[torch.Tensor]]:
    """Return parameters that are kept in one way together."""
    found: dict[tuple[Any, Any], list[torch.Tensor]] = {}
    for one in parameters:
        slot = slot_of(optimizer, one)
        found.setdefault((one.dtype, slot and slot.kept), []).append(one)
    return found


def _optimizer_of(optimizer: Any) -> Any:
    """Return the optimizer inside of wrappers; RunError for what is none."""
    inner = optimizer
    while not isinstance(inner, torch.optim.Optimizer) and hasattr(inner, "optimizer"):
        inner = inner.optimizer
    if not all(hasattr(inner, name) for name in ("param_groups", "state", "step")):
        advice = "Give what torch.optim and its like make: it has param_groups, state and step()."
        raise RunError(f"check_storage(..., {type(optimizer).__name__})", "it is no optimizer", advice=advice)
    return inner
