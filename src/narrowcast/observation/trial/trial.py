"""A trial: a model run again and again from the same state, in fp32, in fp64 or in a region, with its backward."""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, fields as dataclass_fields, is_dataclass, replace
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from narrowcast.errors import RunError
from narrowcast.frontends.compiled.compiled_model import asked_before
from narrowcast.frontends.scripts.state import converted_script
from narrowcast.observation.restore.gradients import GradientsAside
from narrowcast.observation.restore.modules import restored
from narrowcast.observation.restore.process import Process
from narrowcast.observation.restore.variables import Variables
from narrowcast.observation.restore.weights import Weights
from narrowcast.observation.trial.isolation import Isolated, StandIn, Through, isolated, stand_ins
from narrowcast.observation.trial.own_parts import closes_over_itself
from narrowcast.output.words import counted
from narrowcast.runtime.devices.device import random_state
from narrowcast.runtime.torch_bridge import device_type_of, tensors_in
from narrowcast.runtime.torch_bridge.case import Case, Evaluate, figures_of, name_of, unpacked
from narrowcast.runtime.torch_bridge.inputs import Inputs, call_arguments
from narrowcast.runtime.torch_surface.autograd import is_leaf, is_trained
from narrowcast.runtime.torch_surface.dispatch import quietly, tree_leaves, tree_map, tree_map_only
from narrowcast.runtime.torch_surface.modules import compiled_of, without_wrapper

Loss = Callable[[Any], torch.Tensor]


@dataclass(slots=True)
class Outcome:
    """The result of a run: the output, detached, and gradients by the names of parameters (`input.0` of arguments).

    random_state: of torch's generators after the forward. loss: what was differentiated, if it is not of the output.
    """

    output: Any
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    random_state: tuple[bytes, ...] = ()
    loss: torch.Tensor | None = None


def check_reference(outcome: Outcome) -> None:
    """Raise RunError for an outcome with nothing to compare with."""
    if not outcome.gradients and not any(has_numbers(t) and t.numel() for t in tensors_of(outcome.output)):
        raise RunError(
            "compare", "the model returned no floating-point tensor to compare",
            advice="Give a model that returns some (a step its loss), or backward=True to compare gradients.",
        )  # fmt: skip


