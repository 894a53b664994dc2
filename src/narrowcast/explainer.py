"""`explain`: run a model under a policy, on fake tensors where possible, and say what happened.

It stands above the front ends because each of them will be explained by it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from narrowcast.eager import autocast, record
from narrowcast.errors import NarrowcastError, RegionError
from narrowcast.formats import Format
from narrowcast.ledger import Ledger
from narrowcast.numerics import compare
from narrowcast.policy import DEVICE_TYPES, Policy, as_policy
from narrowcast.report import Comparison, Explanation
from narrowcast.torch_bridge import FORMATS, tensors_in, to_dtype

Metric = Callable[..., Mapping[str, float] | float]


@dataclass(slots=True)
class Subject:
    """A model with an input to run it on.

    model:  a Module or any callable; called as `model(*args, **kwargs)`.
    metric: what the model's user looks at: called with the model (or with nothing, if it takes nothing), returns a
            number or numbers by name.
    """

    model: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    metric: Metric | None = None
    name: str = ""

    def __post_init__(self) -> None:
        self.args = tuple(self.args)
        self.kwargs = dict(self.kwargs or {})
        self.name = self.name or getattr(self.model, "__name__", type(self.model).__name__)

    def run(self) -> Any:
        """The model's output on the input."""
        return self.model(*self.args, **self.kwargs)

    def measure(self) -> dict[str, float]:
        """The metric's figures by name; empty without a metric."""
        if self.metric is None:
            return {}
        try:
            takes_model = len(inspect.signature(self.metric).parameters) > 0
        except (TypeError, ValueError):
            takes_model = False
        value = self.metric(self.model) if takes_model else self.metric()
        if not isinstance(value, Mapping):
            return {getattr(self.metric, "__name__", "metric"): float(value)}
        numbers = {str(k): v for k, v in value.items() if isinstance(v, (int, float)) or torch.is_tensor(v)}
        return {k: float(v) for k, v in numbers.items()}


def explain(
    model: Callable[..., Any] | Subject,
    *args: Any,
    policy: Policy | str | None = None,
    dtype: torch.dtype | str | Format | None = None,
    device: str | None = None,
    run: bool = False,
    real: bool = False,
    **kwargs: Any,
) -> Explanation:
    """Run `model(*args, **kwargs)` in a region and explain each op's format and each cast.

    model:  a Module, a callable, or a Subject (then without args).
    policy, dtype: as for `autocast`.
    device: the device type whose lists hold; None is the model's own. One that this machine lacks, or that the model
            is not on, is stood in for: the device's policy decides over fake tensors on the cpu.
    run:    also run fp32 and the region for real and compare outputs, metric, time and memory (`comparison`).
    real:   do not try fake tensors.

    Nothing is computed and no weight is needed (meta tensors do) unless the model's control flow looks at values; then
    it runs for real, its buffers and the random state restored after. Raises what the model itself raises.
    """
    subject = model if isinstance(model, Subject) else Subject(model, args, kwargs)
    if isinstance(model, Subject) and (args or kwargs):
        raise NarrowcastError(
            asked="explain(subject, ...) with arguments", found="a Subject brings its own",
            advice="Put them into the Subject.",
        )  # fmt: skip
    own_device = _device_type(subject)
    device_type = device or own_device
    if device_type not in DEVICE_TYPES:
        raise RegionError(
            asked=f"explain on device type {device_type!r}", found="no autocast lists are known for it",
            advice=f"Give one of: {', '.join(DEVICE_TYPES)}.",
        )  # fmt: skip
    chosen = as_policy(policy)
    resolved = chosen.resolve(device_type)
    fast = torch.get_autocast_dtype(device_type) if dtype is None else to_dtype(dtype)
    stands_in = device_type != own_device or not _is_here(device_type)
    region = autocast("cpu" if stands_in else device_type, fast, policy=resolved if stands_in else chosen)
    if run and stands_in:
        raise RegionError(
            asked=f"running on {device_type}", found=f"the model is on {own_device}",
            advice=f"Leave run away, or move the model: model.to({device_type!r}).",
        )  # fmt: skip
    ledger, ran_on, note = _record(subject, region, device_type, stands_in, real)
    return Explanation(
        subject=subject.name,
        device_type=device_type,
        low=str(FORMATS[fast]),
        policy=chosen.name,
        digest=resolved.digest,
        ran_on=ran_on,
        note=note,
        ledger=ledger,
        comparison=_compare(subject, region) if run else None,
    )


