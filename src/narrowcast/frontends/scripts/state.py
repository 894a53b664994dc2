"""What a script keeps between calls, in attributes that are no buffers: taken before a run, restored after it."""

from __future__ import annotations

import copy
from typing import Any

import torch

from narrowcast.frontends.scripts.callers import path_of
from narrowcast.runtime.torch_surface.dispatch import is_view
from narrowcast.runtime.torch_surface.jit import compiled, compiled_method, method_names

Path = tuple[str, ...]
_NOT_KEPT = (torch.ScriptModule, torch.ScriptObject)


class ScriptState:
    """`with ScriptState(model):` they have the values afterwards that they had when this was made.

    The attributes but weights that the methods of a script, and of the scripts in it, read or set.

    Compiled code reaches an attribute by its name alone, so what no method names is never written to.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        values, weights = _attributes(model), set(map(id, model.parameters()))
        self._kept = [
            (owner, name, value, value_of(value) if isinstance(value, torch.Tensor) else copy.deepcopy(value))
            for owner, name, value in values
            if not isinstance(value, _NOT_KEPT) and id(value) not in weights
        ]

    def __enter__(self) -> ScriptState:
        return self

    def __exit__(self, *raised: object) -> None:
        """Restore the attributes' values; a tensor that was written to is the same tensor still."""
        with torch.no_grad():
            for owner, name, value, as_it_was in self._kept:
                if not isinstance(value, torch.Tensor):
                    owner.setattr(name, as_it_was)
                    continue
                if owner.getattr(name) is not value:
                    owner.setattr(name, value)
                restore_value(value, as_it_was)


def value_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor's value, from which it is restored."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def restore_value(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Give a tensor its value again, and no gradient if it had none: a trace writes outside of the model's no_grad."""
    if not torch.equal(tensor, value):
        tensor.copy_(value)
    if tensor.requires_grad and not value.requires_grad and not is_view(tensor):
        tensor.detach_()


def converted_script(script: torch.jit.ScriptModule, dtype: torch.dtype) -> torch.jit.ScriptModule:
    """Return a copy whose floating tensors have this dtype, those besides weights and buffers, too."""
    with torch.no_grad():  # else the copies of weights are results, which get no gradient
        converted = copy.deepcopy(script)
    for weight, own in zip(converted.parameters(), script.parameters(), strict=True):
        weight.requires_grad_(own.requires_grad)
    converted.to(dtype)
    for owner, name, value in _attributes(converted):
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype is not dtype:
            owner.setattr(name, value.detach().to(dtype))
    return converted


def scripts_in(model: torch.nn.Module) -> list[torch.jit.ScriptModule]:
    """Return the scripts among a model's modules, and the model if it is one."""
    return [module for module in model.modules() if isinstance(module, torch.jit.ScriptModule)]


def _attributes(model: torch.nn.Module) -> list[tuple[Any, str, Any]]:
    scripts = scripts_in(model)
    owners = [(_owner(script, path), path[-1]) for script in scripts for path in sorted(_named_attributes(script))]
    return [(owner, name, owner.getattr(name)) for owner, name in owners if owner is not None]


def _named_attributes(script: torch.jit.ScriptModule) -> set[Path]:
    paths: set[Path | None] = set()
    for method in method_names(script):
        graph = compiled_method(script, method).graph
        paths.update(path_of(node) for node in graph.findAllNodes("prim::GetAttr"))
        for node in graph.findAllNodes("prim::SetAttr"):
            owner = path_of(node.inputsAt(0).node())
            paths.add(None if owner is None else (*owner, node.s("name")))
    return {path for path in paths if path}


def _owner(script: torch.jit.ScriptModule, path: Path) -> Any:
    """Return the compiled module that has the attribute; None where it is of something else, as of an object."""
    owner = compiled(script)
    for name in path[:-1]:
        owner = owner.getattr(name) if owner.hasattr(name) else None
        if not isinstance(owner, torch.ScriptModule):
            return None
    return owner if owner.hasattr(path[-1]) else None
