"""`decide` against the kernels that torch registers: op by op, on every device type, without any of the devices.

Under FakeTensorMode fake tensors run the real Autocast kernels. A probe below them sees the casts that they make and
stops at the first op that is none, so that nothing needs a device.
"""

import contextlib
import subprocess
import sys
import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal import autocast_test_lists
from torch.utils._python_dispatch import TorchDispatchMode

import narrowcast as nc
from narrowcast.eager.kernels import install_visiting, remove_visiting
from narrowcast.eager.watch import add_watcher, remove_watcher
from narrowcast.torch_bridge import DTYPES, find_op

DEVICE_TYPES = ("cpu", "cuda", "xpu", "mps", "mtia", "maia")
# Kernels that a build registers only with its device's libraries.
NEEDS_LIBRARY = {"cuda": {"aten._cudnn_rnn.default"}}
# torch 2.13 registers AutocastMAIA kernels, but fake maia tensors do not reach them.
FAKED = ("cpu", "cuda", "xpu", "mps", "mtia")


def registered_ops(device_type):
    """What a fresh process has registered: here, other tests have added kernels of ours."""
    code = f"from narrowcast.torch_bridge import registered_ops; print(*registered_ops({device_type!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.parametrize("device_type", DEVICE_TYPES)
def test_the_lists_are_those_of_the_installed_torch(device_type):
    """Drift is reported op by op."""
    registered = set(registered_ops(device_type))
    listed = {rule.op for rule in nc.Policy.native(device_type).rules}
    missing = sorted(registered - listed)
    gone = sorted(listed - registered - NEEDS_LIBRARY.get(device_type, set()))
    assert not missing, f"torch {torch.__version__} registers for {device_type}, and no rule names: {missing}"
    assert not gone, f"rules for {device_type} that torch {torch.__version__} does not register: {gone}"


def test_every_op_of_the_installed_torch_is_a_known_name():
    """A policy may name any of them."""
    from narrowcast.policy.known_ops import known_ops

    found = {n.replace("::", ".") for n in torch._C._dispatch_get_all_op_names() if n.startswith("aten::")}
    found = {n if n.count(".") == 2 else f"{n}.default" for n in found}
    assert not found - set(known_ops()), sorted(found - set(known_ops()))


class _Stop(Exception):
    """The first op below the casts was reached."""


class _Probe(TorchDispatchMode):
    """Lists the casts of an Autocast kernel; also whether the op below got dtype=float32."""

    def __init__(self):
        super().__init__()
        self.casts = []
        self.watching = False
        self.plan = None
        self.tensors = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not self.watching or func.namespace == "prim":
            return func(*args, **kwargs)
        if func is torch.ops.aten._to_copy.default and kwargs.get("dtype") is not None:
            self.casts.append((id(args[0]), kwargs["dtype"]))
            return func(*args, **kwargs)
        raise _Stop

    # -- a watcher

    def begin(self, facts, plan, place, tensors, policy):
        if self.plan is None:
            self.op, self.plan, self.tensors, self.watching = facts.id, plan, tensors, True

    def end(self, result):
        self.watching = False

    def fail(self, error):
        self.watching = False


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


@pytest.mark.parametrize("device_type", FAKED)
def test_decide_plans_the_casts_that_torch_makes(device_type):
    """Every entry whose op has a kernel here: the same casts, of the same tensors, to the same dtypes."""
    ops = tuple(find_op(r.op) for r in nc.Policy.native(device_type).rules if find_op(r.op) is not None)
    wrong, checked, refused = [], set(), set()
    low = torch.bfloat16 if device_type == "cpu" else torch.float16
    install_visiting(ops, device_type)
    try:
        with warnings.catch_warnings(), FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            warnings.simplefilter("ignore")
            for family, name, run in cases(device_type):
                probe = _Probe()
                add_watcher(probe)
                error = None
                try:
                    with probe, native_region(device_type, low):
                        run()
                except Exception as raised:
                    error = raised
                finally:
                    remove_watcher(probe)
                if probe.plan is None:
                    continue  # no kernel of this device type: its own parts are decided
                checked.add(probe.op)
                if probe.plan.refused:
                    refused.add(probe.op)
                    if error is None or isinstance(error, _Stop):
                        wrong.append(f"{name}: decide refuses, torch does not")
                    continue
                planned = sorted(
                    (id(t), str(DTYPES[dst]))
                    for (_, t), dst in zip(probe.tensors, probe.plan.formats, strict=True)
                    if dst is not None
                )
                seen = sorted((tensor, str(dtype)) for tensor, dtype in probe.casts)
                first = probe.tensors[0][1]
                if probe.plan.set_dtype or probe.plan.append_dtype:  # some kernels convert, some take dtype=
                    seen = [s for s in seen if s != (id(first), "torch.float32")]
                if planned != seen:
                    wrong.append(f"{family} {name} ({probe.op}): planned {planned}, torch made {seen}; {error!r:.100}")
    finally:
        remove_visiting(device_type)
    assert not wrong, "\n".join(wrong)
    expected = {"cpu": 35, "cuda": 80, "xpu": 80, "mps": 70, "mtia": 80}[device_type]
    assert len(checked) >= expected, f"only {len(checked)} ops were reached: {sorted(checked)}"
    assert refused == ({"aten.binary_cross_entropy.default"} if device_type in ("cuda", "xpu", "mtia") else set())


@pytest.mark.parametrize("device_type", FAKED)
def test_a_mutated_list_is_caught(device_type):
    """The comparison above rejects a wrong plan: an op that is lowered, said to be full."""
    with FakeTensorMode(), torch.no_grad():
        x = torch.empty(2, 2, device=device_type)
        probe = _Probe()
        install_visiting((torch.ops.aten.mm.default,), device_type)
        add_watcher(probe)
        try:
            with contextlib.suppress(_Stop), probe, native_region(device_type, torch.float16):
                torch.mm(x, x)
        finally:
            remove_watcher(probe)
            remove_visiting(device_type)
    assert [dtype for _, dtype in probe.casts] == [torch.float16] * 2
    assert [str(f) for f in probe.plan.formats] == ["fp16"] * 2
