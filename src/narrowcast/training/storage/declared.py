"""What is asked of a model, its optimizer and a declaration before anything is stored."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import torch
from torch.nn.parameter import UninitializedParameter

from narrowcast.core.policy import as_policy
from narrowcast.core.policy.storage import EIGHT_BITS, FP32, Storage, StorageRule
from narrowcast.errors import RunError
from narrowcast.output.words import and_more, counted
from narrowcast.runtime.torch_bridge import FORMATS, LOW, is_sharded_tensor
from narrowcast.runtime.torch_surface.modules import (
    formats_of_wrapper,
    has_schedule,
    is_sharded,
    optimized_by,
    without_wrapper,
)
from narrowcast.runtime.weights.stored import holder_of, stored_by
from narrowcast.training.storage.slots import StoredParameter


def declared_by(storage: Any) -> tuple[str, Storage]:
    """Return a declaration and its policy's name; RunError for a policy without one."""
    if isinstance(storage, Mapping):
        return "storage", Storage.of(storage)
    if storage is None:
        advice = 'Give a policy with a [storage] section, its file, or a dict: {"weight": "bf16"}, for example.'
        raise RunError("store(..., None)", "nothing is declared", advice=advice)
    policy = as_policy(storage)
    if policy.storage is None:
        advice = 'Write [storage] with weight = "bf16", for example, into its file.'
        raise RunError(f"store(..., {policy.name})", "the policy has no [storage] section", advice=advice)
    return policy.name, policy.storage


def slots_of(
    model: torch.nn.Module, optimizer: Any, declared: Storage
) -> tuple[list[StoredParameter], list[StorageRule]]:
    """Return what is to be stored, and rules that match nothing; RunError for what cannot be stored."""
    asked = f"store({type(model).__name__}, {type(optimizer).__name__})"
    _check_optimizer(asked, model, optimizer)
    if any(isinstance(one, UninitializedParameter) for one in model.parameters()):
        raise RunError(asked, "it has lazy layers that were never called", advice="Call the model once before.")
    is_in_ddp = isinstance(model, torch.nn.parallel.DistributedDataParallel)
    is_wrapped = is_in_ddp or isinstance(model, torch.nn.DataParallel)
    names, classes = _names(model.get_submodule("module") if is_wrapped else model)
    slots: dict[int, StoredParameter] = {}
    unmatched = [*declared.rules]
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            name = names.get(id(parameter))
            if name is None:
                found = f"a parameter of group {number}, of shape {tuple(parameter.shape)}, is none of the model's"
                raise RunError(asked, found, advice="Give the model whose parameters() the optimizer was made of.")
            if parameter.is_meta or parameter.is_inference():
                what = "on the meta device, without values" if parameter.is_meta else "made in inference mode"
                raise RunError(f"{asked}: {name}", f"it is {what}", advice="Make the model with values, then store it.")
            if holder_of(parameter) is not None:
                raise RunError(asked, f"{name} is stored already, of another optimizer", advice="Call its undo().")
            if id(parameter) in slots:
                found = f"{name} is in groups {slots[id(parameter)].group} and {number}"
                raise RunError(asked, found, advice="Put each parameter into one group.")
            kept = declared.of_parameter(name, classes[id(parameter)], number)
            unmatched = [rule for rule in unmatched if not rule.is_about(name, classes[id(parameter)], number)]
            own = FORMATS.get(parameter.dtype)
            if own is None or (parameter.dtype not in LOW and own.name != FP32):
                raise RunError(
                    f"{asked}: {name}", f"it is in {parameter.dtype}", advice="Only fp32, bf16, fp16 are stored."
                )
            kept = kept.checked(kept.weight or own.name, name)
            slots[id(parameter)] = slot = StoredParameter.of(name, parameter, kept, number)
            _check_slot(asked, slot, is_in_ddp)
    _check_statistics(asked, model, slots)
    return list(slots.values()), unmatched


def _check_statistics(asked: str, model: torch.nn.Module, slots: Mapping[int, StoredParameter]) -> None:
    """Raise RunError for a norm whose running statistics would be in another format than its weight: it cannot run."""
    for name, module in model.named_modules():
        statistics, slot = getattr(module, "running_mean", None), slots.get(id(getattr(module, "weight", None)))
        if slot is not None and isinstance(statistics, torch.Tensor) and statistics.dtype is not slot.dtype:
            kind = type(module).__name__
            found = f"{name} ({kind}) keeps statistics in {FORMATS.get(statistics.dtype)}, and runs in one format"
            advice = f'Add a rule: [[storage.rule]] class = "{kind}", weight = "fp32"; or call model.to(dtype) before.'
            raise RunError(asked, found, advice=advice)


