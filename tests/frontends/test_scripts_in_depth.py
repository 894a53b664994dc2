"""Regions in scripts whose facts only the running script knows, or that the source does not show at once."""

import contextlib
import copy
from typing import Optional, Tuple  # noqa: UP035

import pytest
import torch
from torch import Tensor, nn

import narrowcast as nc

pytestmark = pytest.mark.filterwarnings("ignore")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture
def x():
    torch.manual_seed(0)
    return torch.randn(8, 8)


def same(function, *args, under=None):
    """The script gives what the function gives, in a region of this kind; its dtypes."""
    scripted = nc.script(function, under=under)
    region = nc.autocast("cpu", under) if isinstance(under, str) else under
    with region or torch.enable_grad():
        expected = torch.utils._pytree.tree_leaves(function(*args))
    for _ in range(3):
        found = torch.utils._pytree.tree_leaves(scripted(*args))
        assert [t.dtype for t in found] == [t.dtype for t in expected]
        assert all(map(torch.equal, found, expected))
    return [t.dtype for t in expected]


def inner(x: Tensor):
    with torch.autocast("cpu"):
        return x @ x


def nested(x: Tensor):
    with torch.autocast("cpu", dtype=torch.float16):
        with torch.autocast("cpu", enabled=False):
            y = x @ x
            with torch.autocast("cpu"):
                z = x @ x
        return y, z, inner(x)


def test_a_region_without_a_dtype_takes_that_of_the_region_around(x):
    """Also behind one that is off, in a function that is called, and in the region around the script."""
    assert same(nested, x) == [FP32, FP16, FP16]
    assert same(inner, x) == [BF16]
    assert same(inner, x, under="fp16") == [FP16]
    scripted = nc.script(inner)
    with nc.autocast("cpu", torch.float16):
        assert scripted(x).dtype is FP16
    assert scripted(x).dtype is BF16


def refined(x: Tensor, m: Optional[Tensor]):  # noqa: UP045
    with torch.autocast("cpu", dtype=torch.bfloat16):
        if m is not None and m.dim() > 1 and (x @ m).dim() == 2:
            return x @ m
        if not isinstance(x, Tensor):
            return x
        while m is not None and m.sum() > 1000:
            return x @ m
        for row in torch.mm(x, x):
            if row.dim() == 1:
                return row
    return x


class Detecting(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            if hasattr(self, "missing"):
                return self.missing(x)
            if torch.jit.is_scripting():
                return self.linear(x)
            return self.linear(x)


def test_conditions_refine_types_before_an_early_return(x):
    """What a condition computes is in the region all the same."""
    assert same(refined, x, x) == same(refined, x, None) == [BF16]
    assert same(Detecting(), x) == [BF16]


def off_when_it_runs(x: Tensor, on: bool):
    u = x.half()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=on):
        return torch.stack([u, u])


def test_a_region_that_is_off_when_it_runs_refuses_nothing(x):
    """And where it is on, it raises as eager code does."""
    assert same(off_when_it_runs, x, False) == [FP16]
    for function in (off_when_it_runs, nc.script(off_when_it_runs)):
        with pytest.raises((RuntimeError, torch.jit.Error)):
            function(x, True)


def on_its_device(x: Tensor):
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        if x.dim() == 2:
            return x @ x
    return x


def of_a_device(x: Tensor, device: str):
    with torch.autocast(device, dtype=torch.float16), torch.autocast(device):
        y = x @ x
    return y


def test_device_types_that_only_the_running_script_knows(x):
    """One that was not compiled for is an error that says so."""
    assert same(on_its_device, x) == [BF16]
    assert same(of_a_device, x, "cpu") == [FP16]
    scripted = nc.script(of_a_device)
    assert scripted(x, "cuda").dtype is FP32
    with pytest.raises(torch.jit.Error, match=r"test_scripts_in_depth.py:\d+: this region was scripted for cpu, cuda"):
        scripted(x, "mtia")


