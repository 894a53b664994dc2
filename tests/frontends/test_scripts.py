"""TorchScript: scripts compute what eager code computes, forward and backward, wherever they are called."""

import copy
import importlib.util
import io
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import narrowcast as nc
from narrowcast.errors import ScriptError

_spec = importlib.util.spec_from_file_location("scripts", Path(__file__).with_name("scripts.py"))
scripts = importlib.util.module_from_spec(_spec)
sys.modules["scripts"] = scripts
_spec.loader.exec_module(scripts)

pytestmark = pytest.mark.filterwarnings("ignore")


def inputs():
    torch.manual_seed(0)
    return torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)


def tensors(tree):
    return [t for t in torch.utils._pytree.tree_leaves(tree) if isinstance(t, torch.Tensor)]


def outcome(function, leaves, *args):
    """Outputs and gradients; or the class of the error."""
    for leaf in leaves:
        leaf.grad = None
    try:
        found = tensors(function(*args))
    except Exception as error:
        return (
            f"error: {str(error).splitlines()[-1][-40:]}" if isinstance(error, nc.errors.NarrowcastError) else "error"
        )
    loss = [o.double().square().sum() for o in found if o.requires_grad]
    if loss and torch.is_grad_enabled():
        torch.stack(loss).sum().backward()
    return [o.detach() for o in found], [leaf.grad for leaf in leaves]


def assert_same(a, b, gradients=True):
    assert isinstance(a, str) == isinstance(b, str), (a, b)
    if isinstance(a, str):
        return
    for name, left, right in (("output", a[0], b[0]), ("gradient", a[1], b[1])):
        if name == "gradient" and not gradients:
            continue
        assert len(left) == len(right)
        for n, (x, y) in enumerate(zip(left, right, strict=True)):
            assert (x is None) == (y is None), f"{name} {n}"
            if x is not None:
                assert x.dtype is y.dtype, f"{name} {n}: {x.dtype} in eager, {y.dtype}"
                if name == "gradient" and gradients == "close":
                    error = (x - y).norm() / x.norm()
                    assert error < 0.02, f"{name} {n}: {error}"
                else:
                    assert torch.equal(x.nan_to_num(), y.nan_to_num()), f"{name} {n}: {(x - y).abs().max()}"


REGIONS = {
    "no region": lambda: nc.autocast("cpu", enabled=False),
    "bf16": lambda: nc.autocast("cpu", torch.bfloat16),
    "torch's fp16": lambda: torch.autocast("cpu", torch.float16),
    "custom": lambda: nc.autocast("cpu", torch.bfloat16, policy=scripts.CUSTOM),
    "uncached": lambda: nc.autocast("cpu", torch.bfloat16, cache_enabled=False),
}


@pytest.mark.parametrize("function, more", scripts.FUNCTIONS, ids=lambda f: getattr(f, "__name__", str(f)))
def test_scripted_functions_equal_eager(function, more):
    """Three runs, the profiling executor's included; gradients too.

    Where a script has equal expressions TorchScript makes one of them, in fp32, too: then gradients add up otherwise.
    """
    x, w = inputs()
    scripted = nc.script(function)
    assert isinstance(scripted, torch.jit.ScriptFunction)
    expected = outcome(function, (x, w), x, w, *more)
    for _ in range(3):
        exact = function in scripts.EXACT_GRADIENTS
        assert_same(expected, outcome(scripted, (x, w), x, w, *more), True if exact else "close")


@pytest.mark.sweep(one_in=3)
@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("function, more", scripts.FUNCTIONS, ids=lambda f: getattr(f, "__name__", str(f)))
def test_scripted_functions_called_inside_regions_equal_eager(function, more, region):
    """The caller's region holds in what the script leaves open, and in nothing else."""
    x, w = (t.detach() for t in inputs())  # eager code may take a weight's cast of another region's format
    scripted = nc.script(function)
    if region == "custom" and function is scripts.scope_cuda_amp:
        return  # a native region inside one of ours, for another device type, ends its policy in eager code
    with torch.no_grad(), REGIONS[region]():
        assert_same(outcome(function, (), x, w, *more), outcome(scripted, (), x, w, *more))
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("module", scripts.MODULES)
@pytest.mark.parametrize("around", [None, "bf16", "custom"])
def test_scripted_modules_equal_eager(module, around):
    """With a region around all of it, or without; gradients of all parameters."""
    torch.manual_seed(0)
    model, (x, _) = module(), inputs()
    options = {None: {}, "bf16": {"under": "bf16"}, "custom": {"under": scripts.CUSTOM}}[around]
    scripted = nc.script(model, **options)
    assert isinstance(scripted, torch.jit.ScriptModule)
    leaves = (x, *model.parameters())

    def eager(x):
        with nc.autocast(
            "cpu", torch.bfloat16, around is not None, policy=scripts.CUSTOM if around == "custom" else None
        ):
            return model(x)

    expected = outcome(eager, leaves, x)
    if expected == "error" and module is scripts.Recurrent:
        with pytest.raises(RuntimeError, match="LSTM"):
            eager(x)  # no bf16 LSTM here: a script runs it step by step
        return
    for _ in range(3):
        exact = module not in (scripts.Outer, scripts.Cells)  # this many gradients of x are added up in another order
        assert_same(expected, outcome(scripted, leaves, x), True if exact else "close")


