"""Exported programs: plain casts, the bits of eager code, and no Narrowcast needed to run them."""

import copy
import subprocess
import sys
import warnings
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import narrowcast as nc
from narrowcast.errors import CaptureError, RegionError
from narrowcast.frontends.graphs.compiled import watch_graphs

CUSTOM = nc.Policy.native().with_rules(
    nc.Rule("aten.gelu", "to(fp16)"), nc.Rule("aten.linear", "full", module="last"), nc.Rule("aten.relu", "inside")
)


@pytest.fixture(autouse=True)
def quiet():
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Model(nn.Module):
    """Regions inside, buffers, views, a composite op, a branch on a format, tied weights."""

    def __init__(self):
        super().__init__()
        self.first, self.tied, self.last, self.norm = (*(nn.Linear(8, 8) for _ in range(3)), nn.BatchNorm1d(8))
        self.tied.weight = self.first.weight

    def forward(self, x, scale=1.0):
        y = self.tied(F.gelu(self.first(x)) * scale)
        with torch.autocast("cpu", enabled=False):
            z = self.norm(y.float())
        with torch.no_grad():
            held = torch.relu(y)
        if y.dtype is torch.bfloat16:
            z = z + 1
        return {"last": self.last(z), "einsum": torch.einsum("ij,kj->ik", held, x), "view": z.t()}


def run(model, call, *args):
    out = call(*args)
    leaves = list(out.values())
    torch.manual_seed(2)
    sum((t.float() * torch.randn(t.shape)).sum() for t in leaves if t.requires_grad).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {**out, **gradients, **dict(model.named_buffers())}


@pytest.mark.parametrize("policy", ["native", "safe", CUSTOM], ids=["native", "safe", "custom"])
@pytest.mark.parametrize("ambient", [True, False], ids=["around", "as arguments"])
def test_exported_equals_eager_bit_for_bit(policy, ambient):
    """Outputs, gradients and buffers; a region around the export is honoured (torch.export loses it)."""
    eager, model = Model(), Model()
    model.load_state_dict(eager.state_dict())
    x = torch.randn(4, 8)

    def in_region(x):
        with nc.autocast("cpu", policy=policy):
            return eager(x)

    expected = run(eager, in_region, x)
    if ambient:
        with nc.autocast("cpu", policy=policy):
            program = nc.export(model, (x,))
    else:
        program = nc.export(model, (x,), under=policy)
    module = program.module()
    found = run(module, module, x)
    assert found.keys() == expected.keys()
    for name in expected:
        assert found[name].dtype is expected[name].dtype, name
        assert torch.equal(found[name], expected[name]), name
    assert "autocast" not in str(program.graph)


class Regions(nn.Module):
    """A weight that is used twice in a region: its gradients meet in bf16 if the region has a weight cache."""

    def __init__(self, region, **options):
        super().__init__()
        self.layer, self.region, self.options = nn.Linear(8, 8), region, options

    def forward(self, x):
        with self.region("cpu", torch.bfloat16, **self.options):
            return self.layer(x) + self.layer(x * 1.5)


class Nested(Regions):
    """One that says nothing of a cache, in one that says something."""

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False), self.region("cpu", torch.bfloat16):
            return self.layer(x) + self.layer(x * 1.5)


def gradients_of(model, call, x):
    model.zero_grad()
    call(x).float().pow(2).sum().backward()
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("around", [True, False])
@pytest.mark.parametrize(
    ("strict", "region"),
    [
        pytest.param(True, torch.autocast, id="strict-torch's"),
        pytest.param(False, nc.autocast, id="ours"),
        pytest.param(True, nc.autocast, id="strict-ours", marks=pytest.mark.slow),
        pytest.param(False, torch.autocast, id="torch's", marks=pytest.mark.slow),
    ],
)
def test_regions_inside_keep_their_weight_caches(region, strict, around):
    """On, off, not given, or that of the region around; the gradients are those of eager code."""
    x = torch.randn(64, 8)
    options = {"under": "bf16"} if around else {}
    with_cache, without = ([], [])
    for model in (
        Regions(region), Regions(region, cache_enabled=None), Regions(region, cache_enabled=True),
        Regions(region, cache_enabled=False), Nested(region),
    ):  # fmt: skip
        nn.init.constant_(model.layer.bias, 0.5)
        with torch.no_grad():
            model.layer.weight.copy_(torch.linspace(-1, 1, 64).view(8, 8).sin())

        def in_region(x, model=model):
            with nc.autocast("cpu", enabled=around):
                return model(x)

        expected = gradients_of(model, in_region, x)
        module = nc.export(model, (x,), strict=strict, **options).module()
        assert all(map(torch.equal, gradients_of(module, module, x), expected)), (type(model), model.options)
        cached = model.options.get("cache_enabled") is not False and type(model) is Regions
        (with_cache if cached else without).append(expected[0])
    assert not torch.equal(with_cache[0], without[0])