class SwitchedOffOnItsDevice(nn.Module):
    """Uses a weight as it is in a region of `x.device.type`, and then where the caller's region holds."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4) / 2)

    def forward(self, x: Tensor):
        y = x * 1.5
        with torch.autocast(x.device.type, dtype=torch.float16), torch.autocast("cpu", enabled=False):
            z = torch.mm(y, self.weight)
        return z, y @ self.weight


def test_a_weight_that_another_device_s_region_casts_is_cast_for_this_one_too():
    """In the branch that is compiled for cuda the weight is cast, which says nothing of it on the cpu."""
    model, x = SwitchedOffOnItsDevice(), torch.randn(4, 4)
    scripted = nc.script(model)
    with torch.autocast("cpu", dtype=torch.float16):
        for found, expected in zip(scripted(x), model(x), strict=True):
            assert found.dtype is expected.dtype and torch.equal(found, expected)


def sparse(x: Tensor):
    s = x.relu().to_sparse()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return torch.sparse.mm(s, x), torch.sparse.addmm(x, s, x, beta=0.5), torch.mv(s, x[0]), torch.mv(x, x[0])


def test_products_of_sparse_matrices(x):
    """They are made of products that eager code casts."""
    assert same(sparse, x)[:3] == [BF16, BF16, BF16]
    traced = nc.trace(torch.sparse.mm, (x.relu().to_sparse(), x), under="bf16")
    assert traced(x.relu().to_sparse(), x).dtype is BF16


def put(x: Tensor, a: Tensor):
    return torch.index_put(x, [torch.tensor([0])], a[0])


@pytest.mark.parametrize("policy", ["native:cuda", "safe"])
def test_lists_of_indices_without_none(policy, x):
    """TorchScript calls another overload then."""
    assert same(put, x, x.half(), under=nc.autocast("cpu", "fp16", policy=policy)) == [FP32]


def test_weights_and_a_trace_of_torch(x):
    """The error of torch.jit.trace names what traces models in regions."""
    with pytest.raises(RuntimeError) as caught, nc.autocast("cpu"):  # as torch raises it, unless kernels of ours stand
        raise RuntimeError("Cannot insert a Tensor that requires grad as a constant. Consider making it a parameter")
    assert "narrowcast.trace(model, inputs, under=...)" in caught.value.__notes__[0]
    assert nc.trace(nn.Linear(8, 8), x, under="bf16")(x).dtype is BF16


def test_a_rule_without_a_module_is_named_at_the_first_exit(x):
    """Once; a rule about a module that was not called yet is left alone."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for module, count in (("9", 1), ("1", 0)):
        policy = nc.Policy.native().with_rules(nc.Rule("aten.linear", "full", module=module))
        warned = pytest.warns(nc.errors.RegionWarning) if count else torch.enable_grad()
        with warned, nc.autocast("cpu", policy=policy):
            model(x)


def wrapped(function):
    import functools

    @functools.wraps(function)
    def logged(*args):
        return function(*args)

    return logged


@wrapped
def logs(x: Tensor):
    return x @ x


@pytest.mark.filterwarnings("default")
def test_a_decorator_that_opens_no_region_is_named(x):
    """TorchScript leaves it out."""
    with pytest.warns(nc.errors.ScriptWarning, match=r"leaves out what its decorator does.*test_scripts_in_depth.py"):
        nc.script(logs, under="bf16")


