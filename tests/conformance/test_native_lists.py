"""`decide` against the kernels that torch registers: op by op, on every device type, without any of the devices.

Under FakeTensorMode fake tensors run the real Autocast kernels. A probe below them sees the casts that they make and
stops at the first op that is none, so that nothing needs a device.
"""

import contextlib
import json
import logging
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal import autocast_test_lists
from torch.utils._python_dispatch import TorchDispatchMode

import narrowcast as nc
from narrowcast.frontends.eager.registered import _staying, install_visiting, remove_visiting
from narrowcast.frontends.eager.watch import add_watcher, remove_watcher
from narrowcast.runtime.torch_bridge import DTYPES, find_op

DEVICE_TYPES = ("cpu", "cuda", "xpu", "mps", "mtia", "maia")
# Kernels that a build registers only with its device's libraries.
NEEDS_LIBRARY = {"cuda": {"aten._cudnn_rnn.default"}}
# torch 2.13 registers AutocastMAIA kernels, but fake maia tensors do not reach them.
FAKED = ("cpu", "cuda", "xpu", "mps", "mtia")


@pytest.fixture(scope="module")
def registered():
    """By device type what a fresh process has registered: here, other tests have added kernels of ours."""
    code = (
        "import json\nfrom read_torch import autocast_kernels\n"
        f"print(json.dumps({{d: autocast_kernels(d) for d in {tuple(DEVICE_TYPES)!r}}}))"
    )
    tools = Path(__file__).parents[2] / "tools"
    done = subprocess.run([sys.executable, "-c", code], cwd=tools, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize("device_type", DEVICE_TYPES)
def test_the_lists_are_those_of_the_installed_torch(device_type, registered):
    """Drift is reported op by op."""
    registered = set(registered[device_type])
    listed = {rule.op for rule in nc.Policy.native(device_type).rules}
    missing = sorted(registered - listed)
    gone = sorted(listed - registered - NEEDS_LIBRARY.get(device_type, set()))
    assert not missing, f"torch {torch.__version__} registers for {device_type}, and no rule names: {missing}"
    assert not gone, f"rules for {device_type} that torch {torch.__version__} does not register: {gone}"


def test_every_op_of_the_installed_torch_is_a_known_name():
    """A policy may name any of them."""
    from narrowcast.core.policy.known_ops import known_ops

    found = {n.replace("::", ".") for n in torch._C._dispatch_get_all_op_names() if n.startswith("aten::")}
    found = {n if n.count(".") == 2 else f"{n}.default" for n in found}
    assert not found - set(known_ops()), sorted(found - set(known_ops()))


class _Stop(Exception):
    """The first op below the casts was reached."""


class _Planned(Exception):
    """Our kernel has decided, and must not run."""


class _Plan:
    """A watcher that takes the first plan and stops there."""

    steps_graphs = False

    def __init__(self):
        self.plan = None

    def wants_whole(self, op, device_type):
        return False

    def begin(self, call):
        self.op, self.plan, self.tensors = call.facts.id, call.plan, call.tensors
        raise _Planned


class _Probe(TorchDispatchMode):
    """Lists the casts that torch's own Autocast kernel makes, and stops at the first op below."""

    def __init__(self):
        super().__init__()
        self.casts = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)
        if func is torch.ops.aten._to_copy.default and kwargs.get("dtype") is not None:
            self.casts.append((id(args[0]), kwargs["dtype"]))
            return func(*args, **kwargs)
        raise _Stop


def cases(device_type):
    """(name, arguments, keyword arguments, where the function is) of torch's own autocast test lists."""
    device = torch.device(device_type)
    if device_type == "cpu":
        lists = autocast_test_lists.AutocastCPUTestLists(device)
    else:
        lists = autocast_test_lists.AutocastTestLists(device)
    for family, entries in vars(lists).items():
        for name, args, *more in entries:
            kwargs = next((m for m in more if isinstance(m, dict)), {})
            if family.startswith("methods"):
                yield family, name, lambda n=name, a=args: getattr(a[0], n)(*a[1:])
                continue
            home = {"nn": torch._C._nn, "linalg": torch.linalg}.get(family.partition("_")[0], torch)
            if family == "banned":
                home = torch.nn.functional
            function = getattr(home, name, None) or getattr(torch.nn.functional, name, None)
            if function is not None:
                yield family, name, lambda f=function, a=args, k=kwargs: f(*a, **k)


