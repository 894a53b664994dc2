"""Errors and memory, against hand-made cases."""

import copy
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import narrowcast as nc
from narrowcast.analysis.compare.judging import other_arguments
from narrowcast.analysis.compare.low_calls import AsksHigh
from narrowcast.analysis.compare.reference import KeptCall
from narrowcast.analysis.explain.cost import observe, with_cost
from narrowcast.observation.trial.output_errors import output_errors, relative_error, sqnr_db
from narrowcast.reports.documents.explanations import spent
from narrowcast.reports.results.differences import Differences
from narrowcast.runtime.torch_bridge import op_facts


def test_sqnr_and_relative_error_of_a_known_noise():
    """Noise of a tenth of the signal: 20 dB."""
    ref = torch.tensor([3.0, 4.0])
    x = ref * 1.1
    assert math.isclose(sqnr_db(ref, x), 20.0, abs_tol=1e-4)
    assert math.isclose(relative_error(ref, x), 0.1, abs_tol=1e-6)


def test_equal_zero_and_broken_tensors():
    """Infinity, zero reference, NaN; the same infinity on both sides is no error."""
    one = torch.ones(3)
    assert sqnr_db(one, one) == math.inf and relative_error(one, one) == 0
    assert sqnr_db(torch.zeros(3), one) == -math.inf and relative_error(torch.zeros(3), one) == 1.0
    assert math.isnan(sqnr_db(one, one * math.nan)) and math.isnan(sqnr_db(one, one * math.inf))
    both = torch.tensor([math.inf, 1.0])
    assert sqnr_db(both, both.clone()) == math.inf


def test_outputs_are_compared_by_name():
    """Nested; integers are left out."""
    ref = {"a": torch.ones(2), "b": (torch.ones(2), torch.tensor([1]))}
    rows = output_errors(ref, {"a": torch.ones(2).bfloat16(), "b": (torch.zeros(2), torch.tensor([1]))})
    assert [(r.name, r.found, r.largest_error) for r in rows] == [("a", "bf16", 0.0), ("b[0]", "fp32", 1.0)]


def test_peak_memory_counts_what_lives_at_once():
    """Views count nothing, freed tensors no longer, inputs not at all."""
    x = torch.ones(1000)

    def run():
        a = x + 1  # 4000
        a = a.view(10, 100)
        b = a + 1  # 8000
        del a
        c = b + 1  # 8000 again
        return c

    found = observe(run)
    assert found.peak_bytes == 8000 and found.result.shape == (10, 100)
    assert not found.casts_ns and observe(lambda: x.bfloat16()).casts_ns > 0 < found.kernels_ns


def test_the_cost_is_measured_in_pairs_and_metrics_are_kept():
    """Ratios of alternating pairs; both run twice more, observed. Weights are in the ratio of peaks."""
    runs = {"fp32": 0, "region": 0}

    def run(side):
        runs[side] += 1
        return torch.ones(4)

    found = Differences("model", "cpu", "native", "bf16", "fp32")
    both = (lambda: run("fp32"), lambda: run("region"))
    short = with_cost(found, ({"m": 1.0}, {"m": 2.0}), both, weight_bytes=48, repeats=3)
    assert short.metric_found == {"m": 2.0} and runs == {"fp32": 5, "region": 5}
    assert short.memory_ratio == 1 and short.region_peak_bytes == 16
    assert "kernels" in spent(replace(short, region_ms=1.0, reference_ms=1.0))
    assert spent(replace(short, region_ms=0.0)) == spent(replace(short, reference_ms=0.0)) == ""  # no sum of parts
    low, high = short.time_quartiles
    assert low <= short.time_ratio <= high