class Switched(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.low, self.on = nn.Linear(8, 8), torch.float16, True

    def forward(self, x: Tensor):
        with torch.autocast("cpu", dtype=self.low, enabled=self.training):
            y = self.linear(x)
        self.on = not self.on
        with nc.autocast("cpu", enabled=self.on):
            return y, self.linear(x)


def test_what_an_object_holds_is_asked_when_the_script_runs(x):
    """Its mode, and attributes that forward changes."""
    model, scripted = Switched(), nc.script(Switched())
    for training in (True, False, True):
        model.train(training), scripted.train(training)
        assert [t.dtype for t in scripted(x)] == [t.dtype for t in model(x)]


class Calling(nn.Module):
    def __call__(self, *args):
        with nc.autocast("cpu"):
            return super().__call__(*args)

    def forward(self, x: Tensor):
        return x @ x


class Scaled:
    def __init__(self, function):
        self.__wrapped__ = function

    def __call__(self, x):
        return self.__wrapped__(x) * 2


class Decorated(torch.nn.Module):
    @torch.autocast("cpu")
    def forward(self, x):
        return torch.mm(x, x)


def test_a_script_that_torch_compiled_without_its_decorators_is_refused():
    """By itself or as a part, with the line; what narrowcast.script compiled has them, as has what is loaded."""
    bare = torch.jit.script(Decorated())
    for subject in (bare, torch.nn.Sequential(bare)):
        with pytest.raises(nc.errors.ScriptError, match=r"(?s)Decorated.forward.*without the region.*in_depth.py:\d+"):
            nc.script(subject)
    made = nc.script(Decorated())
    for subject in (made, torch.jit.script(torch.nn.Sequential(made)), torch.jit.script(torch.nn.Linear(2, 2))):
        nc.script(subject)


def test_what_stands_around_forward_is_refused():
    """A call of the module that opens a region, and an object that decorates its forward."""
    for model in (Calling(), nn.Sequential(Calling())):
        with pytest.raises(nc.errors.ScriptError, match=r"test_scripts_in_depth.py:\d+"):
            nc.script(model)
    model = nn.Linear(8, 8)
    model.forward = Scaled(model.forward)
    with pytest.raises(nc.errors.ScriptError, match="an object of type Scaled"):
        nc.script(model)


def raising(x: Tensor, n: int):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        if n == 1:
            return x @ x
        elif n == 2:
            raise ValueError("two")
        for _i in range(n):
            if n == 4:
                return x.exp() @ x
        raise ValueError("other")


def test_a_region_that_ends_with_an_exception(x):
    """What TorchScript drops behind it is no region left open."""
    assert same(raising, x, 1) == same(raising, x, 4) == [BF16]
    with pytest.raises(torch.jit.Error, match="two"):
        nc.script(raising)(x, 2)


def forking(x: Tensor):
    a, b = torch.jit.fork(inner, x), torch.jit.fork(inner, x + 1)
    return torch.jit.wait(a), torch.jit.wait(b)


def test_forks_of_functions_with_regions(x, tmp_path):
    """Outside of regions, and in a file that is converted."""
    assert same(forking, x) == [BF16, BF16]
    torch.jit.save(nc.script(forking), str(tmp_path / "f.pt"))
    loaded = torch.jit.load(str(tmp_path / "f.pt"))
    assert all(t.dtype is BF16 for t in (*loaded(x), *nc.script(loaded)(x)))


def recorded(x: Tensor, n: int):
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.profiler.record_function("part"):
        y = x @ x
    if n == 1:
        return y
    return x


def recorded_later(x: Tensor, n: int):
    if n == 1:
        return x
    with torch.profiler.record_function("part"):
        return x @ x


def test_other_context_managers_beside_early_returns(x):
    """They stay as they are; the region beside them holds."""
    assert same(recorded, x, 1) == [BF16] and same(recorded, x, 2) == [FP32]
    with pytest.raises(nc.errors.ScriptError, match=r"(?s)test_scripts_in_depth.py:\d+"):
        nc.script(recorded_later)


def chosen_here(x: Tensor, on: bool):
    with torch.autocast("cpu") if on else contextlib.nullcontext():
        y = x @ x
    with NOTHING:
        return y, x @ x


NOTHING = contextlib.nullcontext()


def python_alone(x: Tensor):
    if not torch.jit.is_scripting():
        with contextlib.ExitStack():
            return x + 0
    return x + 0


def of_another_format(x: Tensor, dtype: torch.dtype):
    with torch.autocast("cpu", dtype=torch.float64):
        y = x @ x
    with torch.autocast("cpu", dtype=dtype):
        return y, x @ x


def test_regions_that_do_nothing(x):
    """nullcontext, code that is not compiled, and formats in which torch's regions are off."""
    assert same(chosen_here, x, True) == [BF16, FP32] and same(chosen_here, x, False) == [FP32, FP32]
    assert same(python_alone, x) == [FP32]
    assert same(of_another_format, x, FP16) == [FP32, FP16] and same(of_another_format, x, FP32) == [FP32, FP32]


def by_a_word(x: Tensor):
    with nc.autocast("cpu", inner="policy"), torch.autocast("cpu", dtype=torch.float8_e5m2, enabled=False):
        return x @ x


def test_arguments_of_regions_that_are_less_common(x):
    """inner= without a policy, and a format that counts for nothing."""
    assert same(by_a_word, x) == [FP32]


def hook(self, given: Tuple[Tensor], result: Tensor) -> Tensor:  # noqa: UP006
    return torch.mm(given[0], result)


def test_hooks_follow_the_regions_of_a_call(x):
    """The outermost module's, in the region around the script and around its call, and in a copy."""
    model = nn.Linear(8, 8)
    model.register_forward_hook(hook)
    assert same(model, x, under="fp16") == [FP16]
    scripted = nc.script(model)
    for ran in (scripted, copy.deepcopy(scripted)):
        assert not hasattr(ran, "hook") and ran(x).dtype is FP32
        with nc.autocast("cpu"):
            assert ran(x).dtype is BF16
