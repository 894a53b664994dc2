"""A trial: a model run again and again from the same state, in fp32, in fp64 or in a region, with its backward."""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, is_dataclass
from dataclasses import fields as dataclass_fields
from typing import Any

import torch

from narrowcast.errors import RunError
from narrowcast.profiles.device import random_state_kept
from narrowcast.runs.isolation import isolated, restored
from narrowcast.runs.observer import quietly
from narrowcast.runs.subject import Subject
from narrowcast.torch_bridge import device_type_of, tensors_in
from narrowcast.torch_surface.dispatch import tree_leaves, tree_map

Loss = Callable[[Any], torch.Tensor]


@dataclass(slots=True)
class Outcome:
    """What one run gave: the output, detached, and gradients by the names of parameters (`input.0` of arguments)."""

    output: Any
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(slots=True)
class Trial:
    """A model with its input. backward: False, True (a scalar output, or an output's `loss`, is the loss; otherwise a
    fixed random sum of the outputs), or a function that makes the loss of the output.
    """

    model: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    backward: bool | Loss = False

    @staticmethod
    def of(verb: str, model: Any, args: Any, kwargs: Mapping[str, Any] | None, backward: bool | Loss) -> Trial:
        """From what a user wrote. RunError for what cannot be run."""
        if isinstance(model, Subject):
            if args or kwargs:
                raise RunError(f"{verb}(subject, ...) with arguments", "a Subject brings its own",
                               advice="Put them into the Subject.")  # fmt: skip
            model, args, kwargs = model.model, model.args, model.kwargs
        if isinstance(model, torch.export.ExportedProgram):
            model = model.module()
        if not callable(model):
            raise RunError(f"{verb}({type(model).__name__})", "it cannot be called", advice="Give a Module, a "
                           "function, an ExportedProgram or a Subject.")  # fmt: skip
        if isinstance(args, torch.Tensor) or not isinstance(args, tuple | list):
            raise RunError(
                f"{verb}(model, {type(args).__name__})", "the arguments of the model come as a tuple",
                advice=f"Write {verb}(model, (x,)), or kwargs={{...}}.",
            )  # fmt: skip
        return Trial(model, tuple(args), dict(kwargs or {}), backward)

    @property
    def device_type(self) -> str:
        """Where the model is."""
        return device_type_of(self.model) or device_type_of(self.args, self.kwargs) or "cpu"

    def run(
        self, region: AbstractContextManager[Any] | None = None, watching: AbstractContextManager[Any] | None = None,
        dtype: torch.dtype | None = None,
    ) -> Outcome:  # fmt: skip
        """Run it, and leave model, arguments, gradients and random state as they were.

        region: in which the forward runs. watching: opened around forward and backward. dtype: torch.float64 runs a
        copy of model and arguments in fp64.
        """
        with self._copy(dtype) as run, ExitStack() as stack:
            named = _named_parameters(run)
            before = {name: p.grad for name, p in named.items()}
            for p in named.values():
                p.grad = None
            try:
                stack.enter_context(watching or nullcontext())
                with torch.set_grad_enabled(bool(self.backward) and not torch.is_inference_mode_enabled()):
                    output = self._forward(run, region or nullcontext())
                    if self.backward:
                        output = self._differentiate(output)
                stack.close()
                found = {name: p.grad.detach() for name, p in named.items() if p.grad is not None}
            finally:
                for name, p in named.items():
                    p.grad = before[name]
            return Outcome(detached(output), found)

    def _forward(self, run: Any, region: AbstractContextManager[Any]) -> Any:
        """The output; of a generator what it yields, one by one, each differentiated before the next."""
        with region:
            output = run()
            if isinstance(output, types.GeneratorType):
                found = []
                for item in output:
                    if self.backward and isinstance(item, torch.Tensor) and item.requires_grad:
                        self.go_back(item)
                    found.append(detached(item))
                return found
            return output

    def _differentiate(self, output: Any) -> Any:
        if isinstance(output, list) and output and not any(t.requires_grad for t in tensors_of(output)):
            return output  # a generator's, differentiated already
        self.go_back(output)
        return output

    def go_back(self, output: Any) -> None:
        """Differentiate: the loss, or else every output that has a gradient. RunError if nothing can be."""
        loss = self.backward(output) if callable(self.backward) else _own_loss(output)
        if isinstance(loss, torch.Tensor) and loss.requires_grad:
            (loss if loss.dim() == 0 else loss.sum()).backward()
            return
        tensors = [t for t in tensors_of(output) if t.requires_grad and t.is_floating_point()]
        if callable(self.backward) or not tensors:
            raise RunError(
                "backward=True", "no output of the model has a gradient",
                advice="Give backward=a function that makes the loss of the model's output, or omit backward.",
            )  # fmt: skip
        with quietly():
            weights = [_weights(t) for t in tensors]
        torch.autograd.backward(tensors, weights)

    @contextmanager
    def _copy(self, dtype: torch.dtype | None) -> Iterator[Any]:
        """The model with its arguments, to be run without a trace: a copy, or what cannot be copied itself."""
        compiled = hasattr(self.model, "_orig_mod") or hasattr(self.model, "__narrowcast_compiled__")
        is_script = isinstance(self.model, torch.jit.ScriptModule | torch.jit.ScriptFunction)
        if dtype is None and (compiled or is_script or isinstance(self.model, torch.fx.GraphModule)):
            with restored(self.model), random_state_kept():
                args, kwargs = tree_map(_own, (self.args, self.kwargs))
                yield _Itself(self.model, args, kwargs)
            return
        stand_in = None if dtype is None else _Converted(dtype)
        with isolated(self.model, self.args, self.kwargs, fake=False, stand_in=stand_in) as run:
            yield run


