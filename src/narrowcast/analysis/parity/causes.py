"""Why two models differ: b runs with a's weights, attributes, choices and formats, one after the other, and each is a
cause if the distance falls with it. What is left is looked for among the calls.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch

from narrowcast.analysis.parity.attributes import Other, other_attributes, with_attributes
from narrowcast.analysis.parity.exchange import Kept, Results
from narrowcast.analysis.parity.partners import Partners
from narrowcast.analysis.parity.programs import Change, Live, OneProgram, distance
from narrowcast.analysis.parity.weights import MadeOfRows, different, pair_weights, with_parameters
from narrowcast.core.ledger.identity import CallId
from narrowcast.observation.trial.finiteness import is_floating
from narrowcast.observation.trial.trial import parameters_of
from narrowcast.output.words import and_more, counted, number_text
from narrowcast.reports.results.parity import Cause, Routed
from narrowcast.reports.results.verdicts import ATTRIBUTE, FORMAT, ROUTING, WEIGHTS
from narrowcast.runtime.torch_bridge import FORMATS

_OF_ALL, _MOST = 0.05, 0.9
"""A cause takes at least this part of the distance away; a confirmed one most of what was left."""
_NAMED, _MOST_ALONE = 3, 24


class Search:
    """The causes of a distance, found one after the other. left: the distance that is left; changes: what b has of a
    by then. runs: how often b ran. noise: what rounding may make of it.
    """

    def __init__(self, a: Live, b: Live, whole: float, noise: float, partners: Partners) -> None:
        self._a, self._b, self._partners, self.whole, self._noise = a, b, partners, whole, noise
        self.of_a, self.of_b = a.module, b.module
        self.causes: list[Cause] = []
        self.changes: list[Change] = []
        self._region_of = b
        self.left, self.runs = whole, 0
        self._pairs: dict[str, MadeOfRows] = pair_weights(self.of_a, self.of_b, partners)

    # -- what is tried -----------------------------------------------------------------------------------------------

    def weights(self) -> list[str]:
        """Give b the weights of a that hold other values; return notes on those without a partner."""
        apart, notes = different(self.of_a, self.of_b, self._pairs), []
        named = apart if not apart or self._helps(apart) else self._helpful(apart)
        if named:
            worst = sorted(named, key=lambda name: -named[name])
            what = f"{counted(len(named), 'parameter', 'differ')}: {_some_apart(worst, named)}"
            todo, module = f"load the same weights into both: {worst[0]} first", worst[0].rpartition(".")[0]
            self._try(WEIGHTS, what, todo, self._with_weights({name: self._pairs[name] for name in named}), module)
        rest = sorted(set(apart) - set(named), key=lambda name: -apart[name])
        if rest:
            other = counted(len(rest), "other parameter" if named else "parameter", "hold")
            notes.append(f"{other} other values, and b comes no nearer to a with a's: {_some_apart(rest, apart)}")
        alone = [name for name in parameters_of(self.of_b) if name not in self._pairs]
        return notes + (
            [f"{counted(len(alone), 'parameter')} of b without a partner in a: {alone[0]}"] if alone else []
        )

    def _helps(self, names: Collection[str]) -> bool:
        """Return whether the distance falls where b has a's weights of these names."""
        after = self._measure(self._with_weights({name: self._pairs[name] for name in names}))
        return self.left - after >= _OF_ALL * self.whole

    def _helpful(self, apart: Mapping[str, float]) -> dict[str, float]:
        """Return the weights that help by themselves, of those that are least apart: the others may be laid out, or
        folded, in another way.
        """
        nearest = sorted(apart, key=lambda name: apart[name])[:_MOST_ALONE]
        return {name: apart[name] for name in nearest if self._helps([name])}

    def attributes(self) -> None:
        """Give b the attributes of a: all at once, and then, if that helps, each by itself."""
        others = other_attributes(self.of_a, self.of_b, self._partners)
        if self.left <= self._noise:
            others = [other for other in others if not other.chooses_kernels]
        if not others:
            return
        before = self.left
        if before - self._measure(self._with_attributes(others)) < _OF_ALL * self.whole:
            return
        known = len(self.causes)
        for other in others:
            self._try(ATTRIBUTE, other.text, other.todo, self._with_attributes([other]), next(iter(other.modules)))
        if len(self.causes) == known:  # none helps without the others
            what = "; ".join(other.text for other in others[:_NAMED])
            todo, module = "; ".join(other.todo for other in others[:_NAMED]), next(iter(others[0].modules))
            self._try(ATTRIBUTE, what, todo, self._with_attributes(others), module)

    def choices(self, wanted: Mapping[CallId, torch.Tensor], routed: list[Routed]) -> None:
        """Have the calls of b choose as those of a do. routed: those that choose otherwise by themselves."""
        if not routed:
            return
        total, first = sum(one.rows for one in routed), routed[0]
        what = f"{counted(len(routed), 'call', 'choose')} otherwise, for {counted(total, 'row')}: "
        what += f"{first.module or '(root)'} {first.op} for {first.rows} of {first.of}"
        todo = "keep the router's product and its softmax in fp32 in both, or replay the choices of one in the other"
        after = self._distance(self._run(choices=wanted)[0])
        self._note(Cause(ROUTING, what, todo, self.left, after, module=first.module, place=first.place))

    def formats(self) -> None:
        """Have b compute in a's formats: its weights as a holds them, in a's region."""
        mine, other = (_format_of(model) for model in (self.of_b, self.of_a))
        regions = [_region_text(program) for program in (self._b, self._a)]
        if mine == other and regions[0] == regions[1]:
            return
        what = f"{regions[1]}weights in {other} in a, {regions[0]}weights in {mine} in b".replace("  ", " ")
        todo = "run both in one format: the same dtype of weights, the same region"
        changes = [*self.changes, self._in_formats_of_a]
        after = self._distance(self._run(changes, self._a)[0])
        if self._note(Cause(FORMAT, what, todo, self.left, after)):
            self._region_of, self.changes = self._a, changes

    @property
    def has_weights(self) -> bool:
        """Whether each parameter of b has a partner in a."""
        return all(name in self._pairs for name in parameters_of(self.of_b))

    # -- how it is tried ---------------------------------------------------------------------------------------------

    def with_results(self, results: Results) -> float:
        """Return the distance with these results of calls in the place of b's, besides what has been changed."""
        return self._distance(self._run(results=results)[0])

    def rest(self) -> Any:
        """Return the calls of b with all changes."""
        return replace(self._b, under=self._region_of.under).captured(self.changes)

    def _try(self, kind: str, what: str, todo: str, change: Change, module: str = "") -> None:
        after = self._measure(change)
        if self._note(Cause(kind, what, todo, self.left, after, module=module)):
            self.changes.append(change)

    def _note(self, cause: Cause, always: bool = False) -> bool:
        """Enter a cause, if enough of the distance goes with it. Return whether it was."""
        removes = cause.before - cause.after
        if not (always or removes >= _OF_ALL * self.whole):
            return False
        is_confirmed = removes >= _MOST * cause.before
        place = cause.place or self._place(cause.module)
        self.causes.append(
            Cause(cause.kind, cause.what, cause.todo, cause.before, cause.after, is_confirmed, cause.module, place)
        )
        self.left = cause.after
        return True

    def _measure(self, change: Change) -> float:
        try:
            return self._distance(self._run([*self.changes, change])[0])
        except Exception:  # of a model that does not run so
            return math.inf

    def _run(self, changes: list[Change] | None = None, region_of: Live | None = None, **given: Any) -> Any:
        self.runs += 1
        own = self.changes if changes is None else changes
        return self._b.exchanged(own, region_of or self._region_of, **given)

    def _distance(self, output: Any) -> float:
        return distance(self._a, self._b, output).rms

    def _with_weights(self, pairs: Mapping[str, MadeOfRows]) -> Change:
        def change(model: torch.nn.Module) -> AbstractContextManager[None]:
            of_a, own = parameters_of(self.of_a), parameters_of(model)
            return with_parameters(model, {n: p.of(of_a).to(own[n].dtype) for n, p in pairs.items()})

        return change

    def _with_attributes(self, others: list[Other]) -> Change:
        return lambda model: with_attributes(model, others, self.of_a)

    @contextmanager
    def _in_formats_of_a(self, model: torch.nn.Module) -> Iterator[None]:
        of_a, dtype = parameters_of(self.of_a), _dtype_of(self.of_a)
        tensors = {name: source.of(of_a) for name, source in self._pairs.items()}
        tensors |= _buffers_of(self.of_a, model, self._partners)
        for name, tensor in (*parameters_of(model).items(), *model.named_buffers()):
            if name not in tensors and is_floating(tensor) and dtype is not None:
                tensors[name] = tensor.detach().to(dtype)
        with with_parameters(model, tensors):
            yield

    def _place(self, module: str) -> str:
        return place_of(self._b, module)


