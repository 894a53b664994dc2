"""`explain`: run a model under a policy, on fake tensors where possible, and say what happened.

It stands above the front ends because each of them will be explained by it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from narrowcast.analysis.capture.capture import capture
from narrowcast.analysis.compare.compare import compare_with_fp32
from narrowcast.analysis.explain.cost import with_cost
from narrowcast.analysis.explain.eager_flow import EagerFlow
from narrowcast.analysis.explain.flow import with_row_and_flow
from narrowcast.analysis.explain.graphs import FRONT_ENDS, graphs_of, predict_costs
from narrowcast.analysis.explain.raised import failure_of
from narrowcast.analysis.explain.recurrent import RecurrentLayers
from narrowcast.analysis.record.graph_ledger import compare_with_eager, graph_ledger
from narrowcast.analysis.record.record import recording
from narrowcast.core.goals import Goal, GoalName, as_goal
from narrowcast.core.ops import named
from narrowcast.core.policy import DEVICE_TYPES
from narrowcast.core.policy.capabilities import one_format
from narrowcast.errors import GoalError, NarrowcastError, RegionError, first_line
from narrowcast.frontends.eager import autocast
from narrowcast.frontends.eager.asked import Under, asked_or_around
from narrowcast.frontends.eager.registered import leaves_no_kernels
from narrowcast.frontends.exported.export import is_exported
from narrowcast.frontends.graphs.explicit import refuse_scripts
from narrowcast.frontends.scripts.cast_already import cast_for_all
from narrowcast.frontends.scripts.compiling import around as scopes_around
from narrowcast.frontends.scripts.scopes import Scope
from narrowcast.frontends.scripts.script import script
from narrowcast.frontends.scripts.scripted import methods_of
from narrowcast.observation.observer.door import NOT_INSPECTED
from narrowcast.observation.restore.modules import restored
from narrowcast.observation.trial.trial import Trial, detached, run_whole
from narrowcast.observation.trial.uncast import NOTHING
from narrowcast.reports.results.explanation import Comparison, Explanation, rule_rows
from narrowcast.reports.results.ledger import Ledger
from narrowcast.runtime.devices.abilities import slow_note
from narrowcast.runtime.devices.device import is_here
from narrowcast.runtime.sites.python_stack import first_names
from narrowcast.runtime.torch_bridge import FORMATS
from narrowcast.runtime.torch_bridge.case import Case
from narrowcast.runtime.torch_bridge.inputs import Inputs
from narrowcast.runtime.torch_surface.dispatch import storage_key
from narrowcast.runtime.weights.stored import bytes_stored, is_stored_low


def explain(
    model: Callable[..., Any] | Case,
    inputs: Inputs = (),
    *,
    under: Under = None,
    device: str | None = None,
    run: bool = False,
    real: bool = False,
    front_end: str = "eager",
    goal: GoalName | Goal = "exact",
    backend: str = "inductor",
    times: bool = False,
) -> Explanation:
    """Run a model in a region and explain each op's format and each cast.

    model:  a Module, a callable, or a Case (then without inputs).
    inputs: a tensor is one argument; a tuple, the arguments; a mapping, the keyword arguments; `(tuple, mapping)`,
            both. A model that takes one tuple: `((pair,),)`.
    under:  a format ("bf16", torch.bfloat16), the name of a built-in policy, the path of a policy file, a Policy, or
            `narrowcast.autocast(...)`. None: the region around the call, ours or torch's, or else the policy native.
    device: whose lists hold; None is the region's or the model's own. One that this machine lacks, or that the model
            is not on, is stood in for: the device's policy decides over fake tensors on the cpu.
    run:    also run fp32 and the region for real and compare outputs, metric, time and memory (`comparison`).
    real:   do not try fake tensors.
    front_end: `eager`, or `script`: the graphs of `nc.script`, without
            running anything; or `compile` or `export`: the ledger is that of the graphs, with what the passes shared,
            folded and dropped, where graphs break, and whatever eager code decides otherwise (`differences`). The
            model runs for real, on a copy; with gradients on, the joint graph of forward and backward is shown, too.
            Where nothing is captured, the ledger is that of eager code.

    goal:   with the front ends compile and export, as for `narrowcast.compile`: which formats each call may have, what
            they cost, which was chosen, predicted against measured (`graphs[n].placement`).
    times:  for `to_trace()`: of eager code two more runs for real, whose second is timed call by call; of graphs
            (compile, export) what calls and casts take one by one, predicted by this device's profile.
    backend: what a goal's candidates are compiled with: `inductor`, or `eager`, `aot_eager`: nothing is fused.

    Nothing is computed and no weight is needed (meta tensors do) unless the model's control flow depends on values;
    then it runs for real, its buffers and the random state restored after. What raises under the policy and not in fp32
    is explained as far as it ran, with the call that raised and the policies that run it (`failure`); what raises in
    fp32, too, is raised.
    """
    trial = Trial.of("explain", model, inputs)
    own_device = trial.device_type
    asked = asked_or_around("explain", under, own_device, device)
    is_as_made = not asked.is_there and is_exported(trial.model)
    if is_as_made:
        asked = replace(asked, policy=NOTHING)
    device_type = asked.device_type or own_device
    stands_in = device_type != own_device or not is_here(device_type)
    wanted = as_goal(goal)
    _check(front_end, wanted, device_type, own_device, run or times, stands_in)
    if front_end in ("compile", "export"):
        refuse_scripts(f'explain(front_end="{front_end}")', trial.model)
    chosen = asked.policy
    if wanted.places:  # a goal never raises where fp32 runs
        chosen = chosen.repairing()
    resolved = chosen.resolve(device_type)
    fast = replace(asked, policy=chosen).fast_dtype_on(device_type)
    opened = replace(asked, dtype=fast).on("cpu" if stands_in else device_type, resolved if stands_in else chosen)
    low = str(FORMATS[fast])
    names = ("", "") if is_as_made else (chosen.name, resolved.digest)
    found = Explanation(trial.name, device_type, low, *names, "nothing was run", "", Ledger())
    found = replace(found, front_end=front_end)
    if front_end == "script":
        keeps_casts = asked.cache is not False and resolved.effective_cache != "off"
        around = scopes_around(device_type, fast, asked.enabled, keeps_casts, resolved)
        found = _scripted(found, trial.model, around)
    else:
        found = _run(found, trial, opened, stands_in, real, wanted, backend)
    timed = None
    if times and found.failure is None:
        predict_costs(found.graphs, device_type)
        for is_timed in (False, True) if front_end == "eager" else ():  # what is set up in a first run is not timed
            timed = capture(trial.model, (trial.args, trial.kwargs), under=opened, times=is_timed)
    if run and found.failure is None:
        found = _compared(found, trial, opened)
    if is_stored_low(trial.model):
        _drop_advice_on_copies(found.ledger)
    is_low = any(low in kind.computes.split(",") for kind in found.ledger.calls)
    return replace(
        found,
        note=_sentences(slow_note(device_type, FORMATS[fast]) if is_low else "", _AS_MADE * is_as_made, found.note),
        graphs=tuple(map(with_row_and_flow, found.graphs)),
        rules=rule_rows(chosen.rules, found.ledger),
        timed=timed,
        gradients=torch.is_grad_enabled(),
        stored=bytes_stored(trial.model),
    )


def _drop_advice_on_copies(ledger: Ledger) -> None:
    """Drop what a copy is advised whose original is stored in more digits than its weights have."""
    for advice in [one for one in ledger.advice if one.kind in ("weights in a low format", "no casts")]:
        del ledger.advice[advice]


def _scripted(asked: Explanation, model: Any, around: dict[str, Scope]) -> Explanation:
    """Explain the graphs of a script, of which nothing runs; Python code is scripted first."""
    methods = methods_of(model) or methods_of(script(model))
    graphs = tuple(method.explained(n, around) for n, method in enumerate(methods.values()))
    return replace(asked, ledger=graph_ledger(graphs), graphs=graphs)


def _run(
    asked: Explanation, trial: Trial, opened: autocast, stands_in: bool, real: bool, goal: Goal, backend: str
) -> Explanation:
    """Run the model as eager code, and through a graph front end if one is to be explained."""
    ran = _record(asked, trial, opened, stands_in, real)
    ledger = ran.ledger
    note = _sentences(ran.note, *(line for line in ledger.notes if line.startswith(NOT_INSPECTED)))
    ledger.notes.clear()  # said of the explanation as a whole
    if asked.front_end not in ("compile", "export") or ran.failure is not None:
        return replace(ran, note=_sentences(note, _script_note(trial)))
    graphs, eager = graphs_of(asked.front_end, trial, opened, goal, backend)
    of_graphs = graph_ledger(graphs)
    differences, other = compare_with_eager(ledger, of_graphs, graphs, first_names(trial.model))
    on = f"nothing was captured, so the eager run is listed, which ran on {ran.ran_on}"
    if any(graph.after is not None for graph in graphs):
        ledger, on = of_graphs, f"eager beside it ran on {ran.ran_on}"
    note = _sentences(note, eager, other, _script_note(trial))
    differences = () if goal.places else differences
    return replace(ran, ledger=ledger, ran_on=on, note=note, graphs=graphs, differences=differences)


def _check(front_end: str, goal: Goal, device_type: str, own_device: str, run: bool, stands_in: bool) -> None:
    if front_end not in FRONT_ENDS:
        raise NarrowcastError(
            asked=f"explain with front_end={front_end!r}", found="no such front end",
            advice=f"Give one of: {', '.join(FRONT_ENDS)}.",
        )  # fmt: skip
    if device_type not in DEVICE_TYPES:
        raise RegionError(
            asked=f"explain on device type {device_type!r}", found="no autocast lists are known for it",
            advice=f"Give one of: {', '.join(DEVICE_TYPES)}.",
        )  # fmt: skip
    if run and stands_in:
        raise RegionError(
            asked=f"running on {device_type}", found=f"the model is on {own_device}",
            advice=f"Omit run=, or move the model: model.to({device_type!r}).",
        )  # fmt: skip
    if front_end in ("compile", "export") and stands_in:
        raise RegionError(
            asked=f"graphs on {device_type}", found=f"the model is on {own_device}",
            advice="Omit front_end=, or move the model there: graphs are captured where the model is.",
        )  # fmt: skip
    if goal.places and front_end not in ("compile", "export"):
        raise GoalError(
            asked=f"explain with goal={goal.kind!r} and front_end={front_end!r}", found="formats are placed in graphs",
            advice="Give front_end=compile or front_end=export.",
        )  # fmt: skip


@leaves_no_kernels()
def _record(asked: Explanation, trial: Trial, region: autocast, stands_in: bool, real: bool) -> Explanation:
    why, device_type = "", asked.device_type
    failed: Exception | None = None
    has_meta = any(tensor.is_meta for tensor in trial.weights())
    process = trial.process()
    if process is not None and process.is_suspended and not real:
        real, why = True, "A generator keeps what it computes, which must not be fake tensors."
    if not real:
        try:
            flow = EagerFlow((region.policy,))
            layers = _layers(device_type, stands_in, True)
            recorded = recording(trial.kept_weights(), around=region)
            with trial.isolated(fake=True) as run, recorded as ledger, flow.observing(), region, layers as rnn:
                run_whole(run)
            why = _not_shown_by_fakes(ledger) or flow.unchecked
            if not why or has_meta:
                where = f"fake cpu tensors standing in for {device_type}" if stands_in else f"fake tensors{_NO_COMPUTE}"
                why = _sentences(why, _unlike(device_type, rnn, ledger))
                return replace(asked, ledger=ledger, flow=flow.flow, ran_on=where, note=why)
        except Exception as error:
            failed = error
            why = f"Fake tensors do not carry it: {first_line(error)}"
    itself = f"the model itself, on the cpu with {device_type}'s lists" if stands_in else "the model itself"
    if has_meta:
        advice = "Omit real=, or load the weights."
        raise failed or NarrowcastError("explain with real=True", "the model has meta tensors", advice=advice)
    weights = trial.kept_weights()
    with ExitStack() as stack:
        stack.enter_context(weights)
        run, ledger = stack.enter_context(trial.isolated()), stack.enter_context(recording(weights, region))
        stack.enter_context(region)
        rnn = stack.enter_context(_layers(device_type, stands_in, False))
        try:
            run_whole(run)
        except Exception as error:
            failed = error
        else:
            return replace(asked, ledger=ledger, ran_on=itself, note=_sentences(why, _unlike(device_type, rnn, ledger)))
    if ledger.refusals:
        note = f"The model RAISED under this policy: {first_line(failed)}. What ran before is shown."
        return replace(asked, ledger=ledger, ran_on=itself, note=note)
    failure = failure_of(trial, region, failed)
    if failure is None:
        raise failed
    return replace(asked, ledger=ledger, ran_on=itself, failure=failure)


def _sentences(*notes: str) -> str:
    present = [note for note in notes if note]
    return " ".join([*(note if note.endswith(".") else f"{note}." for note in present[:-1]), *present[-1:]])


def _not_shown_by_fakes(ledger: Ledger) -> str:
    """Return a sentence naming the ops of a fake run that a real one would refuse, or cast inside; or nothing."""
    strict = {lack.op for lack in one_format() if not lack.low_first}
    mixed = sorted({k.op for k in ledger.calls if k.op in strict and "," in k.computes})
    if mixed:
        return f"Fake tensors let {', '.join(mixed)} have several formats, which real ones may not."
    made = {(c.module_path, c.argument): c.dst for c in ledger.casts if c.how == "copied" and c.kind == "weight"}
    for cast in ledger.casts:  # torch's cache keeps no formats apart
        if cast.how == "cached" and made.get((cast.module_path, cast.argument), cast.dst) != cast.dst:
            return f"Fake tensors do not show that the weight cache gives {cast.argument} in another format than asked."
    unseen = {f"aten.{name}" for name in named("inside.unseen_on_fakes")}
    ops = {k.op.rpartition(".")[0] for k in ledger.calls if k.action == "no rule"} & unseen
    return f"Kernels of {', '.join(sorted(ops))} call ops that are cast, which fake tensors do not show." if ops else ""


_RECURRENT = "aten.mkldnn_rnn_layer"
"""The cpu's kernel, which a script calls where nothing replaces it."""


