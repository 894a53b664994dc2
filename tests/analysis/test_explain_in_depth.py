"""Models that raise under a policy, or give no numbers, and those that take gradients inside: what is said of them."""

import json
import warnings
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import narrowcast as nc
from narrowcast.core.policy.capabilities import one_format
from narrowcast.errors import NarrowcastError, RegionWarning
from narrowcast.runtime.torch_bridge import find_op

BF16, FP32 = torch.bfloat16, torch.float32
X, W = torch.linspace(-1, 1, 80).reshape(2, 5, 8), torch.linspace(-1, 1, 128).reshape(16, 8)


def contract(x, w):
    return torch.tensordot(F.linear(x, w), torch.ones(16, 3), dims=((2,), (0,)))


class Gather(nn.Module):
    """Adds rows that were lowered to a buffer that was not, in a part of its own."""

    def __init__(self):
        super().__init__()
        self.part = nn.ModuleDict({"linear": nn.Linear(8, 4)})
        self.register_buffer("rows", torch.zeros(5, 4))

    def forward(self, x):
        return self.rows.index_add(0, torch.arange(5), self.part["linear"](x[0]))


def matrix_vector(x, w):
    return torch.mv(F.linear(x[0], w), torch.ones(16))


def chain(x, w):
    return torch.linalg.multi_dot([F.linear(x[0], w), torch.ones(16, 4), torch.ones(4, 2)])


def grid(x, w):
    return torch.meshgrid(F.linear(x[0, 0], w), torch.ones(3), indexing="ij")[0]


def made_weights(x, w):
    return F.layer_norm(x, (8,), F.linear(x[0, 0], w[:8]), x[0, 1])


def closeness(x, w):
    return torch.isclose(F.linear(x, w), torch.ones(16)).float()


def put_reduced(x, w):
    return torch.ones(5, 16).index_reduce(0, torch.arange(5), F.linear(x[0], w), "mean")


MIXED = [contract, matrix_vector, chain, grid, made_weights, closeness, put_reduced]


@pytest.mark.parametrize("function", MIXED)
def test_a_goal_runs_what_raises_for_mixed_formats(function):
    """Native raises; with a goal it runs, and a warning names the op and the line."""
    with pytest.raises(RuntimeError), torch.autocast("cpu", BF16):
        function(X, W)
    torch._dynamo.reset()
    fast = nc.compile(function, under=BF16, backend="aot_eager", goal=nc.Goal.fast(verify=False))
    with pytest.warns(RegionWarning, match=r"raises under autocast.*test_explain_in_depth.py.*goal='fast'"):
        found = fast(X, W)
    # what is lowered is rounded once to bf16, and close values may then be equal or not
    if function is not closeness:
        torch.testing.assert_close(found.float(), function(X, W), rtol=3e-2, atol=3e-1)
    with nc.autocast("cpu", BF16, policy="safe"):
        assert function(X, W).dtype is found.dtype


@pytest.mark.parametrize("front_end", ["compile", "export"])
def test_every_graph_goal_runs_it_with_gradients(front_end):
    """A module, compiled with its backward, or exported."""
    model = Gather()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RegionWarning)
        if front_end == "export":
            found = nc.export(model, (X,), under=BF16, goal="fast").module()(X)
        else:
            torch._dynamo.reset()
            found = nc.compile(model, under=BF16, goal="fast", backend="aot_eager")(X)
            found.sum().backward()
            assert model.part["linear"].weight.grad is not None
    assert found.dtype is FP32


def test_where_native_runs_a_goal_changes_no_format():
    """Ops that take one format are left alone where they get one, and norms where the input alone is low."""

    def fine(x, w):
        low = F.linear(x, w)
        return torch.tensordot(x, torch.ones(8, 3), dims=1), F.layer_norm(low, (16,), torch.ones(16), torch.ones(16))

    with warnings.catch_warnings():
        warnings.simplefilter("error", RegionWarning)
        torch._dynamo.reset()
        found = nc.compile(fine, under=BF16, backend="aot_eager", goal=nc.Goal.fast(verify=False))(X, W)
    with torch.autocast("cpu", BF16):
        native = fine(X, W)
    assert [t.dtype for t in found] == [t.dtype for t in native] == [BF16, BF16]


@pytest.mark.parametrize("op", [lack.op for lack in one_format()])
def test_ops_of_one_format_exist(op):
    """And no rule of native is about them on the cpu: autocast would cast them, and they would not raise."""
    assert find_op(op) is not None
    assert not nc.Policy.native("cpu").table.candidates(op, True).whole