@pytest.mark.parametrize("strict", [True, False])
def test_tied_weights_are_one(strict):
    """Their gradient adds up in the low format, as one weight's does."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
            self.last.weight = self.first.weight

        def forward(self, x):
            return self.first(x) + self.last(x * 1.5)

    model, x = Tied(), torch.randn(64, 8)

    def run(x, cache=True):
        with nc.autocast("cpu", cache_enabled=cache):
            return model(x)

    expected = gradients_of(model, run, x)
    assert not torch.equal(expected[0], gradients_of(model, lambda x: run(x, False), x)[0])
    module = nc.export(model, (x,), under="bf16", strict=strict).module()
    assert all(map(torch.equal, gradients_of(module, module, x), expected))


def test_torch_export_alone_loses_the_region():
    """What this module is for: no casts are recorded, and the result is fp32."""
    with torch.autocast("cpu"):
        program = torch.export.export(nn.Linear(8, 8), (torch.randn(2, 8),))
    assert program.module()(torch.randn(2, 8)).dtype is torch.float32


def test_regions_of_ours_inside_the_model():
    """With their policies, nested, beside torch's."""

    class Inside(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            with nc.autocast("cpu", policy=CUSTOM):
                y = F.gelu(self.first(x))
                with torch.autocast("cpu", torch.bfloat16):
                    z = F.gelu(self.last(y))
            return {"ours": y, "torch's": z, "none": F.gelu(self.last(x))}

    model, x = Inside(), torch.randn(4, 8)
    expected = model(x)
    assert [t.dtype for t in expected.values()] == [torch.float16, torch.bfloat16, torch.float32]
    found = nc.export(model, (x,)).module()(x)
    for name in expected:
        assert found[name].dtype is expected[name].dtype and torch.equal(found[name], expected[name]), name


@pytest.mark.parametrize("fold", [False, True])
def test_dynamic_shapes_and_folded_weights(fold):
    """Sizes that were not exported; weights stored in the format in which they are used, tied ones once."""
    model = Model().eval()
    x = torch.randn(4, 8)
    batch = torch.export.Dim("batch", min=2, max=64)
    program = nc.export(model, (x,), under="bf16", dynamic_shapes={"x": {0: batch}}, fold_weights=fold)
    for n in (2, 5, 33):
        x = torch.randn(n, 8)
        with nc.autocast("cpu"):
            expected = model(x)
        found = program.module()(x)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    state = program.state_dict
    low = [name for name, value in state.items() if value.dtype is torch.bfloat16]
    if not fold:
        assert low == []
        return
    assert {"first.weight", "tied.weight", "first.bias", "last.weight", "last.bias"} <= set(low)
    assert state["first.weight"].data_ptr() == state["tied.weight"].data_ptr()
    assert state["norm.weight"].dtype is torch.float32 and model.first.weight.dtype is torch.float32
    casts = [n for n in program.graph.nodes if n.target is torch.ops.aten._to_copy.default]
    assert not any(n.args[0].op == "placeholder" and n.args[0].name.startswith("p_") for n in casts)


def test_a_weight_that_is_read_in_two_formats_is_not_folded():
    """It is stored once, as it is."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8, bias=False)

        def forward(self, x):
            return self.layer(x), self.layer.weight.sum()

    program = nc.export(Twice(), (torch.randn(2, 8),), under="bf16", fold_weights=True)
    assert program.state_dict["layer.weight"].dtype is torch.float32


def test_weights_that_are_parts_of_one_memory_stay_apart():
    """Different views of one tensor are not tied."""

    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            both = torch.randn(2, 8, 8)
            self.one, self.two = nn.Parameter(both[0]), nn.Parameter(both[1])

        def forward(self, x):
            return x @ self.one, x @ self.two

    model, x = Parts(), torch.randn(4, 8)
    with nc.autocast("cpu"):
        expected = model(x)
    found = nc.export(model, (x,), under="bf16", fold_weights=True).module()(x)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_weight_that_is_changed_under_no_grad():
    """In place, while it requires grad."""

    class Changed(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8))

        def forward(self, x):
            with torch.no_grad():
                self.weight.mul_(2)
            return x @ self.weight

    model, x = Changed(), torch.randn(4, 8)
    found = nc.export(copy.deepcopy(model), (x,), under="bf16").module()(x)
    with nc.autocast("cpu"):
        assert torch.equal(found, model(x))


def without_narrowcast(tmp_path, code):
    """Run code in a new process in which narrowcast cannot be imported."""
    blocked = "import sys; sys.modules['narrowcast'] = None\n"
    done = subprocess.run(
        [sys.executable, "-c", blocked + code], cwd=tmp_path, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_saved_and_loaded_without_narrowcast(tmp_path):
    """By torch.export.save and load, with the same bits."""
    model, x = Model().eval(), torch.randn(4, 8)
    with torch.no_grad():
        program = nc.export(model, (x,), under=CUSTOM, fold_weights=True)
        expected = program.module()(x)
    torch.export.save(program, tmp_path / "model.pt2")
    torch.save({"x": x, "expected": expected}, tmp_path / "data.pt")
    without_narrowcast(
        tmp_path,
        "import torch\nd = torch.load('data.pt')\nfound = torch.export.load('model.pt2').module()(d['x'])\n"
        "assert all(torch.equal(found[k], v) and found[k].dtype is v.dtype for k, v in d['expected'].items())",
    )


class AfterAnother(nn.Module):
    """A conversion is the first call in torch's region; torch.export checks its input with a node of the one before."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        with nc.autocast("cpu", torch.bfloat16, policy="safe"):
            y = torch.mm(x, self.weight)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return torch.tensordot(y.float(), self.weight, dims=1)


def test_a_region_after_another_has_its_own_policy():
    """And not that of the region whose result it converts first."""
    model, x = AfterAnother(), torch.randn(4, 8)
    expected = model(x)
    found = nc.export(model, (x,)).module()(x)
    assert found.dtype is expected.dtype is torch.bfloat16 and torch.equal(found, expected)


def test_a_sparse_product_has_another_format_than_torch_export_foresees():
    """It notes fp32 and asserts that at the cast after it; in eager code and in the program the product is low."""

    class SparseProduct(nn.Module):
        def forward(self, x):
            product = torch.sparse.mm(torch.eye(4).to_sparse(), x)
            return (product * 1.5).float(), product

    model, x = SparseProduct(), torch.randn(4, 4)
    with nc.autocast("cpu", torch.bfloat16):
        expected = model(x)
    found = nc.export(model, (x,), under=nc.autocast("cpu", torch.bfloat16)).module()(x)
    assert expected[1].dtype is torch.bfloat16
    assert all(a.dtype is b.dtype and torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.slow
def test_ahead_of_time_inductor_without_narrowcast(tmp_path):
    """Compiled to a package, loaded in a process of its own; same formats, and bits within Inductor's rounding."""
    model, x = Model().eval(), torch.randn(4, 8)
    with torch.no_grad():
        program = nc.export(model, (x,), under="bf16", fold_weights=True)
        expected = program.module()(x)
        torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "package.pt2"))
    torch.save({"x": x, "expected": expected}, tmp_path / "data.pt")
    without_narrowcast(
        tmp_path,
        "import torch\nd = torch.load('data.pt')\nmodel = torch._inductor.aoti_load_package('package.pt2')\n"
        "found = model(d['x'])\n"
        "for k, v in d['expected'].items():\n"
        "    assert found[k].dtype is v.dtype, k\n"
        # one bf16 rounding (2^-8) of values of size about one, made or not made inside a fused loop
        "    assert (found[k].float() - v.float()).abs().max() < 0.03, k",
    )


