"""What a recording warns of: the things about autocasting that people ask in forums, each with the user's line."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from narrowcast.core.ledger import Advice, HidingBlock
from narrowcast.core.ops import named
from narrowcast.core.policy import DEVICE_TYPES, NOWHERE, Kind, Policy, Rule, Site, nearest_name
from narrowcast.formats import fp32
from narrowcast.frontends.eager.caching import follow_mutators
from narrowcast.observation.observer.door import Door
from narrowcast.output.words import counted
from narrowcast.runtime.regions.ruling import hidden_policy, ruled_device_types
from narrowcast.runtime.regions.stack import told_of_regions
from narrowcast.runtime.sites.python_stack import find_site, loop_line
from narrowcast.runtime.torch_bridge import FORMATS, LOW, OpFacts
from narrowcast.runtime.torch_surface.autograd import current_autograd_node, current_graph_task
from narrowcast.runtime.torch_surface.dispatch import TO_COPY, op_name, overload_name, without_functions
from narrowcast.runtime.torch_surface.modules import optimized_by, told_of_optimizer_steps
from narrowcast.runtime.torch_surface.state import is_enabled
from narrowcast.runtime.weights.stored import loses_nothing


class Adviser:
    """Advises on what a recording, or an observer of a loop, sees run. calls, casts: how many there have been. around:
    a region that is not the program's own, which it cannot close after the loss.
    """

    def __init__(self, advice: dict[Advice, int], door: Door, matches: Collection[str] = ()) -> None:
        """advice: where it is noted, and how often. matches: labels of rules that have matched."""
        self.advice, self._door, self._matches = advice, door, matches
        self.calls = self.casts = 0
        self.around: Any = None
        self._thread = threading.get_ident()
        self._tasks: set[int] = set()
        self._stepping = False
        self._converted: dict[torch.dtype, Advice] = {}
        self._has_stored = False
        self._trained: set[torch.dtype] = set()  # formats of what optimizers step
        self._low_results: dict[int, tuple[weakref.ref[torch.Tensor], str, Site]] = {}
        self._on_at_start = bool(ruled_device_types())
        self._open: list[_EnteredRegion] = []
        self._regions: dict[int, _Seen] = {}
        self._policies: dict[str, Policy] = {}  # of our regions, by digest
        self._sites: dict[Site, None] = {}  # of calls that were decided
        self._hidden: dict[HidingBlock, int] = {}  # how many calls ran in it

    def add(self, kind: str, what: str, todo: str, site: Site) -> Advice:
        """Note one piece of advice, once per line."""
        advice = Advice(kind, what, todo, *site.at)
        self.advice[advice] = self.advice.get(advice, 0) + 1
        return advice

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch optimizers' steps, and regions of any kind, as they are entered and left on this thread."""
        follow_mutators()  # they have us let go of what is swapped
        try:
            with (
                told_of_optimizer_steps(partial(self._told, self._step), before=True),
                told_of_optimizer_steps(partial(self._told, self._stepped)),
                told_of_regions(self, "recordings see regions"),
            ):
                yield
        finally:
            self._told(self._judge)

    def _told(self, look: Callable[..., None], *args: Any) -> None:
        """Inspect what a hook reports, and let the program go on."""
        self._door.run(f"what a recording advises ({look.__name__.strip('_')})", look, *args)

    # -- regions

    def entered(self, region: Any) -> None:
        """Note that a region is entered, unless it is the backward's own (custom_bwd, recomputations)."""
        self._told(self._entered, region)

    def left(self, region: Any, raised: bool) -> None:
        """Note that a region is left: add the calls and casts inside to what was seen of it."""
        self._told(self._left, region, raised)

    def _entered(self, region: Any) -> None:
        if threading.get_ident() != self._thread or current_graph_task() != -1:
            return
        seen = self._regions.get(id(region))
        if seen is None:
            # A torch.autocast of a framework's own is shown where the framework opens it; ours, at the user's loop.
            site = loop_line(frameworks=isinstance(region, torch.autocast))
            seen = self._regions[id(region)] = _Seen(region, site)
        if not isinstance(region, torch.autocast):
            self._policies[region.policy.digest] = region.policy
        kept = bool(self._open) and self._open[-1].hiding is not None
        self._open.append(
            _EnteredRegion(seen, self.calls, self.casts, None if kept else self._block(region, seen.site))
        )

    def _left(self, region: Any, raised: bool) -> None:
        if threading.get_ident() != self._thread:
            return
        opened = next((each for each in reversed(self._open) if each.seen.region is region), None)
        if opened is None:
            return
        self._open.remove(opened)
        calls = self.calls - opened.calls
        opened.seen.calls += calls
        opened.seen.casts += self.casts - opened.casts
        opened.seen.raised |= raised
        if opened.hiding is not None:
            self._hidden[opened.hiding] = self._hidden.get(opened.hiding, 0) + calls

    def _block(self, region: Any, site: Site) -> HidingBlock | None:
        """Return the block by which a region, just entered, hides those around it; None if it hides none."""
        if is_enabled(region):
            policy = hidden_policy(region.device) if isinstance(region, torch.autocast) else ""
            return HidingBlock(policy, region.device, site) if policy else None
        around = any(is_enabled(o.seen.region) and o.seen.region.device == region.device for o in self._open)
        return HidingBlock("", region.device, site) if around or self._on_at_start else None

    def _judge(self) -> None:
        """Advise on regions that cast nothing in the whole recording, one around a generator is entered step by step;
        and on blocks that keep a policy from ruling.
        """
        for policy in self._policies.values():
            self._judge_rules(policy)
        for block, calls in self._hidden.items():
            if calls:
                self.advice[block.advice(calls)] = 1
        if self._trained and self._trained.isdisjoint(LOW):  # low weights are copies of those
            for advice in self._converted.values():
                self.advice.pop(advice, None)
        if self._has_stored:
            return
        cast_on = {seen.region.device for seen in self._regions.values() if seen.casts}  # a block of few ops needs none
        for seen in self._regions.values():
            is_idle = seen.calls and not seen.casts and seen.region.device not in cast_on
            if is_idle and not seen.raised and is_enabled(seen.region):
                self.add(
                    "no casts",
                    f"the region on {seen.region.device} casts nothing: {counted(seen.calls, 'call')} ran in it, none "
                    "of which was to be cast",
                    "Is it for the device that the tensors are on? Are they in a low format already? Then remove it.",
                    seen.site,
                )

    def _judge_rules(self, policy: Policy) -> None:
        """Advise on the user's rules that matched nothing in the whole recording."""
        for rule in policy.rules:
            if rule.is_builtin or not self._sites or self._has_matched(rule):
                continue
            why = nearest_name(rule, self._sites) or f"no call of {rule.op} ran where it holds"
            site = Site(file=rule.origin.file, line=rule.origin.line) if rule.origin is not None else NOWHERE
            self.add(
                "rule without effect",
                f"policy {policy.name}: the rule {rule} matches nothing: {why}",
                "Correct the name, or delete the rule, unless other inputs, or another part of the model, need it.",
                site,
            )

    def _has_matched(self, rule: Rule) -> bool:
        """Return whether a rule has, or a built-in one that says the same."""
        return any(f"{label} ".startswith(f"{rule} ") for label in self._matches)

    @property
    def _is_left_open(self) -> bool:
        """Whether a region of the program's own is open."""
        is_ours = bool(self._open) and self._open[-1].seen.region is self.around
        return self._is_on and not is_ours

    @property
    def _is_on(self) -> bool:
        return is_enabled(self._open[-1].seen.region) if self._open else self._on_at_start

    # -- ops

    def runs(self, facts: OpFacts, tensors: list[torch.Tensor], is_on: bool, in_call: bool) -> None:
        """Advise on an op that is about to run. is_on: autocast is, around it; in_call: it is a part of a call."""
        if current_autograd_node() is not None:
            self.backward()
        elif is_on and facts.writes:
            self._skipped(facts, tensors)
        elif not is_on and not in_call and (facts.computes or facts.writes):
            self._outside(facts, tensors)

    def ran(
        self, facts: OpFacts, read: list[torch.Tensor], results: list[torch.Tensor], is_on: bool, at: Site | None = None
    ) -> None:
        """Note what an op returned that is no part of a call, and nobody decided about. at: where; found if None."""
        if facts.is_view or not is_on:
            self.passed_on(read, results)
        elif facts.op is TO_COPY:  # TorchScript's own
            self.casts += any(t.dtype in LOW for t in results)
        elif facts.computes:
            self.gave(facts, results, at)

    # -- steps and backwards

    def _stepped(self, optimizer: Any) -> None:
        self._stepping = False

    def _step(self, optimizer: Any) -> None:
        self._stepping = True
        with without_functions():
            self._trained |= {weight.dtype for weight in optimized_by(optimizer)}
        if self._is_left_open:
            self.add(
                "optimizer step in a region",
                f"{type(optimizer).__name__}.step() runs with autocasting on",
                "Close the region after the loss: weights are updated in their own format, and cast again after that.",
                loop_line(),
            )

    def backward(self) -> None:
        """Advise on ops that run in the backward; checked once per backward."""
        task = current_graph_task()
        if task in self._tasks:
            return
        self._tasks.add(task)
        if self._is_left_open and not torch.is_grad_enabled():  # with create_graph=True it is a part of a forward
            here = loop_line()
            if not here.file:  # autograd's own thread: the one that waits has the line
                here = loop_line(sys._current_frames().get(self._thread))
            self.add(
                "backward in a region",
                "backward() runs with autocasting on: its ops are cast as if they were the forward's",
                "Close the region after the loss. Autograd has the formats of the forward in any case.",
                here,
            )

    def decided(self, facts: OpFacts, site: Site, tensors: list[torch.Tensor]) -> None:
        """Note that a call in a region reads these tensors."""
        if len(self._sites) < _MOST_SITES:
            self._sites[site] = None
        for tensor in tensors:
            is_weight = isinstance(tensor, torch.nn.Parameter) and tensor.requires_grad
            if tensor.dtype in LOW and is_weight and loses_nothing(tensor):
                self._has_stored = True
            elif tensor.dtype in LOW and is_weight:
                known = self._converted.get(tensor.dtype)
                if known is not None:
                    self.advice[known] += 1
                    return
                self._converted[tensor.dtype] = self.add(
                    "weights in a low format",
                    f"{facts.id} reads a weight that is {FORMATS[tensor.dtype]} already: the model was converted "
                    "(half(), bfloat16(), to(dtype)) and runs in a region, too",
                    "Keep the weights in fp32, model.float(), where they are trained, or what completes them "
                    "(nc.store). For inference alone convert the model, and open no region.",
                    site,
                )
                return

    def gave(self, facts: OpFacts, results: list[torch.Tensor], at: Site | None) -> None:
        """Note that a call in a region returned these."""
        for tensor in results:
            if tensor.dtype in LOW:
                self._low_results[id(tensor)] = (weakref.ref(tensor), facts.id, at or find_site(with_names=False))

    def passed_on(self, arguments: list[torch.Tensor], results: list[torch.Tensor]) -> None:
        """Note that an op outside of regions, or a view, returned what has a region's low format still."""
        of_region = self._first_of_region(arguments)
        if of_region is not None:
            _, op, site = of_region
            for tensor in results:
                if tensor.dtype in LOW and self._first_of_region([tensor]) is None:
                    self._low_results[id(tensor)] = (weakref.ref(tensor), op, site)

    def _skipped(self, facts: OpFacts, tensors: list[torch.Tensor]) -> None:
        """Advise on an op that writes in a region, which autocast passes by."""
        name, is_out = op_name(facts.op), overload_name(facts.op).endswith("out")
        base = name if is_out else name.removesuffix("_")
        floats = [t for t in tensors if t.is_floating_point()]
        kind = listed_kinds(floats[0].device.type).get(base) if floats else None
        if self._stepping or kind is Kind.PROMOTE:
            return
        if kind in _FULL and all(t.dtype is torch.float32 for t in floats):
            return  # as a region would compute it
        if kind is not None and (base != name or is_out):
            formats = ", ".join(dict.fromkeys(str(FORMATS[t.dtype]) for t in tensors if t.dtype in FORMATS))
            self.add(
                "skipped by autocast",
                f"{facts.id} writes to its argument, and autocast passes such forms by: it runs in {formats}",
                f"Write the form that returns a new tensor (aten.{base}), which is cast ({kind.value}).",
                find_site(with_names=False),
            )

    def _outside(self, facts: OpFacts, tensors: list[torch.Tensor]) -> None:
        """Advise on an op that runs where autocasting is off."""
        low = self._first_of_region(tensors)
        if low is None:
            return
        base = op_name(facts.op).strip("_").removesuffix("_forward")
        meets = base not in named("computation.stores") and any(t.dtype is torch.float32 and t.dim() for t in tensors)
        precise = listed_kinds(tensors[0].device.type).get(base) in _FULL or base in named("backward.loss")
        if not (meets or precise):
            return
        dtype, op, site = low
        where = f"{site.file}:{site.line}"
        self.add(
            "left the region in a low format",
            f"{facts.id} outside of the region reads the {FORMATS[dtype]} result of {op} ({where})"
            + (f" beside {fp32}" if meets else ", which a region would compute in fp32"),
            "Cast the result where the region ends, x.float(), or move this op into the region.",
            find_site(with_names=False),
        )

    def let_go(self, ids: set[int]) -> None:
        """Keep no references to tensors of these ids."""
        self._low_results = {key: entry for key, entry in self._low_results.items() if key not in ids}

    def _first_of_region(self, tensors: list[torch.Tensor]) -> tuple[torch.dtype, str, Site] | None:
        """Return of the first tensor that a region made its dtype, and which op made it where."""
        for tensor in tensors:
            entry = self._low_results.get(id(tensor))
            if entry is not None and entry[0]() is tensor:
                return tensor.dtype, entry[1], entry[2]
        return None


@dataclass(slots=True, eq=False)
class _Seen:
    """A region of the recording: where it was first entered, and what happened in it."""

    region: Any
    site: Site
    calls: int = 0
    casts: int = 0
    raised: bool = False


@dataclass(slots=True, eq=False)
class _EnteredRegion:
    """A region between its enter and its exit; calls and casts that there were before.

    hiding: what it is, if it keeps a region around it from ruling, and nothing around it does so already.
    """

    seen: _Seen
    calls: int
    casts: int
    hiding: HidingBlock | None = None


_MOST_SITES = 4096
_FULL = (Kind.FULL, Kind.FULL_SET_DTYPE, Kind.FULL_APPEND_DTYPE)


@cache
def listed_kinds(device_type: str) -> dict[str, Kind]:
    """Return the ops on a device type's native lists by name, and what is done to them."""
    if device_type not in DEVICE_TYPES:
        return {}
    return {rule.op.split(".")[1]: rule.action.kind for rule in Policy.native(device_type).rules}