def test_a_step_of_one_format_alone_is_what_to_inspect():
    """No rule about another op helps where the program itself asks for the format."""

    class Branch(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.o = (torch.nn.Linear(8, n) for n in (8, 8, 2))

        def forward(self, x):
            scores = self.q(x) @ self.k(x).mT
            if scores.dtype == torch.float32:
                scores = scores / 8**0.5
            return self.o(scores.softmax(-1).to(x.dtype) @ x)

    found = nc.compare(Branch(), (2 * torch.randn(2, 6, 8),), under="bf16")
    assert found.verdict == "fault" and [todo.rule for todo in found.todos] == [{}], str(found)
    assert "aten.div.Tensor #1" in found.todos[0].why


def test_of_compiled_code_that_is_not_finite_the_rules_are_those_that_help_eager_code():
    """A quotient by what has become zero is not at fault by itself: rules are tried on what was compiled."""

    class Ratio(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(8, 8)

        def forward(self, x):
            h = self.layer(x).abs() * 1e-7 * 1e-3
            return h / h.sum(-1, keepdim=True)

    torch.manual_seed(0)
    model, x = Ratio(), torch.randn(4, 8)
    found = nc.compare(nc.compile(model, under="fp16", backend="aot_eager"), (x,))
    rules = [todo.rule for todo in nc.compare(model, (x,), under="fp16").todos if todo.rule]
    assert found.verdict == "not finite" and rules == [todo.rule for todo in found.todos if todo.rule] != [], found
    torch._dynamo.reset()


def test_an_argument_that_one_of_two_models_leaves_out_is_named():
    """By its own name, and not by that of the argument that follows."""

    class Attention(torch.nn.Module):
        def __init__(self, scale):
            super().__init__()
            self.scale = scale

        def forward(self, q):
            return torch.nn.functional.scaled_dot_product_attention(q, q, q, scale=self.scale)

    torch.manual_seed(0)
    q = torch.randn(2, 4, 6, 8)
    for scales, was in (((1.0, None), "is 1.0, None in"), ((None, 1.0), "is None, 1.0 in")):
        one, other = map(Attention, scales)
        found = nc.compare(one, (q,), reference=other)
        assert [row.why for row in found.faults] == [f"its argument scale {was} the reference"], found
        [todo] = found.todos
        assert todo.what.startswith("Look at aten.scaled_dot_product_attention.default") and not todo.rule, found


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_cast_to_a_wider_format_rounds_nothing_and_is_not_named():
    """A weight is transposed in one of two models, whose backwards cast gradients to fp32."""
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    right = torch.nn.Sequential(
        torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16), torch.nn.LayerNorm(16)
    )
    wrong = copy.deepcopy(right)
    wrong[2].weight.data = right[2].weight.detach().t().contiguous()
    a, b = (nc.compile(model, under="bf16", backend="aot_eager") for model in (wrong, right))
    found = nc.compare(a, (x,), reference=b, backward=True)
    assert found.verdict == "fault" and "rounds to fp32" not in str(found), found


def test_a_region_that_is_off_is_none_and_no_rule_is_tried_in_it():
    """What a region would do is not said to be what a rule does."""

    class Overflows(torch.nn.Module):
        def forward(self, x):
            return torch.tanh((x * 300) @ x.t() / 300)

    x = torch.linspace(1, 20, 64, dtype=torch.float16).view(8, 8)
    found = nc.compare(Overflows().half(), (x,), under=nc.autocast("cpu", enabled=False))
    assert not found.policy and found.verdict == "not finite" and found.remedy is None, found


def test_a_low_model_that_holds_what_has_no_copy_is_compared():
    """A lock is shared; without a copy in fp32 there would be no reference."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU(), torch.nn.Linear(16, 4)).bfloat16()
    model[1].lock = threading.Lock()
    x = torch.randn(4, 16).bfloat16()
    compared = nc.compare(model, (x,), under=nc.autocast("cpu", enabled=False))
    assert compared.verdict == "round-off"
    assert model[0].weight.dtype is torch.bfloat16


def test_a_call_that_is_made_under_autocast_alone_is_named_by_its_line():
    """Another call of the same op follows, on a line that both runs have; an explanation says the same."""

    class Asking(torch.nn.Module):
        def forward(self, x):
            if torch.is_autocast_enabled("cpu"):
                x = x * 0.25  # here
            return torch.softmax(torch.matmul(x, x.mT) * 0.5, -1)

    torch.manual_seed(0)
    here = Asking.forward.__code__.co_firstlineno + 2
    x = torch.randn(2, 8, 16)
    found = nc.compare(Asking(), (x,), under="bf16")
    assert f":{here})" in found.todos[0].why and "aten.mul.Tensor #1" in found.todos[0].why, str(found)
    explained = nc.explain(Asking(), (x,), under="bf16", run=True)
    assert explained.todos[0].why == found.todos[0].why
    assert len(found.unmatched) == 1


def test_an_argument_that_depends_on_the_format_is_named_before_what_would_help():
    """The line that asks for it, and then the call whose result would have to be in fp32."""

    class Normed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.last = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

        def forward(self, x):
            h = self.layer(x)
            squares = h.float().square().mean(-1, keepdim=True)
            return self.last(h * torch.rsqrt(squares + torch.finfo(h.dtype).eps))

    torch.manual_seed(0)
    found = nc.compare(Normed(), (torch.randn(4, 8) * 0.05,), under="bf16")
    assert "its argument other is 0.0078125" in found.todos[0].why, str(found)


def test_a_program_in_another_low_format_than_the_comparison_is_told_so():
    """torch's own error names neither the formats nor what to do."""

    def step(x):
        with torch.autocast("cpu", torch.float16):
            y = torch.mm(x, x)
        return torch.cat([y, x])

    with pytest.raises(RuntimeError) as raised:
        nc.compare(step, (torch.ones(2, 2),))
    [note] = raised.value.__notes__
    assert "than the region's, bf16, meets others, " in note and "under= says" in note
    assert nc.compare(step, (torch.ones(2, 2),), under="fp16").verdict in ("round-off", "exact", "not compared")


def test_the_reference_run_of_low_weights_that_a_function_holds_says_so():
    """Nothing is cast in it, so that low weights meet inputs in fp32; torch's error alone does not say where."""
    low = torch.nn.Linear(8, 8).bfloat16()
    with pytest.raises(RuntimeError, match="same dtype") as caught:
        nc.compare(lambda x: low(x), (torch.randn(2, 8),), under="bf16")
    assert "this was the reference run" in caught.value.__notes__[-1]
    wide = torch.nn.Linear(8, 8)
    with pytest.raises(RuntimeError, match="same dtype") as caught:
        nc.compare(lambda x: wide(x.to(torch.bfloat16)), (torch.randn(2, 8),), under="bf16")
    assert "a cast that the code makes itself (x.to(torch.bfloat16))" in caught.value.__notes__[-1]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_the_backward_of_a_batch_norm_in_any_layout_is_no_fault(dtype):
    """The cpu rounds each step of it where channels come last."""
    for seed in range(4):
        torch.manual_seed(seed)
        layers = torch.nn.ModuleList([torch.nn.Linear(6, 20), torch.nn.BatchNorm1d(20)])

        def model(x, layers=layers):
            return layers[1](layers[0](x).relu().mT).mT.square()

        x = torch.randn(3, 9, 6)
        found = nc.compare(model, (x,), under=dtype, backward=lambda y: y.float().mean())
        assert found.verdict != "kernel", str(found)


def test_dimensions_counted_from_the_end_are_those_from_the_start():
    """A trace of a bidirectional layer joins its directions at -1, eager code at 2."""
    torch.manual_seed(0)
    model, x = torch.nn.GRU(8, 6, bidirectional=True, batch_first=True), torch.randn(2, 5, 8)
    traced = nc.trace(model, (x,), under="bf16", check_trace=False)
    found = nc.compare(traced, (x,), reference=model)
    assert found.verdict == "round-off", str(found)


@pytest.mark.parametrize(("op", "adds"), [("aten.cat.default", 0), ("aten.stack.default", 1)])
def test_which_dimensions_are_the_same(op, adds):
    """What `stack` gives has one more than its tensors, from whose end it counts."""
    call = SimpleNamespace(facts=op_facts(torch.ops.aten.cat.default), args=([torch.empty(0, 0)],), kwargs={})
    call.id = SimpleNamespace(op=op)
    made = lambda dim: KeptCall(call, [torch.bfloat16], (("dim", dim),), [], ())
    assert other_arguments(made("-1"), made(str(1 + adds))) == []
    assert other_arguments(made("-1"), made(str(2 - adds))) == [(("dim", str(2 - adds)), ("dim", "-1"))]


def test_a_layer_that_asks_for_the_format_of_its_input_is_no_line_that_asks():
    """`nn.GRU` makes its first state in the format of its input: no line of the user's says so."""
    layer, x = torch.nn.GRU(4, 4).half(), torch.randn(3, 2, 4)
    with torch.no_grad(), AsksHigh() as run:
        low = x.half()
        layer(low)
        torch.zeros(2, dtype=low.dtype)
    first = test_a_layer_that_asks_for_the_format_of_its_input_is_no_line_that_asks.__code__.co_firstlineno
    assert [asked.line - first for asked in run.asked] == [4, 6]


class OfThreads(torch.nn.Module):
    """Parts that run in threads, as a server's do."""

    def __init__(self):
        super().__init__()
        self.parts = torch.nn.ModuleList(torch.nn.Linear(6, 32) for _ in range(2))

    def forward(self, x):
        with ThreadPoolExecutor(2) as pool:
            return sum(y.float() for y in pool.map(nc.carry(lambda part: part(x)), self.parts))


def test_what_threads_of_a_model_compute_is_not_judged():
    """Their calls are not seen, so that nothing says how far their rounding carries."""
    torch.manual_seed(0)
    found = nc.compare(OfThreads(), (torch.randn(8, 6),), under="bf16")
    assert found.verdict == "not judged" and any("threads of the model's own" in note for note in found.notes)


class Rows(torch.nn.Module):
    """Logits of the last token: of all, of which the last are returned, or of the last alone."""

    def __init__(self, computes_all, off=1.0):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.computes_all = torch.nn.Linear(8, 16), torch.nn.Linear(16, 30), computes_all
        self.off = off

    def forward(self, x):
        h = torch.relu(self.body(x))
        return self.head(h)[:, -1] if self.computes_all else self.head(h[:, -1]) * self.off


def test_another_program_may_compute_other_rows():
    """Results of other shapes inside are no fault where the outputs agree; where they do not, they are."""
    x = torch.randn(3, 5, 8)
    assert nc.compare(Rows(False), (x,), under="bf16", reference=Rows(True)).verdict in ("exact", "round-off")
    assert nc.compare(Rows(False, 1.1), (x,), under="bf16", reference=Rows(True)).verdict == "fault"