def _layers(device_type: str, stands_in: bool, is_fake: bool) -> AbstractContextManager[RecurrentLayers | None]:
    is_other = stands_in and device_type != "cpu"
    return RecurrentLayers(device_type, is_fake) if is_other else nullcontext()


def _unlike(device_type: str, layers: RecurrentLayers | None, ledger: Ledger) -> str:
    """Return a note if a recurrent layer ran as on the cpu where another device was asked for."""
    if layers is None or not (layers.unlike or any(k.op.startswith(_RECURRENT) for k in ledger.calls)):
        return ""
    return f"Recurrent layers run another kernel on {device_type}, whose casts are not shown."


_SCRIPT_NOTE = (
    "It holds TorchScript code, which torch casts by lists of its own, without policies; those conversions are counted "
    "as calls of aten._to_copy, not as casts. front_end='script' shows what nc.script makes of it."
)
_CAST_NOTE = (
    "It holds TorchScript code that is cast already, and was loaded from a file or frozen: a region around it casts it "
    "once more. nc.script(part) keeps its casts as they are."
)


def _script_note(trial: Trial) -> str:
    """Return a note if the model is scripted or traced, or a part of it is."""
    model = trial.model
    parts = model.modules() if isinstance(model, torch.nn.Module) else [model]
    scripts = [part for part in parts if isinstance(part, (torch.jit.ScriptModule, torch.jit.ScriptFunction))]
    cast = [part for part in scripts if not methods_of(part) and cast_for_all(part)]
    return _sentences(*[_SCRIPT_NOTE] * bool(scripts), *[_CAST_NOTE] * bool(cast))


