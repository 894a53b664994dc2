"""Models of many kinds, captured and compared: what is said of them is so, and nothing is left in them."""

import dataclasses
import random

import numpy as np
import pytest
import torch
from torch import nn

import narrowcast as nc


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def x():
    return torch.randn(4, 16)


class TestNothingIsLeft:
    """Of models that are functions, and of models that change themselves."""

    @pytest.mark.parametrize("verb", [nc.capture, nc.compare])
    def test_a_function_leaves_no_gradient_in_what_it_closes_over(self, verb, x):
        """A backward through a lambda keeps a layer's own `.grad` and creates none beside it."""
        linear, free = nn.Linear(16, 4), torch.ones(4, requires_grad=True)
        before = linear.weight.grad = torch.ones(4, 16)
        verb(lambda x: linear(x) * free, (x,), backward=True)
        assert linear.weight.grad is before and bool((before == 1).all())
        assert linear.bias.grad is None and free.grad is None

    def test_a_function_that_trains_leaves_its_weights_as_they_were(self, x):
        """An optimizer's step inside the function is undone, and asking for a further backward is refused."""
        linear = nn.Linear(16, 4)
        optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)
        before = linear.weight.detach().clone()

        def step(x):
            optimizer.zero_grad()
            loss = linear(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        assert nc.compare(step, (x,), under="bf16").verdict == "round-off"
        assert torch.equal(linear.weight, before)
        with pytest.raises(nc.errors.RunError, match="differentiated its output itself"):
            nc.compare(step, (x,), under="bf16", backward=True)
        assert torch.equal(linear.weight, before)

    def test_gradients_of_a_function_are_compared_by_their_names(self, x):
        """The module in a lambda's closure has its gradients compared under its parameters' names."""
        model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4))
        found = nc.compare(lambda x: model(x), (x,), under="bf16", backward=True)
        assert [g.parameter for g in found.gradients] == ["0.weight", "0.bias", "1.weight", "1.bias"]