def _check_optimizer(asked: str, model: Any, optimizer: Any) -> None:
    if not isinstance(model, torch.nn.Module):
        raise RunError(asked, "it is no torch.nn.Module", advice="Give the model, and then its optimizer.")
    if not all(hasattr(optimizer, name) for name in ("param_groups", "state", "step")):
        raise RunError(asked, "it is no optimizer", advice="Give what has param_groups, state and step().")
    if any(type(one).__name__ == "FullyShardedDataParallel" for one in model.modules()):
        raise RunError(asked, "FullyShardedDataParallel keeps weights in flat ones", advice="Use fully_shard (FSDP2).")
    if stored_by(optimizer) is not None:
        raise RunError(asked, "its parameters are stored already", advice="Call undo() of what nc.store returned.")
    if any(float(one.get("step", 1)) for one in map(optimizer.state.get, optimized_by(optimizer)) if one):
        advice = "Call nc.store with a new optimizer, and then load this one's: "
        advice += 'stored.load_state_dict(optimizer.state_dict(), convert_from="torch").'
        raise RunError(asked, "it has stepped, or made states that it may have: of other formats", advice=advice)
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        found, advice = "its steps compute the loss several times", "Train with weights in fp32."
        raise RunError(asked, found, advice=advice)
    if "step" in vars(optimizer) and not has_schedule(optimizer):
        raise RunError(asked, "something else stands in the place of its step", advice="Call nc.store before that.")


def _names(model: torch.nn.Module) -> tuple[dict[int, str], dict[int, tuple[str, ...]]]:
    """Return parameters' names, and the names of the classes that hold them, by identity."""
    names = {id(one): without_wrapper(name) for name, one in model.named_parameters()}
    classes: dict[int, tuple[str, ...]] = {}
    for module in model.modules():
        kinds = tuple(kind.__name__ for kind in type(module).__mro__[:-1] if kind is not torch.nn.Module)
        for one in module.parameters(recurse=False):
            classes[id(one)] = classes.get(id(one), ()) + kinds
    return names, classes


def _check_slot(asked: str, slot: StoredParameter, is_in_ddp: bool) -> None:
    name, parameter, kept, weight, gradient = slot.name, slot.parameter, slot.kept, slot.dtype, slot.dtype_of_gradient
    if kept.moments == EIGHT_BITS and find_spec("torchao") is None:
        advice = 'pip install torchao, or write moments = "bf16".'
        raise RunError(f'{asked}: moments = "8bit"', "torchao, which has them, is not installed", advice=advice)
    if is_in_ddp and weight is not parameter.dtype:
        found = f"DistributedDataParallel has made its buckets for {name} in {FORMATS[parameter.dtype]}"
        raise RunError(asked, found, advice="Call nc.store(model, optimizer, ...) before the model is wrapped.")
    if is_in_ddp and gradient is not weight:
        found = f"DistributedDataParallel reduces gradients of {name} in {kept.weight}, not in {kept.gradient}"
        raise RunError(asked, found, advice='Leave gradient out, or write weight = "fp32".')
    if is_sharded_tensor(parameter) and weight is not parameter.dtype:
        found = f"{name} is sharded in {FORMATS[parameter.dtype]} already"
        advice = f"Call model.to({weight}) before it is sharded (fully_shard, ...), and make the optimizer after."
        raise RunError(asked, found, advice=advice)
    if is_sharded_tensor(parameter) and gradient is not weight:
        found = f"gradients of {name} are kept in the format of its shards, {kept.weight}"
        advice = "Leave gradient out; MixedPrecisionPolicy(reduce_dtype=torch.float32) of fully_shard reduces in fp32."
        raise RunError(asked, found, advice=advice)


def notes_on(
    model: torch.nn.Module, optimizer: Any, slots: list[StoredParameter], unmatched: list[StorageRule]
) -> list[str]:
    """Return what a user should know of what is stored so."""
    notes, own = [], {id(slot.parameter) for slot in slots}
    left = [name for name, one in model.named_parameters() if id(one) not in own and holder_of(one) is None]
    if left:
        notes.append(f"Of no group of this optimizer, and as before: {left[0]}{and_more(len(left) - 1, 'parameter')}.")
    reduced = {formats_of_wrapper(one).get("reduce_dtype") for one in model.modules() if is_sharded(one)} - {None}
    for dtype in reduced:
        if dtype in LOW:
            notes.append(f"fully_shard reduces gradients in {FORMATS[dtype]}: MixedPrecisionPolicy(reduce_dtype=...).")
    if not isinstance(optimizer, torch.optim.Optimizer):
        text = "optimizer.state_dict() does not have what is kept besides the weights: save state_dict() of this, too."
        notes.append(f"{type(optimizer).__name__} is none of torch.optim's classes: {text}")
    notes += [f"no parameter matches the rule {dict(rule.asked)}." for rule in unmatched]
    frozen = sum(not slot.parameter.requires_grad for slot in slots)
    if frozen:
        notes.append(f"{counted(frozen, 'parameter')} in its groups that need no gradients are stored, too.")
    return notes