@dataclass(slots=True)
class Trial:
    """A model with its input. backward: False, True (a scalar output, or an output's `loss`, is the loss; otherwise a
    fixed random sum of the outputs), or a function that makes the loss of the output. reads: called with the model's
    output, once nothing observes it; gives: as soon as it is there, in the region. scale: of the loss, which gradients
    are divided by again. evaluate: the user's own, of the model. name: what reports call it.
    """

    model: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    backward: bool | Loss = False
    reads: Callable[[Any], None] | None = None
    gives: Callable[[Any], None] | None = None
    scale: float = 1.0
    evaluate: Evaluate | None = None
    name: str = ""
    _is_copied: bool | None = field(default=None, compare=False, repr=False)  # once that is known
    _process: Process | None = field(default=None, compare=False, repr=False)  # as each run begins
    _files: Variables | None = field(default=None, compare=False, repr=False)

    @staticmethod
    def of(verb: str, model: Any, inputs: Inputs, backward: bool | Loss = False) -> Trial:
        """Return the trial that a user wrote. Raise RunError for what cannot be run."""
        evaluate, name = (model.evaluate, model.name) if isinstance(model, Case) else (None, "")
        model, inputs = unpacked(verb, model, inputs)
        name = name or name_of(model)
        if isinstance(model, torch.export.ExportedProgram):
            model = model.module()
        if not callable(model):
            raise RunError(f"{verb}({type(model).__name__})", "it cannot be called", advice="Give a Module, a "
                           "function, an ExportedProgram or a Case.")  # fmt: skip
        trial = Trial(model, *call_arguments(verb, inputs), backward, evaluate=evaluate, name=name)
        lazy = [name for name, parameter in trial.parameters().items() if is_lazy(parameter)]
        if lazy:
            found = f"{counted(len(lazy), 'parameter', 'are')} not initialized yet: {lazy[0]} first"
            advice = "Call the model once on its inputs before: model(*inputs)."
            raise RunError(f"{verb}({name})", found, advice=advice)
        return trial

    def parameters(self) -> dict[str, torch.Tensor]:
        """Return the parameters by name; of a function those that it, and the functions which it calls, name."""
        if isinstance(self.model, torch.nn.Module):
            return parameters_of(self.model)
        process = self.process()
        return {} if process is None else _named(process.met)

    def call(self) -> Any:
        """Return the model's output on its inputs, as it is here and now."""
        return Isolated(self.model, self.args, self.kwargs)()

    def isolated(self, fake: bool = False, through: Through | None = None) -> AbstractContextManager[Isolated]:
        """Return a context that runs it and leaves model, arguments, random state; fake, through: see `isolated`."""
        return self._with_files(isolated(self.model, self.args, self.kwargs, fake, through, process=self.process()))

    def process(self) -> Process | None:
        """Return what a function may change, or a model that runs itself: each run begins with it as it was."""
        if self._is_copied is None:
            self._is_copied = isinstance(self.model, torch.nn.Module) and not closes_over_itself(self.model)
            self._process = None if self._is_copied else Process()
            with suppress(Exception):  # what its variables say of themselves is code of others
                if self._process is None:
                    self._files = Variables(self.model)
                else:
                    self._process.follow(self.model)
        return self._process

    def kept_weights(self, *others: Trial) -> Weights:
        """Return the weights of the model, and of those of other trials, to be restored after runs."""
        trials = (self, *others)
        processes = [process for trial in trials if (process := trial.process()) is not None]
        return Weights(*(trial.parameters() for trial in trials), processes=processes)

    def rewind(self) -> None:
        """Give what a function has changed back, for another run of the same."""
        if self._process is not None:
            self._process.restore()

    def measure(self) -> dict[str, float]:
        """Return what `evaluate` returns for the model, by name; nothing without one."""
        if self.evaluate is None:
            return {}
        return figures_of("Case(evaluate=...)", self.evaluate, self.evaluate(self.model))

    @property
    def device_type(self) -> str:
        """Where the model is."""
        return device_type_of(self.model) or device_type_of(self.args, self.kwargs) or "cpu"

    def weights(self) -> tuple[torch.Tensor, ...]:
        """Return the parameters and buffers of a model; of a function none."""
        model = self.model
        return (*model.parameters(), *model.buffers()) if isinstance(model, torch.nn.Module) else ()

    @property
    def is_made(self) -> bool:
        """Whether it is what compilers, exporters and scripts return: it has the casts that it was made with."""
        kinds = (torch.fx.GraphModule, torch.jit.ScriptModule, torch.jit.ScriptFunction)
        return self.is_compiled or isinstance(self.model, kinds)

    @property
    def is_compiled(self) -> bool:
        """Whether a compiler makes code of it, which runs only where nobody looks on."""
        return compiled_of(self.model) is not None or asked_before(self.model) is not None

    def original(self) -> Trial:
        """Return the trial of what a compiled model or function was compiled of; itself for another."""
        model: Any = compiled_of(self.model)
        if model is None and asked_before(self.model) is not None:
            model = getattr(self.model, "__wrapped__", None)
        return self if model is None else replace(self, model=model, _is_copied=None, _process=None, _files=None)

    def fp32_for_low(self) -> torch.dtype | None:
        """Return fp32, if weights or arguments are in 16 bits, which a copy in fp32 holds as they are; else None."""
        tensors = [*self.weights(), *self.parameters().values(), *tensors_in(self.args, self.kwargs)]
        return torch.float32 if any(t.dtype in (torch.float16, torch.bfloat16) for t in tensors) else None

    def run(
        self, region: AbstractContextManager[Any] | None = None, watching: AbstractContextManager[Any] | None = None,
        dtype: torch.dtype | None = None,
    ) -> Outcome:  # fmt: skip
        """Run it, and leave model, arguments, gradients and random state as they were.

        region: in which the forward runs. watching: opened around forward and backward. dtype: torch.float64 runs a
        copy of model and arguments in fp64.
        """
        loss, wanted = None, bool(self.backward) or torch.is_grad_enabled()
        with self.copied(dtype) as run, GradientsAside(self._wanted(run)) as gradients:
            with watching or nullcontext(), torch.set_grad_enabled(wanted and not torch.is_inference_mode_enabled()):
                output = self._forward(run, region or nullcontext(), gradients)
                state = random_state()
                # what a generator yielded is differentiated already
                if self.backward and not (isinstance(output, list) and output and not _requiring(output)):
                    loss = self._go_back(output, gradients)
            if self.reads is not None:
                self.reads(output)
            by_name = gradients.found()
        if self.scale != 1.0:
            by_name = {name: gradient.double() / self.scale for name, gradient in by_name.items()}
        return Outcome(detached(output), by_name, state, detached(loss) if callable(self.backward) else None)

    def _forward(self, run: Any, region: AbstractContextManager[Any], gradients: GradientsAside) -> Any:
        """Return the output; of a generator what it yields, one by one, each differentiated before the next, but for a
        loss of all of them.
        """
        with region:
            output = run()
            if self.gives is not None:
                self.gives(output)
            if isinstance(output, types.GeneratorType):
                items = [*output] if callable(self.backward) else []
                for item in output:
                    if self.backward and isinstance(item, torch.Tensor) and item.requires_grad:
                        self._go_back(item, gradients, retain=True)  # the next may come of the same calls
                    items.append(detached(item))
                return items
            return output

    def _go_back(self, output: Any, gradients: GradientsAside, retain: bool = False) -> torch.Tensor | None:
        """Differentiate the loss, which is returned, or else every output that has a gradient. Raise RunError if
        nothing can be.
        """
        loss = self.backward(output) if callable(self.backward) else _own_loss(output)
        if isinstance(loss, torch.Tensor) and loss.requires_grad:
            gradients.put_aside(leaves_of([loss]))
            total = loss if loss.dim() == 0 else loss.sum()
            _backward([total], None if self.scale == 1.0 else [torch.full_like(total, self.scale)], retain)
            return loss
        tensors = list(filter(has_numbers, _requiring(output)))
        if callable(self.backward) or not tensors:
            raise RunError(
                "backward=True", "no output of the model has a gradient",
                advice="Give backward=a function that makes the loss of the model's output, or omit backward.",
            )  # fmt: skip
        with quietly():
            weights = [w if self.scale == 1.0 else w * self.scale for w in map(_weights, tensors)]
        gradients.put_aside(leaves_of(tensors))
        _backward(tensors, weights, retain)
        return None

    @contextmanager
    def copied(self, dtype: torch.dtype | None) -> Iterator[Any]:
        """Yield the model with its arguments, to be run without a trace: a copy, or what cannot be copied itself."""
        if dtype is None and self.is_made:
            with restored(self.model), self._restored_around():
                # arguments that the run may write to and differentiate without the user's being touched
                own = lambda tensor: tensor.detach().clone().requires_grad_(tensor.requires_grad)  # noqa: E731
                yield Isolated(self.model, *tree_map_only(torch.Tensor, own, (self.args, self.kwargs)))
            return
        stand_in = None if dtype is None else _converted(dtype)
        of_script = None if dtype is None else lambda script: converted_script(script, dtype)
        run = isolated(
            self.model, self.args, self.kwargs, False, stand_in=stand_in, of_script=of_script, process=self.process()
        )
        with self._with_files(run) as isolated_run:
            yield isolated_run

    @contextmanager
    def _with_files(self, run: AbstractContextManager[Isolated]) -> Iterator[Isolated]:
        """Restore what classes and files of a model hold, of which a copy has no other."""
        with run as isolated_run, ExitStack() as stack:
            if self._files is not None:
                stack.callback(self._files.restore)
            yield isolated_run

    def _wanted(self, run: Any) -> dict[str, torch.Tensor]:
        """Return the tensors whose gradients are wanted: the model's parameters, and arguments that require them."""
        is_module = isinstance(run.model, torch.nn.Module)  # perhaps a copy
        parameters = parameters_of(run.model) if is_module else self.parameters()
        leaves = {name: p for name, p in parameters.items() if p.requires_grad}
        given = enumerate(tensors_in(run.args, run.kwargs))
        return leaves | {f"input.{number}": tensor for number, tensor in given if is_trained(tensor)}

    @contextmanager
    def _restored_around(self) -> Iterator[None]:
        """Restore what a compiled model, which is not copied, holds beside modules."""
        process = Process()
        with suppress(Exception):  # what it says of itself is code of others
            process.follow(self.original().model)
            process.hold_optimizers()
        try:
            yield
        finally:
            process.restore()