class TestVerdicts:
    """Are those of the model, not of the way in which it runs."""

    @pytest.mark.parametrize(
        ("kind", "backward", "reference"),
        [(nn.LSTM, True, "fp32"), (nn.GRU, False, "fp32"), (nn.GRU, True, "fp64"), (nn.LSTM, False, "fp64")],
    )
    def test_a_recurrent_network_has_no_fault(self, kind, backward, reference):
        """Under `safe`: a cpu with AVX2 alone has no bf16 LSTM, and rounds its results alone."""
        model = kind(16, 8, 2, bidirectional=True)
        x = torch.randn(5, 2, 16)
        found = nc.compare(
            model,
            (x,),
            under="safe",
            backward=backward,
            reference=reference,
            isolate=0,
        )
        assert found.verdict == "round-off" and not found.faults, found

    def test_a_script_in_a_model_is_in_fp32_in_the_reference(self, x):
        """Its calls are cast in the bf16 run but not in the reference, so the verdict is round-off."""
        script = torch.jit.script(nn.Sequential(nn.Linear(16, 8), nn.ReLU()))
        model = nn.Sequential(script, nn.Linear(8, 4))
        found = nc.compare(model, (x,), under="bf16")
        assert found.verdict == "round-off" and all(row.is_low for row in found.rows if "linear" in row.id.op), found
        assert not {call.computes for call in nc.capture(script, (x,)).calls} - {"fp32"}
        assert "bf16" in {call.computes for call in nc.capture(script, (x,), under="bf16").calls}

    def test_a_mask_in_place_of_an_argument_is_no_fault(self):
        """A causal mask as a tensor and `is_causal=True` compute the same, however different the arguments."""
        q = torch.randn(1, 2, 8, 16)
        mask = torch.ones(8, 8, dtype=torch.bool).tril()
        attention = nn.functional.scaled_dot_product_attention
        found = nc.compare(
            lambda q: attention(q, q, q, attn_mask=mask), (q,), reference=lambda q: attention(q, q, q, is_causal=True)
        )
        assert found.verdict in ("exact", "round-off") and not found.faults, found

    def test_random_numbers_from_elsewhere_are_no_round_off(self, x):
        """A factor from the model's own iterator differs in each run, so the verdict is nondeterministic."""
        numbers = iter(range(1, 100))
        found = nc.compare(nn.Sequential(nn.Linear(16, 4), Times(numbers)), (x,), under="bf16", isolate=0)
        assert found.verdict == "nondeterministic" and not found.todos, found  # what a rule moves, the iterator moves

    def test_what_grows_where_terms_cancel_is_inherited_round_off(self):
        """Rounding what is cast moves a sum that cancels by far more than its own unit, and a logarithm shows it."""
        x = torch.sin(torch.arange(1024) * 0.1).reshape(1, 1, -1)
        kernels = torch.cos(torch.arange(64) * torch.linspace(0.2, 2, 32)[:, None])[:, None]
        found = nc.compare(lambda x: nn.functional.conv1d(x, kernels).float().square().log10(), (x,), under="bf16")
        assert found.verdict == "round-off" and not found.faults, found

    def test_random_numbers_of_python_and_numpy_are_the_same_in_each_run(self, x):
        """Both generators start each run in the same state, and are in their former state afterwards."""
        linear = nn.Linear(16, 4)
        before = random.getstate(), np.random.get_state()[1].tolist()
        found = nc.compare(lambda x: linear(x) * random.random() + float(np.random.rand()), (x,), under="bf16")
        assert found.verdict == "round-off", found
        assert (random.getstate(), np.random.get_state()[1].tolist()) == before

    @pytest.mark.parametrize("reference", ["fp32", "fp64"])
    def test_complex_outputs_and_gradients_are_compared(self, reference, x):
        """A spectrum is compared in complex64 or complex128, and the filter's gradient is complex, too."""
        found = nc.compare(Spectrum(), (x,), under="bf16", reference=reference, backward=True)
        assert found.verdict == "round-off" and 1e-4 < found.outputs[0].relative_error < 1e-2, found
        assert found.outputs[0].reference.startswith("c128" if reference == "fp64" else "c64")
        assert {g.parameter: g.format for g in found.gradients}["filter"] == "c64"

    def test_a_gradient_that_is_zero_but_for_round_off_is_told_from_those_that_are_off(self):
        """A bias before batch norm has no gradient but rounding, so it is reported once, as zero up to round-off."""
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3))
        found = nc.compare(model, (torch.randn(4, 3, 8, 8),), under="bf16", backward=True)
        assert [g.parameter for g in found.gradients if g.is_round_off_alone] == ["0.bias"], found
        assert {g.verdict for g in found.gradients} <= {"round-off", "exact"}, found
        assert "zero up to round-off: 1 (0.bias)" in " ".join(str(found).split()) and str(found).count("0.bias") == 1, (
            found
        )

    def test_a_small_gradient_that_underflows_is_no_round_off(self):
        """A factor of 1e-9 flushes most of an fp16 gradient to zero, which is underflow and no noise around zero."""
        model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4), Scaled(1e-9))
        found = nc.compare(model, (torch.randn(4, 16),), under="fp16", backward=True)
        assert not any(g.is_round_off_alone for g in found.gradients), found
        assert max(g.underflow for g in found.gradients) > 0.5, found

    def test_a_model_that_brings_its_casts_is_told_from_one_without_error(self, x):
        """An exported program has its casts in the reference as well, so a zero difference would prove nothing."""
        program = nc.export(nn.Linear(16, 4), (x,), under="bf16")
        found = nc.compare(program, (x,))
        assert found.verdict == "not compared", found
        assert "VERDICT: Not compared" in str(found)

    def test_the_outputs_of_a_dataclass_are_compared(self, x):
        """The tensor in its field counts as the model's one output and has an error of its own."""
        found = nc.compare(GivesADataclass(), (x,), under="bf16")
        assert len(found.outputs) == 1 and found.outputs[0].relative_error > 0