def test_two_scripts_of_one_module_are_two():
    """Another policy is another graph, and torch's own script stays what it was."""
    model, (x, _) = nn.Linear(4, 4), inputs()
    lowered, plain, low16 = nc.script(model, under="bf16"), torch.jit.script(model), nc.script(model, under="fp16")
    assert (lowered(x).dtype, plain(x).dtype, low16(x).dtype) == (torch.bfloat16, torch.float32, torch.float16)
    assert nc.script(model)(x).dtype is torch.float32


@pytest.mark.parametrize("function", [scripts.helpers_outside, scripts.lists, scripts.enabled_at_run_time])
def test_saved_scripts_run_without_narrowcast(function, tmp_path):
    """In a process that cannot import it."""
    x, w = inputs()
    more = {"lists": (2,), "enabled_at_run_time": (True,)}.get(function.__name__, ())
    path = tmp_path / "script.pt"
    nc.script(function).save(str(path))
    torch.save([o.detach() for o in tensors(function(x, w, *more))], tmp_path / "expected.pt")
    torch.save((x.detach(), w.detach(), *more), tmp_path / "inputs.pt")
    code = f"""
import sys
sys.modules["narrowcast"] = None
import torch
folder = {str(tmp_path)!r}
found = torch.jit.load(folder + "/script.pt")(*torch.load(folder + "/inputs.pt"))
expected = torch.load(folder + "/expected.pt")
for a, b in zip(torch.utils._pytree.tree_leaves(found), expected, strict=True):
    assert a.dtype is b.dtype and torch.equal(a, b)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_frozen_and_optimized_modules_keep_their_formats():
    """torch.jit.freeze, optimize_for_inference, and what was saved and loaded."""
    torch.manual_seed(0)
    model, (x, _) = scripts.Block().eval(), inputs()
    scripted = nc.script(model)
    expected = model(x)
    buffer = io.BytesIO()
    torch.jit.save(scripted, buffer)
    buffer.seek(0)
    frozen = torch.jit.freeze(torch.jit.load(buffer))
    for _ in range(3):
        assert frozen(x).dtype is expected.dtype and torch.equal(frozen(x), expected)
    optimized = torch.jit.optimize_for_inference(torch.jit.freeze(scripted.eval()))  # with other kernels for linear
    for _ in range(3):
        assert optimized(x).dtype is expected.dtype and torch.allclose(optimized(x), expected, rtol=0.02, atol=0.02)


def test_an_exception_in_a_script_leaves_the_caller_s_region():
    """And the script raises what it raises."""
    x, w = inputs()
    scripted = nc.script(scripts.left_by_exception)
    with nc.autocast("cpu", torch.bfloat16):
        with pytest.raises(torch.jit.Error, match="three"):
            scripted(x, w, 3)
        assert torch.mm(x, w).dtype is torch.bfloat16
    assert torch.mm(x, w).dtype is torch.float32


# -- calls


def test_traced_parts_of_a_script_are_cast_by_its_region():
    """Natively they never are."""
    x, _ = inputs()
    traced = torch.jit.trace(lambda x: torch.mm(x, x) + 1, x)
    quiet = nc.trace(lambda x: torch.mm(x, x), (x,), under=nc.autocast("cpu", "bf16", enabled=False))

    def partly(x):
        with torch.autocast("cpu", enabled=False):
            y = torch.mm(x, x)
        return torch.cat([y, torch.mm(x, x).float()]), torch.mm(y, x)

    half = nc.trace(partly, (x,))
    scripted = nc.script(_calling(traced))
    assert scripted(x).dtype is torch.bfloat16
    assert torch.jit.script(_calling(traced))(x).dtype is torch.float32
    assert nc.script(_calling(quiet))(x).dtype is torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = partly(x)
    for found in (nc.script(_calling(half))(x), _calling(half)(x)):
        assert [o.dtype for o in found] == [torch.float32, torch.bfloat16]
        assert all(map(torch.equal, expected, found))


def _calling(called):
    def caller(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return called(x)

    return caller


def test_scripts_under_a_trace_are_cast_by_its_region():
    """Those of torch's own too; natively they are not."""
    x, w = inputs()

    @torch.jit.script
    def callee(x, w):
        return torch.mm(x, w)

    def traced(x, w):
        return callee(x, w), torch.mm(x, w)

    found = nc.trace(traced, (x, w), under="bf16")(x, w)
    assert [o.dtype for o in found] == [torch.bfloat16] * 2
    assert callee(x, w).dtype is torch.float32


