"""A call of a run, as observers see it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from narrowcast.core.decide import Plan
from narrowcast.core.ledger.identity import CallId
from narrowcast.core.policy import Policy, Rule, Site, find_allowance
from narrowcast.observation.observer.module_calls import Who
from narrowcast.observation.observer.words import format_names, planned_names
from narrowcast.runtime.torch_bridge import OpFacts, tensors_in
from narrowcast.runtime.torch_bridge.calls import gather, slots_of


@dataclass(slots=True, eq=False)
class SeenCall:
    """A call of a run. args, kwargs: as the op was called, before the casts of the plan.

    formats: those of its input tensors, and those that the op computes in; None: the same. forward: of
    a backward call, the forward call whose gradients it computes. policy: of the region that is open, or was at the
    forward. is_cast: a conversion between formats, of autocasting's or of the user's. is_lost: looking at it raised.
    inside: the formats of listed ops that its kernel calls, as that of bilinear does.
    """

    who: Who
    facts: OpFacts
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    formats: tuple[str, str] | None = None
    plan: Plan | None = None
    rule: Rule | None = None
    forward: CallId | None = None
    is_cast: bool = False
    result: Any = None
    notes: dict[str, Any] = field(default_factory=dict)
    policy: Policy | None = None
    is_lost: bool = False
    inside: dict[str, None] = field(default_factory=dict)

    def __str__(self) -> str:
        """Which call it is, and where."""
        return f"{self.id} ({self.site.file}:{self.site.line})"

    @property
    def id(self) -> CallId:
        """Its identity, asked for while it runs."""
        return self.who.id

    @property
    def site(self) -> Site:
        """Its place, asked for while it runs."""
        return self.who.site

    @property
    def input_formats(self) -> str:
        """The formats of its input tensors."""
        return self._formats()[0]

    @property
    def computes(self) -> str:
        """The formats in which the op reads them."""
        return self._formats()[1]

    def _formats(self) -> tuple[str, str]:
        if self.formats is None:
            given = self.facts, self.args, self.kwargs
            inputs = computes = format_names([t.dtype for t in tensors_in(self.args, self.kwargs)])
            if self.rule is not None and self.plan is not None:
                computes = planned_names(self.plan, list(zip(slots_of(*given), gather(*given), strict=True)))
            computes = ",".join(self.inside) or computes
            self.formats = inputs, computes
        return self.formats

    def runs_inside(self, formats: str) -> None:
        """Note that its kernel calls an op that computes in these formats."""
        self.inside |= dict.fromkeys(formats.split(","))
        self.formats = None

    def without_tensors(self) -> SeenCall:
        """Return the call for a caller that keeps it, and not its tensors."""
        who = self.who.known()
        return replace(self, who=who, formats=self._formats(), args=(), kwargs={}, result=None, plan=None, notes={})

    def allows_nonfinite(self, argument: str = "") -> Rule | None:
        """Return the rule that allows what is not finite here, in an argument or in the call's output."""
        if self.policy is None:
            return None
        of = self.forward or self.id
        return find_allowance(self.policy.allowances, of.op, self.site, argument, of.number)

    @property
    def results(self) -> list[torch.Tensor]:
        """The tensors that it returned."""
        return tensors_in(self.result)
