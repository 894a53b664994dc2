"""`export`: torch.export with explicit casts, equal to eager."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, InputKind
from torch.fx import GraphModule, Node

from narrowcast.core.goals import CAST, FOLDED, Goal, GoalName, as_goal
from narrowcast.errors import CaptureError, GoalError, NarrowcastError, RegionError, first_line
from narrowcast.frontends.eager.asked import Under, asked_region
from narrowcast.frontends.graphs.capture import all_nodes, detached, fake_mode_of
from narrowcast.frontends.graphs.check import check_formats, tell_other_paths
from narrowcast.frontends.graphs.compiled import note_reading, report_graph
from narrowcast.frontends.graphs.explicit import Explicit, make_explicit, refuse_scripts
from narrowcast.frontends.race.candidates import Candidate
from narrowcast.frontends.race.placing import choose_now, place_graph, tell
from narrowcast.runtime.devices.abilities import for_target
from narrowcast.runtime.regions.marks import caches_as_in_eager_code
from narrowcast.runtime.sites.python_stack import is_user_file
from narrowcast.runtime.sites.sightings import tell_whole
from narrowcast.runtime.torch_bridge import device_type_of
from narrowcast.runtime.torch_bridge.case import unpacked
from narrowcast.runtime.torch_bridge.inputs import Inputs, call_arguments, called_with
from narrowcast.runtime.torch_surface.dispatch import TO_COPY
from narrowcast.runtime.torch_surface.fx import FakeTensor, all_frames, keeping_grad_modes, rename, updated_program
from narrowcast.runtime.torch_surface.jit import TracedModule
from narrowcast.runtime.torch_surface.patches import held
from narrowcast.runtime.torch_surface.state import autocast_off


def export(
    model: torch.nn.Module,
    inputs: Inputs = (),
    *,
    dynamic_shapes: Any = None,
    under: Under = None,
    strict: bool = False,
    fold_weights: bool = False,
    goal: GoalName | Goal = "exact",
    runs_in: str = "eager",
    made_for: str = "",
) -> ExportedProgram:
    """Export a module with plain casts, those of eager autocast, and no region; it needs no Narrowcast to run.

    inputs: as for `narrowcast.explain`. dynamic_shapes, strict: as for torch.export.export.
    under: the region in which it runs, as for `narrowcast.explain`. If it is None no region is opened: those around
        this call, and those inside the model, hold in any case.
    fold_weights: store each weight once, in the format in which it is used, where all its uses agree. The program then
        has no casts of these weights, and its state_dict their low format.

    goal: as for `narrowcast.compile`; candidates are timed on the inputs, without gradients.
    runs_in: `eager`, or `inductor` if the program is going to be compiled (AOTInductor): what a cast costs differs.

    made_for: file of the profile of the device that the program is made for, if it is not this one: what that device
        cannot run is avoided as the policy says (docs/reference/devices.md). `narrowcast.frontends.target.target_of`
        reads it off a program.

    Rules of the policy about the backward are refused (RegionError): an exported program has none. CaptureError if the
    program cannot be made explicit; GoalError, ProfileError; and what torch.export.export raises.
    """
    model, inputs = unpacked("export", model, inputs)
    if not isinstance(model, torch.nn.Module):
        raise RegionError(
            asked=f"export({type(model).__name__})", found="not a Module",
            advice="torch.export takes modules: write a Module whose forward calls the function.",
        )  # fmt: skip
    wanted = as_goal(goal)
    if runs_in not in ("eager", "inductor"):
        raise GoalError(f"runs_in={runs_in!r}", "not a choice", advice="Give 'eager' or 'inductor'.")
    asked = asked_region("export", under)
    args, kwargs = call_arguments("export", inputs)
    chosen = asked.policy
    if wanted.places:  # a goal never raises where fp32 runs
        chosen = chosen.repairing()
    around: AbstractContextManager[Any] = nullcontext()
    is_on = device_type_of(model)
    made_on = for_target(chosen, is_on or "cpu")[1]
    if asked.is_there:
        device = asked.device_type or is_on or device_type_of(args, kwargs) or "cpu"
        chosen, made_on = for_target(chosen, device, made_for)
        around = asked.on(device, chosen)
    elif made_for:
        raise RegionError(
            asked=f"export with made_for={made_for!r}", found="there is no region to make for it",
            advice="Give under=, too.",
        )  # fmt: skip
    with around:
        exported = traced_program(model, args, kwargs, dynamic_shapes=dynamic_shapes, strict=strict)
        try:
            if wanted.places:
                written = placed_program(exported, args, kwargs, wanted, fold_weights, runs_in == "inductor")
            else:
                written, explicit = explicit_program(exported, fold_weights)
                tell_other_paths(model, explicit.reading.program)
                tell_whole(explicit.reading.policies.values(), model)
            return note_target(written, made_on)
        except NarrowcastError:
            raise
        except Exception as error:
            raise CaptureError(
                asked=f"{type(model).__name__} exported with explicit casts",
                found=first_line(error),
                advice="Please report this with the model. torch.export.export alone would lose the region.",
            ) from error


# -- the program: the same signature, no region, weights in their compute format if asked ------------------------------


_WHY = "exported modules take eager code's paths"
_PLAIN = (torch.Tensor, torch.nn.Parameter, FakeTensor)


def traced_program(model: torch.nn.Module, args: Any, kwargs: Any = None, **options: Any) -> ExportedProgram:
    """Return torch.export's program of a model, with what export loses: which regions are ours, caches, paths."""
    refuse_scripts("export", model)
    with (
        torch.fx.traceback.preserve_node_meta(),  # regions of ours leave notes there
        caches_as_in_eager_code(),
        nullcontext() if options.get("strict") else held(torch.overrides, _WHY, has_torch_function=_without_modes),
        all_frames(is_user_file),
        keeping_grad_modes(),
        called_with(model, args, kwargs or {}),
    ):
        try:
            return torch.export.export(model, args, kwargs, **options)
        except Exception:
            for path, part in model.named_modules():
                if isinstance(part, torch.jit.ScriptModule) and not isinstance(part, TracedModule):
                    refuse_scripts("export", part, path)
            raise