@pytest.mark.parametrize("made", ["region", "compile"])
def test_the_error_stays_torchs_and_its_note_says_what_to_ask(made):
    """With the user's line; under safe nothing is added."""
    run = nc.autocast("cpu", BF16)(contract)
    if made == "compile":
        torch._dynamo.reset()
        run = nc.compile(contract, under=BF16, backend="aot_eager")
    with pytest.raises(RuntimeError, match="same dtype") as caught:
        run(X, W)
    (note,) = caught.value.__notes__
    assert 'policy="safe"' in note and "nc.explain" in note
    assert f"{__file__}:{contract.__code__.co_firstlineno + 1}" in note
    with pytest.raises(RuntimeError) as caught, nc.autocast("cpu", BF16, policy="safe"):
        F.batch_norm(X[0], torch.zeros(8), torch.ones(8), F.linear(X[0, 0], W[:8]))
    assert not getattr(caught.value, "__notes__", [])


@pytest.mark.parametrize("front_end", ["eager", "compile"])
@pytest.mark.parametrize("model", [contract, Gather()], ids=["tensordot", "index_add"])
def test_what_raises_is_explained_as_far_as_it_ran(model, front_end):
    """The op, its formats, the line; and that safe runs it, which was tried. Text and JSON."""
    inputs = (X,) if isinstance(model, Gather) else (X, W)
    found = nc.explain(model, inputs, under="bf16", front_end=front_end, run=True)
    op, formats = ("aten.index_add", "fp32,bf16") if isinstance(model, Gather) else ("aten.tensordot", "bf16,fp32")
    failure = found.failure
    assert failure is not None and failure.op == f"{op}.default" and failure.formats == formats
    code = (Gather.forward if isinstance(model, Gather) else contract).__code__
    assert failure.file == __file__ and failure.line == code.co_firstlineno + 1
    assert [(a.policy, a.error) for a in failure.attempts] == [("safe", "")]
    assert found.ledger.op_formats()["aten.linear.default"] == {"bf16": 1} and found.comparison is None
    text = " ".join(found.to_text(every=True).split())
    assert f'under native, and not in fp32 (tried: policy "safe" runs it): {op} got' in text
    assert json.loads(found.to_json())["failure"]["attempts"] == [{"policy": "safe", "error": ""}]


@pytest.mark.parametrize("front_end", ["eager", "export"])
@pytest.mark.parametrize(
    "fill",
    [
        lambda s: s.masked_fill(torch.ones(4, 4, dtype=torch.bool).triu(1), -1e9),
        lambda s: F.pad(s, (0, 1), value=-(10**9)),
        lambda s: s.clamp(max=1e6),
    ],
)
def test_a_number_that_the_format_does_not_hold_raises_in_an_explanation_as_it_does_in_a_run(fill, front_end):
    """Fake tensors take any number: such a model is run itself. A size beyond that number is no such number."""
    found = nc.explain(lambda s: fill(s @ s), (torch.ones(4, 4),), under="fp16", front_end=front_end)
    assert found.verdict == "raises" and "without overflow" in found.failure.error
    assert found.failure.file == __file__ and found.failure.line == fill.__code__.co_firstlineno
    assert nc.explain(lambda s: fill(s @ s), (torch.ones(4, 4),), under="bf16").verdict == "explained"
    sizes = nc.explain(lambda s: (s @ s)[:, : 10**6].expand(10**5, 4, 4), (torch.ones(4, 4),), under="fp16")
    assert sizes.ran_on.startswith("fake tensors")


def test_a_suggestion_that_raises_is_said_to():
    """NumPy has no bf16, whatever the policy."""
    found = nc.explain(lambda x, w: torch.from_numpy(F.linear(x, w).numpy()), (X, W), under="bf16")
    assert found.failure is not None and found.failure.attempts[0].error.startswith("TypeError")
    assert "raises, too" in found.failure.text


def test_a_model_that_steps_aside_for_modes_is_seen_all_the_same():
    """As torch's fused layers do: they ask whether functions are watched, and take another path then."""

    def fused(x, w):
        low = F.linear(x[0], w)
        if torch.overrides.has_torch_function((low,)):
            return low.numpy()
        return torch.zeros(5, 16).index_add(0, torch.arange(5), low)

    failure = nc.explain(fused, (X, W), under="bf16").failure
    assert failure is not None and failure.op == "aten.index_add.default" and "same scalar type" in failure.error


def test_under_a_users_policy_that_policy_is_repaired_first():
    """Its own rules stay; what the head of the file is to say is told."""
    policy = nc.Policy.native().with_rules(nc.Rule("aten.softmax", "lower"), name="mine")
    failure = nc.explain(contract, (X, W), under=policy).failure
    assert [a.policy for a in failure.attempts] == ['mine with unsupported = "full"', "safe"]
    assert not any(a.error for a in failure.attempts)