class Spectrum(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.filter = nn.Parameter(torch.randn(9, dtype=torch.complex64))

    def forward(self, x):
        return torch.fft.rfft(self.linear(x).float()) * self.filter


class Scaled(nn.Module):
    def __init__(self, by):
        super().__init__()
        self.by = by

    def forward(self, x):
        return x.float() * self.by


class Times(nn.Module):
    def __init__(self, numbers):
        super().__init__()
        self.take = lambda: next(numbers)

    def forward(self, x):
        return x * self.take()


@dataclasses.dataclass
class Output:
    logits: torch.Tensor


class GivesADataclass(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 4)

    def forward(self, x):
        return Output(self.linear(x))


class TestRuns:
    """What runs by itself runs here, too; what cannot is said."""

    def test_batch_normalization_that_keeps_nothing_gives_empty_results(self):
        """In eval mode the op also returns empty statistics, which the comparison passes over."""
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
        assert nc.compare(model, (torch.randn(2, 3, 8, 8),), under="bf16").verdict == "round-off"

    def test_a_model_that_differentiates_inside_needs_no_backward(self, x):
        """Forces from `torch.autograd.grad` are captured and compared without asking for a backward."""

        class Forces(nn.Module):
            def __init__(self):
                super().__init__()
                self.energy = nn.Linear(16, 1)

            def forward(self, x):
                x = x.detach().requires_grad_()
                energy = self.energy(x).square().sum()
                return torch.autograd.grad(energy, x)[0]

        assert nc.capture(Forces(), (x,)).calls
        assert nc.compare(Forces(), (x,), under="bf16").verdict == "round-off"

    def test_sparse_gradients_are_compared(self):
        """An embedding with `sparse=True` has its gradient compared beside the dense ones of a linear layer."""
        model = nn.Sequential(nn.Embedding(10, 16, sparse=True), nn.Linear(16, 4))
        found = nc.compare(model, (torch.randint(0, 10, (3, 5)),), under="bf16", backward=True)
        assert {g.parameter for g in found.gradients} == {"0.weight", "1.weight", "1.bias"}

    def test_an_op_that_writes_where_it_reads_is_not_tried_alone(self, x):
        """`+=` overwrites its own input, so running it a second time would add twice; the model is still compared."""

        class Adds(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = nn.Linear(16, 4)

            def forward(self, x):
                y = self.linear(x)
                y += self.linear(x)
                return y

        assert nc.compare(Adds(), (x,), under="bf16").verdict == "round-off"

    @pytest.mark.parametrize("transform", [torch.func.vmap, lambda f: torch.func.grad(lambda x: f(x).sum())])
    def test_transforms_of_functions_run(self, transform, x):
        """Functions from `torch.vmap` and `torch.func.grad` can be captured, compared and watched."""
        weight = torch.randn(4, 16)
        run = transform(lambda x: nn.functional.linear(x, weight))
        assert nc.capture(run, (x,)).calls
        assert nc.compare(run, (x,), under="bf16").outputs
        with nc.watch() as w, nc.autocast("cpu", dtype="bf16"):
            run(x)
        assert w.first is None

    def test_nested_tensors_are_passed_over(self):
        """An encoder with padding makes nested tensors, which have no statistics, and the capture finishes."""
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=True).eval()
        padding = torch.arange(5)[None] >= torch.tensor([[5], [3]])
        with torch.no_grad():
            assert nc.capture(model, ((torch.randn(2, 5, 16),), {"src_key_padding_mask": padding})).calls

    def test_the_first_screen_has_80_columns(self):
        """Long module names push no line beyond that, nor the text beyond 25 lines."""

        class ModuleWithALongName(nn.Module):
            def __init__(self):
                super().__init__()
                self.feature_extraction_of_the_first_stage = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))

            def forward(self, x):
                return self.feature_extraction_of_the_first_stage(x)

        text = str(nc.compare(ModuleWithALongName(), (torch.randn(2, 3, 8, 8),), under="bf16", backward=True))
        assert max(map(len, text.splitlines())) <= 80 and len(text.splitlines()) <= 25, text

    def test_what_does_not_run_in_fp64_is_said(self, x):
        """An fp32 layer in a closure cannot be converted, so a reference in fp64 is refused."""
        linear = nn.Linear(16, 4)
        with pytest.raises(nc.errors.RunError, match="does not run in fp64"):
            nc.compare(lambda x: linear(x), (x,), under="bf16", reference="fp64")

    def test_an_output_that_overflows_is_compared_and_the_call_is_named(self, x):
        """The verdict is "not finite", and the multiplication that exceeds fp16 is on the first screen."""
        found = nc.compare(lambda x: (x @ x) * 60000, (torch.ones(4, 4),), under="fp16", isolate=0)
        assert found.verdict == "not finite" and found.runs > 8
        assert found.not_finite.id.op == "aten.mul.Tensor" and found.not_finite.what == "infinity"
        assert "; first infinity in the fp16 result of aten.mul.Tensor" in " ".join(str(found).split())

    def test_where_a_reference_begins_to_be_nan_is_said(self, x):
        """The logarithm makes NaN in fp32 as well, so it is reported for the reference and not for the run."""
        found = nc.compare(lambda x: (x @ x, torch.log(-x)), (torch.ones(4, 4),), under="bf16", isolate=0)
        assert found.not_finite is None
        assert found.reference_not_finite.text.startswith("nan in the fp32 result of aten.log")
        assert len(str(found).splitlines()) <= 25

    def test_limits_hold_in_runs_with_moved_results(self):
        """What is clamped is an index after that: moved by one unit it would be out of bounds."""
        support = torch.linspace(-5.0, 5.0, 21)

        def projected(x, w):
            at = ((x @ w).float().clamp(-5.0, 5.0) + 5.0) / 0.5
            return support[at.floor().long()] + at

        found = nc.compare(projected, (3 * torch.randn(16, 8), torch.randn(8, 8)), under="bf16")
        assert found.verdict == "round-off", found.to_text(every=True)

    def test_an_overflow_that_a_quotient_hides_is_named_first(self):
        """1 / sqrt(inf) is 0: the output is finite, and wrong. The square is to blame, not where the error grows."""
        model, x = nn.Sequential(nn.Linear(16, 16), _Normed()), torch.randn(4, 16)
        found = nc.compare(model, (x,), under="fp16")
        assert found.verdict == "not finite" and found.not_finite.id.op == "aten.mul.Tensor"
        assert found.todos[0].rule["op"] == "aten.mul.Tensor" and found.todos[0].path == "1"

    @pytest.mark.parametrize(
        ("function", "backward"), [(lambda x: (x - x).log() * 0.0, False), (lambda x: (x - x).sqrt(), True)]
    )
    def test_what_fp32_does_not_compute_is_not_compared_and_its_call_is_advised_on(self, function, backward):
        """An output of nothing but NaN, or a gradient that is infinite, in fp32 as well: its op and line are named."""
        x = torch.ones(4, requires_grad=backward)
        found = nc.compare(function, (x,), under="fp16", backward=backward)
        assert found.verdict == "not compared"
        own, line = found.reference_not_finite, function.__code__.co_firstlineno
        assert (own.file, own.line) == (__file__, line)
        assert f"{__file__}:{line}" in f"{found.todos[0].what} {found.todos[0].why}"
        assert "not finite in the reference either" in " ".join(str(found).split())

    def test_a_loss_that_is_infinite_beside_finite_gradients_is_told(self):
        """That of an absolute value is a sign, whatever the target: the logarithm of the target is named."""
        target = torch.tensor([0.0, 0.5, 0.25, 1.0])
        found = nc.compare(
            nn.Linear(4, 4),
            (torch.ones(2, 4),),
            under="bf16",
            backward=lambda y: (y.float() - target.log()).abs().mean(),
        )
        own = found.reference_not_finite
        assert own.id.op == "aten.log.default" and "aten.log.default" in found.todos[0].why, str(found)

    def test_a_rule_that_leaves_another_output_infinite_is_not_said_to_help(self):
        """Two products overflow, of which either reaches one output alone."""
        layer = nn.Linear(16, 16)

        def both(x):
            y = layer(x) * 500
            return x @ (y @ y.T) / 25e4, torch.einsum("ij,kj->ik", 3 * y, y).sum()

        found = nc.compare(both, (torch.randn(16, 16),), under="fp16")
        assert found.verdict == "not finite"
        if found.remedy is not None:
            policy = nc.Policy.load("native").with_rules(found.remedy.rules)
            with nc.autocast("cpu", torch.float16, policy=policy):
                assert all(one.isfinite().all() for one in both(torch.randn(16, 16)))

    def test_parameters_that_lose_their_gradients_are_a_fault(self):
        """torch.export loses the backward of a Function: parameters before it get no gradient, and are named."""
        model, x = nn.Sequential(nn.Linear(4, 8), _Steps(), nn.Linear(8, 2)), torch.randn(16, 4)
        made = nc.export(model, (x,), under="bf16").module()
        found = nc.compare(made, (x,), reference=model, backward=lambda y: y.float().square().mean())
        assert found.verdict == "fault"
        assert found.todos[0].what == "Find out why 0.weight has no gradient"
        same = nc.compare(model, (x,), under="bf16", backward=lambda y: y.float().square().mean())
        assert same.verdict == "round-off"

    def test_parameters_that_one_model_alone_has_lose_nothing(self):
        """Two layers in one: the gradients of the layer that both have are compared."""
        apart, fused, x = _Product(), _Product(fused=True), torch.randn(5, 8)
        fused.both.weight.data = torch.cat([apart.a.weight.data, apart.b.weight.data])
        fused.head.load_state_dict(apart.head.state_dict())
        found = nc.compare(fused, (x,), reference=apart, under="bf16", backward=True)
        assert found.verdict in ("exact", "round-off"), found.to_text(every=True)
        assert [row.parameter for row in found.gradients] == ["head.weight", "head.bias"]


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(ctx, v):
        ctx.save_for_backward(v)
        return (v > 0).to(v.dtype)

    @staticmethod
    def backward(ctx, g):
        (v,) = ctx.saved_tensors
        return g / (1 + v.abs()) ** 2