def _without_modes(asked: Callable[..., bool]) -> Callable[..., bool]:
    """Answer for plain tensors as where nothing traces: by that nn.TransformerEncoderLayer chooses its path."""

    def has_torch_function(values: Sequence[Any]) -> bool:
        others = any(type(v) not in _PLAIN for v in values)
        return others and (torch.compiler.is_dynamo_compiling() or asked(values))

    return has_torch_function


def explicit_program(program: ExportedProgram, fold: bool = False) -> tuple[ExportedProgram, Explicit]:
    """Return the program with every format explicit; `program` is left as it is.

    Must be called with the regions open in which it was exported. fold: see `fold_weights`.
    """
    graph = program.graph_module
    inputs = _inputs(program)
    with fake_mode_of(graph, allow_non_fake_inputs=True):
        explicit = make_explicit(graph, inputs)
        check_formats(explicit.graph, inputs)
    report = report_graph(graph)
    note_reading(report, explicit.reading)
    report.after, report.edits = explicit.outcome.program, explicit.outcome.edits
    finished = finish_program(program, explicit.graph, fold)
    report.names = {number: node.name for number, node in explicit.nodes.items()}
    return finished, explicit


_TARGET = "narrowcast_target"


def note_target(program: ExportedProgram, target: str) -> ExportedProgram:
    """Return the program with a note of the device that it was made for, which is saved with it."""
    for node in program.graph.nodes:
        if node.op == "call_function":
            node.meta["custom"] = {**(node.meta.get("custom") or {}), _TARGET: target}
            break
    return program


def noted_target(program: ExportedProgram | GraphModule) -> str:
    """Return what `note_target` noted; empty if it did not."""
    noted = (node.meta.get("custom") or {} for node in program.graph.nodes)
    return next((str(custom[_TARGET]) for custom in noted if _TARGET in custom), "")


def is_exported(model: Any) -> bool:
    """Return whether a model is the module of a program that `export` made."""
    return isinstance(model, GraphModule) and bool(noted_target(model))


def finish_program(program: ExportedProgram, inner: GraphModule, fold: bool) -> ExportedProgram:
    """Return an exported program around a graph that was made of this one's."""
    graph = program.graph_module
    signature = _name_alike(program, inner)
    state, constants = dict(program.state_dict), dict(program.constants)
    for node in inner.graph.find_nodes(op="get_attr"):  # besides bodies; constants that export lifted are inputs now
        name = str(node.target)
        if not hasattr(inner, name) and hasattr(graph, name):
            setattr(inner, name, getattr(graph, name))
    if fold:
        fold_weights(inner, signature, state)
    inner.meta.update({k: v for k, v in graph.meta.items() if k not in inner.meta})
    for node in all_nodes(inner):
        if node.target is torch.ops.higher_order.wrap_with_autocast:
            raise CaptureError("an exported program with explicit casts", f"{node.target} is left in it")
        if node.op == "call_function":
            node.meta.setdefault("val", None)  # torch 2.11 notes none for what only loads decompositions
    inner.recompile()
    result = updated_program(program, inner, signature, state_dict=state, constants=constants)
    result.graph_module.meta.update(inner.meta)
    result.validate()
    return result


def placed_program(
    program: ExportedProgram, args: tuple[Any, ...], kwargs: dict[str, Any], goal: Goal, fold: bool, fused: bool
) -> ExportedProgram:
    """Return the program in the formats that the goal asks for; `program` is left as it is.

    fused: it is to be compiled: candidates are priced, and timed, as compiled code. Must be called with the regions
    open in which it was exported.
    """
    graph = program.graph_module
    signature = program.graph_signature
    weights = signature.inputs_to_parameters.keys() | signature.inputs_to_buffers.keys()
    placeholders = graph.graph.find_nodes(op="placeholder")
    positions = frozenset(n for n, node in enumerate(placeholders) if node.name in weights)
    pricing = replace(goal, weights=FOLDED if fold else CAST)
    with fake_mode_of(graph, allow_non_fake_inputs=True), torch.no_grad():
        placed = place_graph(graph, _inputs(program), pricing, fused, f"export, fused {fused}", positions, rests=False)
    report = report_graph(graph)
    note_reading(report, placed.explicit.reading)
    programs = {c.name: finish_program(program, c.graph, fold) for c in placed.left}

    def compiled(candidate: Candidate) -> Any:
        module = programs[candidate.name].module()
        run = torch.compile(module) if fused else module
        return lambda *_: run(*args, **kwargs)

    with torch.no_grad(), autocast_off():  # each candidate has its casts
        choice = choose_now(placed, compiled)
    return programs[tell(report, placed, choice)]