def test_what_raises_in_fp32_too_is_raised():
    """That is the model's own error."""
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        nc.explain(lambda x: F.linear(x, torch.ones(3, 5)), (X,), under="bf16")


class Forces(nn.Module):
    """Energies, and the forces that their gradient is."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 16), nn.Linear(16, 1)

    def forward(self, positions):
        positions = positions.detach().requires_grad_()
        energy = self.second(F.silu(self.first(positions))).sum()
        return energy, -torch.autograd.grad(energy, positions)[0]


def test_a_model_that_takes_gradients_inside_is_compared():
    """Energies and forces, each with its error; the user's grad mode and parameters are left."""
    model = Forces()
    found = nc.explain(nc.Case(model, (torch.linspace(-1, 1, 15).reshape(5, 3),)), under="bf16", run=True)
    energy, forces = found.comparison.outputs
    assert energy.found == "bf16" and forces.found == "fp32" and 20 < forces.sqnr_db < 100
    assert all(p.grad is None for p in model.parameters()) and torch.is_grad_enabled()


def overflows(x):
    mask = torch.full((4, 4), float("-inf")).triu(1)  # infinity that is meant
    weights = torch.softmax(x @ x + mask, -1)
    large = F.linear(x * 300, torch.ones(4, 4))
    large = large * 300
    return (weights @ large) * 0


def test_the_first_value_that_is_not_finite_is_found():
    """The maximum of fp16 is 65504: the product of two large ones. Infinities of a mask are not it."""
    found = nc.explain(overflows, (torch.ones(4, 4),), under="fp16", run=True)
    first = found.comparison.not_finite
    assert first is not None and first.text.startswith("infinity in the fp16 result of aten.mul.Tensor")
    assert first.file == __file__ and first.line == overflows.__code__.co_firstlineno + 4
    assert found.comparison.reference_not_finite is None
    text = " ".join(found.to_text(every=True).split())
    assert "Not finite in the region, and finite in fp32: infinity in the fp16 result of aten.mul.Tensor" in text
    short = json.loads(found.to_json(), parse_constant=pytest.fail)["comparison"]  # NaN and infinities are text
    short = short["differences"]
    assert found.comparison.worst[0].id.op == "aten.mul.Tensor" and "aten.mul.Tensor" in short["not_finite"]["id"]
    assert short["outputs"][0]["sqnr_db"] == "nan" and short["verdict"] == "not finite" and short["runs"] > 8


def test_fp32_that_is_not_finite_itself_is_said():
    """The region is not blamed."""
    found = nc.explain(lambda x: torch.log(-x) @ x, (torch.ones(4, 4),), under="bf16", run=True)
    assert found.comparison.not_finite is None
    assert found.comparison.reference_not_finite.text.startswith("nan in the fp32 result of aten.log")
    text = " ".join(found.to_text(every=True).split())
    assert "fp32 itself is not finite" in text and "VERDICT: Not finite in fp32 either: nan made by aten.log" in text
    assert "aten.log.default" in found.todos[0].why and f"{__file__}:" in found.todos[0].why, found.todos