def _device_type(subject: Subject) -> str:
    """Where the model is: its first parameter's or buffer's device, else the first tensor argument's, else cpu."""
    tensors: list[torch.Tensor] = []
    if isinstance(subject.model, torch.nn.Module):
        tensors += list(subject.model.parameters()) + list(subject.model.buffers())
    tensors += tensors_in(*pytree.tree_leaves((subject.args, subject.kwargs)))
    found = next((t.device.type for t in tensors), "cpu")
    return "cpu" if found == "meta" else found


def _is_here(device_type: str) -> bool:
    accelerator = torch.accelerator.current_accelerator()
    return device_type == "cpu" or (accelerator is not None and accelerator.type == device_type)


def _record(
    subject: Subject, region: autocast, device_type: str, stands_in: bool, real: bool
) -> tuple[Ledger, str, str]:
    """The ledger of one run, what it ran on, and a note if that is not what one would expect."""
    fake_name = f"fake cpu tensors standing in for {device_type}" if stands_in else "fake tensors (no compute)"
    failure: Exception | None = None
    if not real:
        try:
            with _faked(subject) as run, record() as ledger, region:
                run()
            return ledger, fake_name, ""
        except Exception as error:
            failure = error
    if _has_meta(subject):
        raise (
            failure
            if failure is not None
            else NarrowcastError(
                "explain with real=True", "the model has meta tensors", advice="Leave real away, or load the weights."
            )
        )
    with _restored(subject), record() as ledger, region:
        try:
            subject.run()
        except Exception:
            if not ledger.refusals and not ledger.calls:
                raise
            return ledger, "the model itself", _raised_note()
    note = f"Fake tensors do not carry it: {_first_line(failure)}" if failure is not None else ""
    return ledger, "the model itself", note


def _raised_note() -> str:
    import sys

    return f"The model RAISED under this policy: {_first_line(sys.exc_info()[1])}. What ran before is shown."


def _first_line(error: BaseException | None) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text[:160]}"


@contextmanager
def _faked(subject: Subject) -> Iterator[Callable[[], Any]]:
    """The subject's run with every tensor replaced by a fake one on the cpu, or on the device it is on."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    made: dict[int, torch.Tensor] = {}

    def fake(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
            return value
        if id(value) not in made:
            device = value.device if value.device.type != "meta" and _is_here(value.device.type) else "cpu"
            with mode:
                size, stride = value.size(), value.stride()
                copy = torch.empty_strided(size, stride, dtype=value.dtype, device=device)
            if isinstance(value, torch.nn.Parameter):
                copy = torch.nn.Parameter(copy, requires_grad=value.requires_grad)
            elif value.is_leaf:
                copy.requires_grad_(value.requires_grad)
            made[id(value)] = copy
        return made[id(value)]

    args, kwargs = pytree.tree_map(fake, (subject.args, subject.kwargs))
    model = subject.model
    if isinstance(model, torch.nn.Module):
        state = {
            name: fake(tensor)
            for name, tensor in (
                *model.named_parameters(remove_duplicate=False),
                *model.named_buffers(remove_duplicate=False),
            )
        }
        with mode:
            yield lambda: torch.func.functional_call(model, state, args, kwargs, tie_weights=False)
    else:
        with mode:
            yield lambda: model(*args, **kwargs)


def _has_meta(subject: Subject) -> bool:
    if not isinstance(subject.model, torch.nn.Module):
        return False
    return any(t.is_meta for t in (*subject.model.parameters(), *subject.model.buffers()))


@contextmanager
def _restored(subject: Subject) -> Iterator[None]:
    """Buffers (batch norm statistics) and the random state are as they were afterwards."""
    buffers = list(subject.model.buffers()) if isinstance(subject.model, torch.nn.Module) else []
    kept = [b.detach().clone() for b in buffers]
    try:
        with torch.random.fork_rng():
            yield
    finally:
        with torch.no_grad():
            for buffer, value in zip(buffers, kept, strict=True):
                if not torch.equal(buffer, value):
                    buffer.copy_(value)


def _compare(subject: Subject, region: autocast) -> Comparison:
    """fp32 (autocasting off) against the region, in evaluation of the same input and metric."""

    def in_fp32() -> Any:
        return subject.run()

    def in_region() -> Any:
        with region:
            return subject.run()

    with _restored(subject), torch.no_grad():
        before = subject.measure()
        with region:
            after = subject.measure()
        return compare(in_fp32, in_region, before, after)