@contextlib.contextmanager
def native_region(device_type, low):
    """Autocast on for a device type that is not here: torch.autocast would switch itself off."""
    before = torch.get_autocast_dtype(device_type)
    torch.set_autocast_enabled(device_type, True)
    torch.set_autocast_dtype(device_type, low)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        torch.set_autocast_enabled(device_type, False)
        torch.set_autocast_dtype(device_type, before)


def plans(device_type, found, low):
    """For each case that reaches a kernel of this device type: what our kernel there would do."""
    ops = tuple(find_op(r.op) for r in nc.Policy.native(device_type).rules if find_op(r.op) is not None)
    install_visiting(ops, device_type)
    try:
        for family, name, run in found:
            watcher = _Plan()
            add_watcher(watcher)
            try:
                with contextlib.suppress(Exception), native_region(device_type, low):
                    run()
            finally:
                remove_watcher(watcher)
            if watcher.plan is not None:
                yield family, name, run, watcher
    finally:
        remove_visiting(device_type)


def difference(planned, run, device_type, low):
    """What torch's own kernel does otherwise than planned; empty if nothing."""
    probe, error = _Probe(), None
    try:
        with probe, native_region(device_type, low):
            run()
    except Exception as raised:
        error = raised
    if planned.plan.refused:
        return "" if error is not None and not isinstance(error, _Stop) else "decide refuses, torch does not"
    wanted = [
        (id(t), str(DTYPES[dst]))
        for (_, t), dst in zip(planned.tensors, planned.plan.formats, strict=True)
        if dst is not None
    ]
    seen = [(tensor, str(dtype)) for tensor, dtype in probe.casts]
    if planned.plan.set_dtype or planned.plan.append_dtype:  # some kernels convert, some take dtype=
        first = planned.tensors[0][1]
        seen = [cast for cast in seen if cast != (id(first), "torch.float32")]
    return "" if sorted(wanted) == sorted(seen) else f"planned {wanted}, torch made {seen}; {error!r:.100}"


@pytest.fixture
def no_compute():
    """Fake tensors, without gradients, warnings or logged tracebacks."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.disabled = True
    with warnings.catch_warnings(), FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        warnings.simplefilter("ignore")
        yield
    logger.disabled = False


@pytest.mark.parametrize("device_type", FAKED)
def test_decide_plans_the_casts_that_torch_makes(device_type, no_compute):
    """Every entry whose op has a kernel here: the same casts, of the same tensors, to the same dtypes."""
    low = torch.bfloat16 if device_type == "cpu" else torch.float16
    planned = list(plans(device_type, list(cases(device_type)), low))
    staying = set(_staying.get(device_type, {}))
    wrong = []
    for family, name, run, plan in planned:
        if plan.op in staying:  # another test of this process left a kernel of ours: torch's cannot be seen
            continue
        found = difference(plan, run, device_type, low)
        if found and name in plan.op:  # a composite op that is not listed may convert before it calls one that is
            wrong.append(f"{family} {name} ({plan.op}): {found}")
    assert not wrong, "\n".join(wrong)
    checked = {plan.op for *_, plan in planned} - staying
    expected = {"cpu": 35, "cuda": 80, "xpu": 80, "mps": 70, "mtia": 80}[device_type]
    assert len(checked) >= expected - len(staying), f"only {len(checked)} ops were reached: {sorted(checked)}"
    refused = {plan.op for *_, plan in planned if plan.plan.refused}
    assert refused == ({"aten.binary_cross_entropy.default"} if device_type in ("cuda", "xpu", "mtia") else set())


@pytest.mark.parametrize("device_type", FAKED[1:])
def test_a_wrong_plan_is_caught(device_type, no_compute):
    """The comparison above rejects a plan that torch does not carry out."""
    x = torch.empty(2, 2, device=device_type)
    (found,) = plans(device_type, [("torch", "mm", lambda: torch.mm(x, x))], torch.float16)
    run, planned = found[2:]
    assert difference(planned, run, device_type, torch.float16) == ""
    planned.plan = replace(planned.plan, formats=(None, None))
    assert "torch made" in difference(planned, run, device_type, torch.float16)