def test_a_comparison_is_the_short_form_of_nc_compare():
    """The same errors, verdicts and worst calls; six runs where all is finite, none to look for what is not."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*(nn.Linear(32, 32) for _ in range(7))), torch.randn(4, 32)
    short = nc.explain(model, (x,), under="bf16", run=True).comparison
    whole = nc.compare(model, (x,), under="bf16", isolate=0)
    assert short.not_finite is None and short.reference_not_finite is None
    assert (
        whole.runs == 6
        and short.outputs == whole.outputs
        and short.differences.round_off_bound == whole.round_off_bound
    )
    worst, those = ([str(replace(row, line=0)) for row in rows] for rows in (short.worst, whole.worst))  # NaN, too
    assert worst == those[:5] and len(those) == 7
    assert (short.differences.verdict, short.differences.runs) == ("round-off", 6)
    text = " ".join(nc.explain(model, (x,), under="bf16", run=True).to_text(every=True).split())
    assert (
        "VERDICT: Within round-off of fp32" in text
        and "Errors of each call: local (its own), propagated, total" in text
    )


def test_a_fault_is_said_in_the_short_form():
    """As nc.compare says it: an epsilon that is another one in low formats."""
    linear = nn.Linear(32, 32)

    def shaky(x):
        y = linear(x)
        return F.layer_norm(y, (32,), eps=1e-5 if y.dtype is FP32 else 0.5)

    found = nc.explain(shaky, (torch.randn(4, 32),), under="bf16", run=True)
    assert found.comparison.worst[0].verdict == "fault" and found.comparison.differences.verdict == "fault"
    text = " ".join(found.to_text(every=True).split())
    assert (
        "VERDICT: Further from fp32 than round-off explains" in text
        and "its argument eps is 0.5, 1e-05 in the reference" in text
    )


def test_what_gives_no_floating_tensor_is_timed_all_the_same():
    """nc.compare refuses it."""
    comparison = nc.explain(lambda x: (x @ x).argmax(), (torch.ones(4, 4),), under="bf16", run=True).comparison
    assert comparison.outputs == () and comparison.repeats >= 3


def test_a_model_without_weights_is_explained_by_fakes_and_says_so():
    """On meta nothing real can run: that real tensors would be refused is in the note."""
    with torch.device("meta"):
        model = Gather()
    found = nc.explain(model, (torch.ones(2, 5, 8, device="meta"),), under="bf16")
    assert "aten.index_add.default" in found.note and "real ones may not" in found.note
    with pytest.raises(NarrowcastError):
        nc.explain(model, (X,), under="bf16", real=True)


class Counting(nn.Module):
    """It counts its calls in a weight, in a plain tensor and in its input."""

    def __init__(self, by_value):
        super().__init__()
        self.layer, self.by_value = nn.Linear(4, 4), by_value
        self.calls = nn.Parameter(torch.zeros(()), requires_grad=False)
        self.seen = torch.zeros(3)

    def forward(self, x):
        self.calls.add_(1)
        self.seen += 1
        x.mul_(2)
        return self.layer(x) if not self.by_value or bool(x.sum() > 0) else self.layer(-x)


@pytest.mark.parametrize("by_value", [False, True])
def test_what_a_model_writes_to_is_restored(by_value):
    """Weights, plain tensors and inputs; where fake tensors carry it, and where it runs for real."""
    model, x = Counting(by_value), torch.ones(2, 4)
    nc.explain(model, (x,), run=True, under="bf16", times=True)
    assert model.calls.item() == 0 and not model.seen.any() and torch.equal(x, torch.ones(2, 4))


def test_a_cast_of_the_model_that_overflows_in_fp32_too_is_not_the_regions():
    """The region makes casts of its own before it: the same line is the same."""

    class Halved(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(8, 8)

        def forward(self, x):
            return (self.layer(x) * 1e6).half() * 0

    torch.manual_seed(0)
    explained = nc.explain(Halved(), (torch.randn(4, 8),), under="bf16", run=True)
    text = " ".join(str(explained).split())
    assert "fp32 itself is not finite" in text and "where fp32 is" not in text and "finite in fp32" not in text, text


def test_numbers_that_vmap_converts_are_no_casts():
    """Gradients of each sample, multiplied by a loss scale that is a number: it runs, and nothing goes uninspected."""
    weight, x, y = torch.randn(4), torch.randn(6, 4), torch.randn(6)

    def loss(weight, x, y, scale):
        return ((x @ weight).float() - y).square() * scale

    def step():
        return torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0, None))(weight, x, y, 256.0) / 256.0

    explained = nc.explain(step, (), under="bf16", run=True)
    assert explained.failure is None and "not inspected" not in explained.note
    assert nc.diff(nc.capture(step, under="bf16"), nc.capture(step, under="bf16")).verdict == "alike"


@pytest.mark.parametrize("makes_data", [False, True])
def test_a_loop_that_is_a_generator_goes_on_after_it_was_explained(makes_data):
    """What it computes stays in its frame, which must not hold fake tensors; what the frame names is restored."""
    torch.manual_seed(0)
    model, given = torch.nn.Linear(6, 2), torch.randn(16, 6)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)

    def training(model, optimizer):
        x = torch.randn(16, 6) if makes_data else given
        while True:
            loss = model(x).float().square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield loss.detach()

    steps = training(model, optimizer)
    if not makes_data:
        next(steps)  # it has begun, with its own model, which no closure names
    before = [p.detach().clone() for p in model.parameters()]
    for run in (False, True):
        explained = nc.explain(lambda: next(steps), under="bf16", run=run)
        assert explained.failure is None and "generator" in explained.note, explained
        assert all(map(torch.equal, before, model.parameters()))
    assert type(next(steps)) is torch.Tensor and bool(next(steps).isfinite())


def test_a_weight_that_torch_s_cache_gives_in_another_format_is_noticed():
    """Fake products take several formats, and the explanation was that of a program that raises."""

    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            x = self.layer(x)
            with torch.autocast("cpu", torch.bfloat16):
                return self.layer(x)

    found = nc.explain(Nested(), (torch.randn(4, 8),), under="fp16")
    assert found.failure is not None and "same dtype" in found.failure.error and found.ran_on == "the model itself"