@pytest.mark.slow
def test_onnx_in_onnxruntime():
    """Through torch.onnx.export, with fp16 casts; onnxruntime's sums are rounded elsewhere, hence the tolerance."""
    onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: pip install --group zoo")

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)

        def forward(self, x):
            return self.last(F.gelu(F.layer_norm(self.first(x).float(), (16,))))

    model, x = Net().eval(), torch.randn(4, 8)
    with torch.no_grad():
        program = nc.export(model, (x,), under=torch.float16)
        expected = program.module()(x)
        onnx = torch.onnx.export(program, (x,), dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(onnx.model_proto.SerializeToString(), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert found.dtype == "float16"
    # a few fp16 roundings of sums of 16 products: 16 * 2^-11
    assert abs(torch.from_numpy(found).float() - expected.float()).max() < 8e-3


class TestErrors:
    """Bad input gets a clear error."""

    def test_no_module(self):
        """torch.export takes modules."""
        with pytest.raises(RegionError, match="not a Module"):
            nc.export(lambda x: x, (torch.randn(2),))

    def test_rules_about_the_backward(self):
        """An exported program has none."""
        policy = nc.Policy.native().with_rules(nc.Rule("backward.aten.mm", "full"))
        with pytest.raises(RegionError, match="about the backward"):
            nc.export(nn.Linear(2, 2), (torch.randn(1, 2),), under=policy)

    def test_a_fault_of_ours_is_refused(self, monkeypatch):
        """Rather than a program that lost its region."""
        import narrowcast.frontends.exported.export as exported

        def broken(*_):
            raise AssertionError("a fault of ours")

        monkeypatch.setattr(exported, "make_explicit", broken)
        with pytest.raises(CaptureError, match="a fault of ours"):
            nc.export(nn.Linear(2, 2), (torch.randn(1, 2),), under="bf16")


def test_the_model_and_the_state_are_left_alone():
    """Weights, autocast state and the original program."""
    model, x = Model(), torch.randn(4, 8)
    before = copy.deepcopy(model.state_dict())
    with watch_graphs() as graphs:
        nc.export(model, (x,), under="bf16", fold_weights=True)
    assert len(graphs) == 1 and graphs[0].after is not None
    assert not torch.is_autocast_enabled("cpu")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Noisy(torch.nn.Module):
    """It draws from a generator of its own."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, x):
        generator = torch.Generator().manual_seed(1)
        return self.layer(x) + torch.randn(4, 8, generator=generator, dtype=x.dtype)


def test_a_generator_that_export_lifts_is_kept():
    """It is an object of the program's: drawing from it while formats are checked leaves it as it is."""
    model, x = Noisy(), torch.randn(4, 8)
    with nc.autocast("cpu", torch.bfloat16):
        expected = model(x)
    found = nc.export(model, (x,), under="bf16").module()(x)
    assert torch.equal(found, expected)


class Branches(torch.nn.Module):
    """Two parts, and what pins them or rules name."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8), torch.nn.GELU()

    def forward(self, x):
        return self.first(x) + self.second(x), self.third(self.first(x))


@pytest.mark.parametrize("by", ["pins", "rules"])
@pytest.mark.parametrize("strict", [False, True])
def test_several_boundaries_of_modules_are_exported(by, strict):
    """Of one model, each with another decision; Dynamo knew the first alone."""
    model, x = Branches(), torch.randn(4, 8)
    policy = nc.Policy.native()
    if by == "pins":
        nc.pin(model.first, "fp32")
        nc.pin(model.second, "fp16")
    else:
        rules = [nc.Rule("module.call", "full", module="first"), nc.Rule("module.call", "to(fp16)", module="second")]
        policy = policy.with_rules(rules)
    with nc.autocast("cpu", torch.bfloat16, policy=policy):
        expected = model(x)
    found = nc.export(model, (x,), under=policy, strict=strict).module()(x)
    assert [t.dtype for t in found] == [t.dtype for t in expected] and all(map(torch.equal, found, expected))


class Distilled(torch.nn.Module):
    """A teacher that is not trained."""

    def __init__(self, inside):
        super().__init__()
        self.student, self.teacher, self.inside = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8), inside

    def forward(self, x):
        if self.inside == "set_grad_enabled":
            torch.set_grad_enabled(False)
            aim = self.teacher(x)
            torch.set_grad_enabled(True)
            return (self.student(x) - aim).square().mean()
        with torch.autocast("cpu", enabled=False) if self.inside == "autocast" else nullcontext(), torch.no_grad():
            aim = self.teacher(x)
        return (self.student(x) - aim).square().mean()


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("inside", ["", "autocast", "set_grad_enabled"])
@pytest.mark.parametrize("by", ["", "pin", "rule"])
def test_what_has_no_gradient_in_eager_code_has_none_in_a_program(by, inside, strict):
    """torch.export loses `no_grad` in an autocast block, which a boundary of a module is, too."""
    model = Distilled(inside)
    if by == "pin":
        nc.pin(model, "fp32")
    rules = [nc.Rule("module.call", "full", module_class="Distilled")] if by == "rule" else []
    program = nc.export(model, (torch.randn(4, 8),), under=nc.Policy.native().with_rules(rules), strict=strict).module()
    program(torch.randn(4, 8)).backward()
    assert {name for name, p in program.named_parameters() if p.grad is not None} == {"student.weight", "student.bias"}


@pytest.mark.parametrize("strict", [False, True])
def test_a_part_of_two_names_hides_no_rule_about_another(strict):
    """torch.export calls other objects then, which share the attributes of the model's modules."""
    model, x = Branches(), torch.randn(4, 8)
    model.tied = model.first
    policy = nc.Policy.native().with_rules(nc.Rule("module.call", "full", module="second"))
    with nc.autocast("cpu", policy=policy):
        expected = model(x)
    found = nc.export(model, (x,), under=policy, strict=strict).module()(x)
    assert all(a.dtype is b.dtype and torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert found[0].dtype is torch.float32


def scripted(model, x):
    """A script of a model."""
    return nc.script(model)


def traced(model, x):
    """A trace of a model."""
    return nc.trace(model, (x,))


@pytest.mark.parametrize("made", [scripted, traced, lambda model, x: torch.jit.script(model)])
@pytest.mark.parametrize("strict", [False, True])
def test_a_part_that_is_a_script_is_named(made, strict):
    """torch.export raises an INTERNAL ASSERT there, or a TypeError about the number of arguments."""
    x = torch.randn(2, 4)
    model = nn.Sequential(nn.Linear(4, 4), made(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), x))
    with pytest.raises(CaptureError, match=r"export of a script or trace \(1\)"):
        nc.export(model, (x,), under="bf16", strict=strict)


def test_a_part_that_torch_traced_is_exported():
    """torch.export reads a trace of torch's own, and the region holds in it."""
    x = torch.randn(2, 4)
    model = nn.Sequential(nn.Linear(4, 4), torch.jit.trace(nn.Linear(4, 4), x))
    assert nc.export(model, (x,), under="bf16").module()(x).dtype is torch.bfloat16


class Halves(nn.Module):
    """Two layers, and what the first gives times the other's weight."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        hidden = self.a(x)
        return self.b(torch.tanh(hidden)), hidden @ self.b.weight


@pytest.mark.parametrize("about", [{"call": 1}, {"function": "*forward"}])
def test_candidates_are_timed_outside_of_the_region(about):
    """Each has its casts already: the region cast them again, and a rule about functions raised a RegionError."""
    policy = nc.Policy.native().with_rules([nc.Rule("aten.linear", "full", **about)])
    program = nc.export(Halves(), (torch.randn(2, 16),), under=policy, goal="fast")
    assert program.module()(torch.randn(2, 16))[0].dtype is torch.float32