def _inputs(program: ExportedProgram) -> list[Any]:
    """Return the placeholders' fake tensors, each requiring grad as its weight does; of generators copies."""
    signature = program.graph_signature
    parameters, objects = signature.inputs_to_parameters, signature.inputs_to_lifted_custom_objs  # made when asked for
    inputs = []
    for node in program.graph_module.graph.find_nodes(op="placeholder"):
        value, target = node.meta.get("val"), parameters.get(node.name)
        weight = program.state_dict.get(target) if target is not None else None
        if isinstance(value, torch.Tensor) and weight is not None and weight.requires_grad:
            value = detached(value).requires_grad_()
        held_object = program.constants.get(objects.get(node.name, ""))
        if isinstance(held_object, torch.Generator):
            value = held_object.clone_state()
        inputs.append(value)
    return inputs


def _name_alike(program: ExportedProgram, graph: GraphModule) -> ExportGraphSignature:
    """Give the inputs their old names, and the signature the new names of the outputs."""
    old = program.graph_module.graph
    taken = {node.name for node in graph.graph.nodes}
    for before, after in zip(old.find_nodes(op="placeholder"), graph.graph.find_nodes(op="placeholder"), strict=True):
        if after.name != before.name and before.name in taken:
            clash = next(n for n in graph.graph.nodes if n.name == before.name)
            rename(clash, f"{before.name}_value")
        after.name = after.target = before.name  # `_rename` would not take names such as input
    given = graph.graph.output_node().args[0]
    outputs = [n.name if isinstance(n, Node) else n for n in (given if isinstance(given, (tuple, list)) else [given])]
    signature: ExportGraphSignature = copy.deepcopy(program.graph_signature)
    if len(outputs) != len(signature.output_specs):
        raise CaptureError("an exported program with explicit casts", "its outputs changed in number")
    for spec, name in zip(signature.output_specs, outputs, strict=True):
        if hasattr(spec.arg, "name") and isinstance(name, str):
            spec.arg = replace(spec.arg, name=name)
    return signature


# -- weights in the format in which they are used ----------------------------------------------------------------------


def fold_weights(graph: GraphModule, signature: ExportGraphSignature, state: dict[str, Any]) -> None:
    """Store each weight in the one format that all its readers cast it to; the casts go.

    graph and state are changed in place. Exact: the stored values are those that the casts would make. A weight that is
    read in more than one format, or returned, or written to, stays as it is; tied weights stay tied, or all stay.
    """
    placeholders = {node.name: node for node in graph.graph.find_nodes(op="placeholder")}
    kept_back = {spec.target for spec in signature.output_specs if spec.target is not None}
    wanted: dict[Memory, set[Any]] = {}
    read: list[tuple[Node, torch.Tensor]] = []
    for spec in signature.input_specs:
        if spec.kind not in (InputKind.PARAMETER, InputKind.BUFFER) or spec.target not in state:
            continue
        node, tensor = placeholders[spec.arg.name], state[spec.target]
        reads = {user.kwargs.get("dtype") if user.target is TO_COPY else None for user in node.users}  # None: as it is
        if spec.target in kept_back:
            reads.add(None)
        wanted.setdefault(_memory(tensor), set()).update(reads)
        if reads:
            read.append((node, tensor))
    folded: dict[Memory, torch.Tensor] = {}
    for node, tensor in read:
        memory = _memory(tensor)
        dtype, *others = wanted[memory]
        if others or dtype is None:
            continue
        if memory not in folded:
            stored, is_parameter = tensor.detach().to(dtype), isinstance(tensor, torch.nn.Parameter)
            folded[memory] = torch.nn.Parameter(stored, requires_grad=False) if is_parameter else stored
        _read_directly(graph, node, dtype)
    for target, tensor in list(state.items()):  # also names of tied weights that the graph does not read by
        if isinstance(tensor, torch.Tensor) and _memory(tensor) in folded:
            state[target] = folded[_memory(tensor)]


Memory = tuple[object, ...]


def _memory(tensor: torch.Tensor) -> Memory:
    """Return the same key for tied weights: one memory, viewed alike."""
    start = tensor.untyped_storage().data_ptr() or id(tensor)
    return start, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def _read_directly(graph: GraphModule, node: Node, dtype: torch.dtype) -> None:
    for user in list(node.users):
        user.replace_all_uses_with(node)
        graph.graph.erase_node(user)
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        node.meta["val"] = detached(value).to(dtype)