class _Normed(nn.Module):
    def forward(self, x):
        x = 1000 * x
        return x * ((x * x).sum(-1, keepdim=True) + 1e-5).rsqrt()


class _Product(nn.Module):
    def __init__(self, fused=False):
        super().__init__()
        self.fused = fused
        if fused:
            self.both = nn.Linear(8, 16, bias=False)
        else:
            self.a, self.b = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        a, b = self.both(x).chunk(2, -1) if self.fused else (self.a(x), self.b(x))
        return self.head(a * b)


class _Steps(nn.Module):
    def forward(self, v):
        return _Step.apply(v)


class TestRunsOfOneProgramInTwoFormats:
    """What a program does beside its calls is in the run, so that it explains what differs."""

    def test_statistics_that_a_norm_has_moved_are_read_as_they_are(self):
        """Batch normalisation writes to them, and says so neither in its schema nor by a version."""

        def run(low):
            torch.manual_seed(0)
            models = [nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6)) for _ in range(2)]
            x = torch.randn(32, 8)
            with nc.capture() as run, torch.no_grad():
                for model in models:
                    with nc.autocast("cpu", torch.bfloat16, enabled=low):
                        model(x)
                mean = sum(model.state_dict()["1.running_mean"] * 0.5 for model in models)
            return run, mean

        (plain, mean), (low, _) = run(False), run(True)
        last = plain.calls[-1]
        assert plain.tensors[last.outputs[0][1]].rms == pytest.approx(float(mean.square().mean().sqrt()), rel=1e-6)
        assert all(plain.tensors[number].rms > 0 for _, number in last.inputs)
        assert nc.diff(low, plain).verdict == "formats differ", nc.diff(low, plain)

    def test_tokens_that_are_drawn_by_other_probabilities_may_be_others(self):
        """Drawn, squeezed, filled up and put behind the prompt, as by a model's `generate`."""

        def run(low):
            torch.manual_seed(0)
            embed, layer, head = nn.Embedding(200, 32), nn.Linear(32, 64), nn.Linear(64, 200)
            ids = torch.randint(0, 200, (128, 3))
            with nc.capture() as run, torch.no_grad():
                for _ in range(6):
                    with nc.autocast("cpu", torch.bfloat16, enabled=low):
                        logits = head(layer(embed(ids[:, -1])).relu())
                    drawn = torch.multinomial((20 * logits.float()).softmax(-1), 1).squeeze(1)
                    ids = torch.cat([ids, (drawn * (ids[:, 0] >= 0))[:, None]], 1)
            return run, ids

        (plain, ids), (low, others) = run(False), run(True)
        assert not ids.equal(others), "the tokens are the same ones, and nothing is shown"
        assert nc.diff(low, plain).verdict == "formats differ", nc.diff(low, plain)