def _converted(dtype: torch.dtype) -> StandIn:
    """Return a function that converts each floating or complex tensor to another format."""

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        wide = dtype.to_complex() if tensor.is_complex() else dtype
        return tensor.detach().to(wide) if has_numbers(tensor) else tensor.detach().clone()

    return stand_ins(convert)


def parameters_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters of a module by name, and attributes that are trained."""
    named: dict[str, torch.Tensor] = {without_wrapper(name): p for name, p in model.named_parameters()}
    for path, module in model.named_modules():
        tensors = [(name, value) for name, value in vars(module).items() if isinstance(value, torch.Tensor)]
        held = {name: value for name, value in tensors if is_trained(value)}
        named |= {without_wrapper(f"{path}.{name}" if path else name): tensor for name, tensor in held.items()}
    return named


def _named(met: Iterable[tuple[str, Any]]) -> dict[str, torch.Tensor]:
    """Return the parameters of modules, and tensors, that variables name, each under the first name that it has: after
    its module's, if several modules have any.
    """
    known, modules = set[int](), list[tuple[str, dict[str, torch.Tensor]]]()
    for name, one in met:
        if isinstance(one, torch.nn.Module):
            new = {inner: p for inner, p in parameters_of(one).items() if id(p) not in known}
            known.update(map(id, new.values()))
            modules += [(name, new)] if new else []
    found: dict[str, torch.Tensor] = {}
    for name, new in modules:
        prefix = f"{name}." if len(modules) > 1 else ""
        found |= {prefix + inner: p for inner, p in new.items() if prefix + inner not in found}
    tensors = {name: one for name, one in met if isinstance(one, torch.Tensor) and id(one) not in known}
    return found | {name: tensor for name, tensor in tensors.items() if name not in found}


def leaves_of(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors whose gradients a backward of these adds to."""
    leaves = [t for t in tensors if is_leaf(t)]
    waiting, seen = [t.grad_fn for t in tensors], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (variable := getattr(node, "variable", None)) is not None:
            leaves.append(variable)
        waiting += [following for following, _ in node.next_functions]
    return leaves


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """Return the tensors in an output: nested in what pytree knows, in dataclasses, mappings and attributes' dicts."""
    return [leaf for leaf in tree_leaves(opened(tree)) if isinstance(leaf, torch.Tensor)]