def _some_apart(names: Sequence[str], apart: Mapping[str, float]) -> str:
    named = ", ".join(f"{name} {number_text(apart[name])} apart" for name in names[:_NAMED])
    return f"{named}{and_more(len(names) - _NAMED, 'parameter')}"


def place_of(program: OneProgram, module: str) -> str:
    """Return the first line of a module's calls, or of those inside of it."""
    inside = f"{module}." if module else ""
    of_module = (c for c in program.run.calls if c.id.module_path == module or c.id.module_path.startswith(inside))
    return next((f"{call.file}:{call.line}" for call in of_module if call.file), "")


def other_choices(a: Kept, b: Kept, partners: Partners) -> tuple[dict[CallId, torch.Tensor], list[Routed]]:
    """Return what calls of b are to choose, as their partners in a do, and those that choose otherwise of their own."""
    wanted, routed = {}, []
    for call, in_b in b.choices.items():
        path = partners.get(call.module_path, ())
        partner = replace(call, module_path=path[0]) if len(path) == 1 else None
        in_a = a.choices.get(partner) if partner is not None else None
        if in_a is None or in_a.shape != in_b.shape:
            continue
        wanted[call] = in_a
        rows = _rows_apart(in_a, in_b)
        if rows:
            of = in_b.numel() // (in_b.shape[-1] if in_b.dim() > 1 else 1)
            routed.append(Routed(call.module_path, call.op, b.places[call], rows, of))
    return wanted, routed