@torch.jit.ignore
def in_python(x: torch.Tensor) -> torch.Tensor:
    return torch.mm(x, x)


def calls_python(x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return in_python(x)


def calls_python_outside(x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = torch.mm(x, x)
    return in_python(y)


def unknown_device(x, device: str):
    region = torch.autocast(device, dtype=torch.bfloat16)
    with region:
        return torch.mm(x, x)


@torch.jit.interface
class Interface(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pass


class Behind(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, x)


class Front(nn.Module):
    part: Interface

    def __init__(self):
        super().__init__()
        self.part = torch.jit.script(Behind())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.part.forward(x)


@pytest.mark.parametrize(
    "target, says, line",
    [
        (calls_python, "torch.jit.ignore", "return in_python(x)"),
        (unknown_device, "only the running script knows its device type", "region = torch.autocast(device"),
        (Front(), "interface", "return self.part.forward(x)"),
    ],
    ids=["python", "device", "interface"],
)
def test_what_cannot_be_cast_is_an_error_with_line_and_column(target, says, line):
    """What, where with a caret, and what to write instead."""
    with pytest.raises(ScriptError, match=says) as caught:
        nc.script(target)
    (site,) = caught.value.where
    assert site.file == __file__ and site.line and "column" in site.note and "^" in site.note
    assert line in site.note and caught.value.advice


@pytest.mark.parametrize("target", [3, torch.mm, scripts.Block, "model"])
def test_what_is_no_code_is_an_error(target):
    """A number, a builtin, a class, a name."""
    with pytest.raises(ScriptError, match="it is "):
        nc.script(target)
    if target is not torch.mm:
        with pytest.raises(ScriptError, match="it is "):
            nc.trace(target, torch.ones(2, 2))


def test_python_may_be_called_outside_of_regions():
    """A call that no region reaches is none of ours."""
    x, _ = inputs()
    assert_same(outcome(calls_python_outside, (), x), outcome(nc.script(calls_python_outside), (), x))


def test_a_copy_is_explicit_too():
    """It follows regions, and its weights are its own."""
    torch.manual_seed(0)
    model, (x, _) = nn.Linear(4, 4), inputs()
    for scripted in (nc.script(model), nc.trace(model, x)):
        copied = copy.deepcopy(scripted)
        with torch.no_grad():
            scripted.weight.zero_()
        with nc.autocast("cpu", policy=scripts.CUSTOM):
            assert copied(x).dtype is torch.bfloat16 and copied(x).any() and not torch.equal(copied(x), scripted(x))
        with torch.no_grad():
            scripted.weight.copy_(copied.weight)


# -- traces


@pytest.mark.parametrize("policy", ["native", "safe", scripts.CUSTOM], ids=str)
def test_traced_modules_equal_eager_with_the_weight_cache(policy):
    """Gradients included, though a weight is used several times and was cast before the trace."""
    torch.manual_seed(0)

    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

        def forward(self, x):
            for _ in range(4):
                x = self.norm(self.inner(x)) + x
            with torch.autocast("cpu", enabled=False):
                return x, self.inner(x.float())

    model, (x, _) = Shared(), inputs()
    leaves = (x, *model.parameters())

    def eager(x):
        with nc.autocast("cpu", torch.bfloat16, policy=policy):
            return model(x)

    expected = outcome(eager, leaves, x)
    with nc.autocast("cpu", torch.bfloat16, policy=policy):
        model(x)
        under = nc.trace(model, x)
    given = nc.trace(model, x, under=policy)
    for traced in (under, given):
        assert isinstance(traced, torch.jit.ScriptModule)
        for _ in range(3):
            assert_same(expected, outcome(traced, leaves, x))
        with torch.autocast("cpu", torch.float16):
            assert_same(expected, outcome(traced, leaves, x), gradients=False)


class LowRank(nn.Module):
    def __init__(self, n, rank=2):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(rank, n)), nn.Parameter(0.1 * torch.randn(n, rank))

    def forward(self, weight):
        return weight + self.b @ self.a


@pytest.mark.parametrize("policy", ["native", "safe"])
def test_weights_that_a_parametrization_computes_are_traced(policy):
    """torch reads them while it prepares the trace, in the region: such casts are of no graph."""
    torch.manual_seed(0)
    layer, x = nn.Linear(8, 8), torch.randn(3, 8)
    nn.utils.parametrize.register_parametrization(layer, "weight", LowRank(8))
    region = nc.autocast("cpu", "bf16", policy=policy)
    traced = nc.trace(layer, (x,), under=region)
    with region:
        assert torch.equal(traced(x), layer(x))


def test_torchs_own_trace_casts_a_weight_once_where_our_kernels_run():
    """What was cast before the trace is not in it, and is not traced either."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4, bias=False)

        def forward(self, x):
            return self.inner(self.inner(x))

    model, x = Twice(), torch.randn(4, 4)
    policy = nc.Policy.native().with_rules(nc.Rule("aten.linear", "to(bf16)", reason="a kernel of ours"))
    with nc.autocast("cpu", torch.float16, policy=policy):
        expected = model(x)
        traced = torch.jit.trace(model, x, check_trace=False)
        assert torch.equal(expected, model(x))
    assert torch.equal(expected, traced(x))
    assert str(traced.inlined_graph).count("aten::to(") == 2, "one of the input, one of the weight"


def test_a_trace_that_depends_on_values_is_warned_of():
    """As torch's own check does."""
    with pytest.warns(nc.errors.ScriptWarning, match="does not give what the code gives"):
        seen = []

        def counting(x):
            seen.append(1)
            return x * len(seen)

        nc.trace(counting, (torch.ones(2),))


def test_a_trace_whose_kernels_round_otherwise_is_not_warned_of(recwarn):
    """One unit in the last place of the region's format, as libraries give for weights in another layout."""
    seen = []

    def almost(x):
        seen.append(1)
        return (x @ x) * (1 + 2**-8 * (len(seen) > 1))

    nc.trace(almost, (torch.randn(8, 8),), under=nc.autocast("cpu", torch.bfloat16))
    assert len(seen) > 1 and not [w for w in recwarn if isinstance(w.message, nc.errors.ScriptWarning)]


# -- loaded scripts


def test_converted_scripts_equal_eager():
    """A module that exists only as a file."""
    torch.manual_seed(0)

    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

        def forward(self, x):
            return torch.cat([self.norm(self.inner(x)), x])

    model, (x, _) = Plain(), inputs()
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(model), buffer)
    buffer.seek(0)
    loaded = torch.jit.load(buffer)
    converted = nc.script(loaded, under="safe")
    with nc.autocast("cpu", torch.bfloat16, policy="safe"):
        expected = model(x)
    assert torch.equal(converted(x), expected) and converted(x).dtype is expected.dtype
    assert loaded(x).dtype is torch.float32 and not torch.equal(loaded(x), expected.float())


def test_nothing_global_is_left_behind():
    """Parsers, resolvers, call operators and torch's own pass are as they were, after an error, too."""
    from torch import _jit_internal
    from torch.jit import _recursive, frontend

    before = frontend.parse_def, _jit_internal.get_closure, _recursive.try_compile_fn, torch._C._jit_set_autocast_mode
    called = torch._C.ScriptFunction.__call__, torch._C.ScriptMethod.__call__
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        nc.script(scripts.scope)
        nc.trace(scripts.scope, inputs())
        with pytest.raises(ScriptError):
            nc.script(calls_python)
    assert before[:3] == (frontend.parse_def, _jit_internal.get_closure, _recursive.try_compile_fn)
    assert called == (torch._C.ScriptFunction.__call__, torch._C.ScriptMethod.__call__)
    assert not [w for w in told if issubclass(w.category, (DeprecationWarning, FutureWarning))]