def _requiring(output: Any) -> list[torch.Tensor]:
    return [t for t in tensors_of(output) if t.requires_grad]


def has_numbers(tensor: torch.Tensor) -> bool:
    """Return whether a tensor holds floating or complex numbers, of which errors are computed."""
    return tensor.is_floating_point() or tensor.is_complex()


def detached(tree: Any) -> Any:
    """Return the same without autograd; dataclasses and other mappings as dicts."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach(), opened(tree))


def opened(tree: Any) -> Any:
    """Return dataclasses and other mappings that pytree does not know as dicts."""

    def of(value: Any) -> Any:
        if is_dataclass(value) and not isinstance(value, type):
            return opened({f.name: getattr(value, f.name) for f in dataclass_fields(value)})
        return opened(dict(value)) if isinstance(value, Mapping) else value

    return tree_map(of, tree)


def run_whole(run: Callable[[], Any]) -> Any:
    """Return what a run returns, of a generator what it yields."""
    output = run()
    return [*output] if isinstance(output, types.GeneratorType) else output


def _own_loss(output: Any) -> Any:
    """Return a scalar output, or an output's `loss`; None if there is neither."""
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(named, torch.Tensor) and named.requires_grad:
        return named
    tensors = list(filter(has_numbers, _requiring(output)))
    return tensors[0] if len(tensors) == 1 and tensors[0].dim() == 0 else None


def _backward(tensors: list[torch.Tensor], weights: list[torch.Tensor] | None, retain: bool) -> None:
    try:
        torch.autograd.backward(tensors, weights, retain_graph=retain)
    except RuntimeError as error:
        if "backward through the graph a second time" not in str(error):
            raise
        raise RunError(
            "backward=True", "the model has differentiated its output itself",
            advice="Omit backward=: what the model does is captured and compared as it is.",
        ) from error  # fmt: skip


def _weights(tensor: torch.Tensor) -> torch.Tensor:
    """Return the gradient for an output: random signs, always the same, of one size that every format holds."""
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, tensor.shape, generator=generator, device="cpu") * 2 - 1
    size = 2.0 ** -round(math.log2(max(1, tensor.numel())) / 2)
    return (signs * size).to(tensor)