def _buffers_of(a: torch.nn.Module, b: torch.nn.Module, partners: Partners) -> dict[str, torch.Tensor]:
    """Return the floating buffers of a that modules of b have, too, under b's names."""
    modules, found = dict(a.named_modules()), {}
    for name, tensor in b.named_buffers():
        path, _, leaf = name.rpartition(".")
        other = partners.get(path, ())
        of_a = getattr(modules[other[0]], leaf, None) if len(other) == 1 and other[0] in modules else None
        if isinstance(of_a, torch.Tensor) and of_a.shape == tensor.shape and is_floating(tensor):
            found[name] = of_a
    return found


def _rows_apart(a: torch.Tensor, b: torch.Tensor) -> int:
    """Return in how many rows other elements are chosen, whatever their order."""
    if a.dim() < 2:
        return int((a != b).sum())
    return int((a.sort(-1)[0] != b.sort(-1)[0]).any(-1).sum())


def _dtype_of(model: torch.nn.Module) -> torch.dtype | None:
    """Return the dtype of most of a model's floating parameters."""
    sizes: dict[torch.dtype, int] = {}
    for tensor in model.parameters():
        if is_floating(tensor):
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.numel()
    return max(sizes, key=lambda dtype: sizes[dtype]) if sizes else None


def _format_of(model: torch.nn.Module) -> str:
    dtype = _dtype_of(model)
    return str(FORMATS.get(dtype, dtype)) if dtype is not None else "no format"


def _region_text(program: Live) -> str:
    region = program.region
    return "" if region is None else f"{FORMATS[region.fast_dtype]} by policy {region.policy.name}, "