@dataclass(frozen=True, slots=True)
class _Itself:
    model: Any
    args: Any
    kwargs: Any

    def __call__(self) -> Any:
        return self.model(*self.args, **self.kwargs)


class _Converted:
    """Each floating tensor in another format; the same one for the same."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self._made:
            made = tensor.detach().to(self._dtype) if tensor.is_floating_point() else tensor.detach().clone()
            if isinstance(tensor, torch.nn.Parameter):
                made = torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
            elif tensor.requires_grad:
                made.requires_grad_()
            self._made[id(tensor)] = (tensor, made)
        return self._made[id(tensor)][1]


def _own(value: Any) -> Any:
    """An argument that the run may write to and differentiate without the user's being touched."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


def _named_parameters(run: Any) -> dict[str, torch.Tensor]:
    """What gradients are asked of: the model's parameters, and arguments that require them."""
    model = run.model
    found: dict[str, torch.Tensor] = {}
    if isinstance(model, torch.nn.Module):
        found.update((name.replace("_orig_mod.", ""), p) for name, p in model.named_parameters() if p.requires_grad)
    for number, tensor in enumerate(tensors_in(run.args, run.kwargs)):
        if tensor.requires_grad and tensor.is_leaf:
            found[f"input.{number}"] = tensor
    return found


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """The tensors in an output: nested in what pytree knows, in dataclasses, in mappings and attributes' dicts."""
    found: list[torch.Tensor] = []
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            found += tensors_of([getattr(leaf, f.name) for f in dataclass_fields(leaf)])
        elif isinstance(leaf, Mapping):
            found += tensors_of(list(leaf.values()))
    return found


def detached(tree: Any) -> Any:
    """The same without autograd."""
    return tree_map(lambda v: v.detach() if isinstance(v, torch.Tensor) else v, tree)


def _own_loss(output: Any) -> Any:
    """A scalar output, or an output's `loss`; None if there is neither."""
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(named, torch.Tensor) and named.requires_grad:
        return named
    tensors = [t for t in tensors_of(output) if t.requires_grad and t.is_floating_point()]
    return tensors[0] if len(tensors) == 1 and tensors[0].dim() == 0 else None


def _weights(tensor: torch.Tensor) -> torch.Tensor:
    """The gradient that an output is given: random signs, always the same, of one size that every format holds."""
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, tensor.shape, generator=generator) * 2 - 1
    size = 2.0 ** -round(math.log2(max(1, tensor.numel())) / 2)
    return (signs * size).to(tensor)