_NO_COMPUTE = " (no compute)"
_AS_MADE = (
    "nc.export has made it: it is explained as it runs, with its own casts. Give under= to put a region around it."
)


def _compared(found: Explanation, trial: Trial, region: autocast) -> Explanation:
    """Return the explanation with the comparison; with the failure, if the model raises in the region alone."""
    try:
        comparison = _compare(trial, region)
    except NarrowcastError:
        raise
    except Exception as error:  # of values, which fake tensors do not have
        failure = failure_of(trial, region, error)
        if failure is None:
            raise
        return replace(found, failure=failure)
    ran_on = f"{found.ran_on.removesuffix(_NO_COMPUTE)}; measured on {found.device_type}"
    return replace(found, comparison=comparison, ran_on=ran_on)


def _compare(trial: Trial, region: autocast) -> Comparison:
    """Compare fp32 (autocasting off) with the region, on the same input and metric, with gradients on if they are."""

    def run(call: Callable[[], Any], around: AbstractContextManager[Any]) -> Any:
        with around:
            return detached(run_whole(call))

    differences, weights, dtype = compare_with_fp32(trial, region)
    with ExitStack() as stack:
        stack.enter_context(leaves_no_kernels())  # those of the comparison are gone: times are torch's own
        stack.enter_context(weights)
        stack.enter_context(restored(trial.model))
        before = trial.measure()
        with region:
            after = trial.measure()
        call = trial.call if trial.is_made else stack.enter_context(trial.isolated(through=_called))
        reference = call if dtype is None else stack.enter_context(trial.original().copied(dtype))
        runs = partial(run, reference, nullcontext()), partial(run, call, region)
        kept = [t for t in trial.weights() if t.layout is torch.strided]
        weight_bytes = sum({storage_key(t): t.untyped_storage().nbytes() for t in kept}.values())
        return with_cost(differences, (before, after), runs, weight_bytes, trial.rewind)


def _called(model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return model(*args, **kwargs)
