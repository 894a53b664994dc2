"""`nc.repair`: what native autocast breaks is fixed by few rules, in few runs, and nothing is left behind."""

import json
import math

import pytest
import torch
from torch import nn

import narrowcast as nc
from narrowcast.errors import RunError
from narrowcast.reports.results.saved import load

LINEAR = "aten.linear.default"


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def x():
    return torch.randn(2, 4, 16)


class Layer(nn.Module):
    """One linear layer, and what a test makes of its result."""

    def __init__(self, then, width=16):
        super().__init__()
        self.first, self.then = nn.Linear(16, width), then

    def forward(self, x):
        return self.then(self.first(x))


def rules_of(found):
    """Rules of the repaired policy, as text. The model ran twice for each, and five times beside, at most."""
    assert found.runs <= 2 * len(found.rules) + 5 and found.runs == len(found.steps)
    return [str(rule.rule) for rule in found.rules]


def outputs(model, x, policy, dtype):
    with nc.autocast("cpu", dtype, policy=policy):
        return model(x)


class TestRaises:
    """What native autocast raises."""

    def test_a_number_that_fp16_does_not_hold(self, x):
        """Filling with -1e9 raises in fp16: one rule computes `masked_fill` in fp32, and the linear layer stays low."""
        mask = torch.ones(4, 16, dtype=torch.bool).triu(1)
        found = nc.repair(Layer(lambda y: y.masked_fill(mask, -1e9).softmax(-1)), (x,), under="fp16")
        assert rules_of(found) == ["aten.masked_fill.Scalar: full"] and found.verdict == "repaired"
        assert "without overflow" in found.before.found and "without overflow" in found.rules[0].rule.reason
        assert found.matmuls_after.low == 1 and "raises" in found.rules[0].needed

    def test_an_op_without_a_kernel_for_the_format(self, x):
        """`torch.complex` takes no bf16, and one rule that computes it in fp32 repairs the run."""
        found = nc.repair(Layer(lambda y: torch.complex(y, y).abs()), (x,), under="bf16")
        assert rules_of(found) == ["aten.complex.default: inside"] and found.is_clean

    def test_several_formats_in_one_call(self, x):
        """Writing bf16 values into an fp32 tensor raises, so the rule aligns the formats of `index_put_`."""

        def put(y):
            into = torch.zeros(8, 16)
            into[torch.arange(4)] = y[0]
            return into

        model = Layer(put)
        found = nc.repair(model, (x,), under="bf16")
        assert rules_of(found) == ["aten.index_put_.default: align"]
        assert outputs(model, x, found.policy, torch.bfloat16).shape == (8, 16)

    def test_numpy_without_bf16_is_mended_where_a_module_returns(self, x):
        """Also where more was computed of that outside of modules: a rule about that op would hold everywhere."""
        for then in (lambda y: y.detach().numpy(), lambda y: y.add(1).mul(2).detach().numpy()):
            found = nc.repair(Layer(then), (x,), under="bf16")
            assert rules_of(found) == ["module.call argument result in first: to(fp32)"] and found.runs == 4
            assert found.verdict == "repaired" and found.matmuls_after.low == 1 and math.isnan(found.after.error)

    def test_numpy_of_what_no_module_returned_is_mended_at_the_op(self, x):
        """A product in a plain function stays in bf16, and a rule casts its result to fp32."""
        weight = torch.ones(16, 16)
        found = nc.repair(lambda x: (x @ weight).numpy(), (x,), under="bf16")
        assert rules_of(found) == ["aten.matmul.default argument result: to(fp32)"] and found.matmuls_after.low == 1

    def test_a_metric_that_takes_no_bf16(self, x):
        """A metric that calls `.numpy()` gets the model's output in fp32, and the rule's reason says so."""
        found = nc.repair(nn.Linear(16, 4), (x,), under="bf16", metric=lambda y: float(y.detach().numpy().mean()))
        assert rules_of(found) == ["module.call argument result in the root module: to(fp32)"]
        assert "the metric" in found.rules[0].rule.reason

    def test_what_no_op_shows_keeps_its_module_in_fp32(self, x):
        """A check of `dtype` in Python is no op, so everything in the module that makes it runs in fp32."""

        class Strict(nn.Module):
            def forward(self, y):
                if y.dtype is not torch.float32:
                    raise TypeError("fp32 only")
                return y * 2

        found = nc.repair(Layer(Strict()), (x,), under="bf16")
        assert rules_of(found) == ["module.call in then: full"] and found.is_clean

    def test_the_same_in_fp32_is_no_fault_of_the_policy(self, x):
        """Shapes that do not match raise without a policy as well; so do inputs that are not the model's."""
        with pytest.raises(RuntimeError, match="Expected size") as caught:
            nc.repair(Layer(lambda y: y @ y), (x,), under="bf16")
        assert caught.value.__notes__ == ["Raised in fp32, too: no policy is to blame."]
        with pytest.raises(TypeError) as caught:
            nc.repair(torch.nn.Linear(16, 16), (x, x), under="bf16")
        assert "((a, b),) one argument that is a tuple" in caught.value.__notes__[0]

    def test_a_metric_and_an_evaluation_are_told_apart(self, x):
        """One is called with the output, the other with the model; a wrong one is refused as such."""
        model, wrong = torch.nn.Linear(16, 16), "metric(output) is called with what the model returned"
        for asked in (
            lambda: nc.repair(model, x, metric=lambda model: model(x).sum(), under="bf16"),
            lambda: nc.repair(nc.Case(model, x, evaluate=lambda out: out.sum()), under="bf16"),
        ):
            with pytest.raises(nc.errors.RunError, match="in fp32 it raised") as caught:
                asked()
            assert wrong in str(caught.value)
        with pytest.raises(nc.errors.RunError, match="it returned str"):
            nc.repair(model, x, metric=lambda out: "good", under="bf16")

    def test_what_no_rule_reaches_is_said(self, x):
        """A check outside of modules and ops is beyond any rule, so its error is reported instead."""

        def strict(y):
            if y.dtype is not torch.float32:
                raise TypeError("fp32 only")
            return y

        found = nc.repair(lambda x: strict(torch.nn.functional.linear(x, torch.ones(16, 16))), (x,), under="bf16")
        assert found.verdict == "out of ideas" and "fp32 only" in str(found) and rules_of(found) == []

    def test_what_the_policy_refuses_stays_refused(self, x):
        """A rule that refuses GELU is the user's decision, which the repair does not override."""
        policy = nc.Policy.native().with_rules(nc.Rule("aten.gelu", "refuse", reason="not here"))
        found = nc.repair(Layer(nn.GELU()), (x,), under=policy)
        assert found.verdict == "out of ideas" and rules_of(found) == [] and found.policy == policy


class TestNotFinite:
    """What overflows, or makes NaN of what underflowed."""

    def test_one_of_two_products_of_a_module_is_named_by_its_number(self, x):
        """Only the second product overflows, so the first stays in fp16, and the outputs become finite."""

        def attention(y):
            scores = torch.matmul(y, y.transpose(-1, -2)) * 1e-4
            return torch.matmul(scores.softmax(-1) + 3e4, y.abs() + 1)

        found = nc.repair(Layer(attention), (x,), under="fp16")
        assert found.verdict == "repaired" and rules_of(found) == ["aten.matmul.default call 2: full"]
        assert torch.isfinite(outputs(Layer(attention), x, found.policy, torch.float16)).all()

    def test_a_layer_whose_weights_are_too_large_and_those_that_read_what_it_gives(self, x):
        """The second overflow does not show in the first run: it is foretold by the ranges in fp32."""
        model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(),
                              nn.Linear(16, 16))  # fmt: skip
        with torch.no_grad():
            model[1].weight.mul_(1e6)
        found = nc.repair(model, (x,), under="fp16")
        assert sorted(rules_of(found)) == [f"{LINEAR} in 1: full", f"{LINEAR} in 3: full"]
        assert found.steps[2].added and len(found.steps) <= 5 and found.matmuls_after.low == 2
        assert outputs(model, x, found.policy, torch.float16).isfinite().all()
        assert "the maximum of fp16 is 65504" in " ".join(rule.rule.reason for rule in found.rules)

    def test_nan_of_what_underflowed_is_mended_where_it_was_made(self, x):
        """The division makes NaN of 0 / 0, but the linear layer's result underflowed, so the rule raises that layer."""
        model = Layer(lambda y: y / y.abs().sum(-1, keepdim=True))
        with torch.no_grad():
            model.first.weight.mul_(1e-9), model.first.bias.mul_(1e-9)
        assert rules_of(nc.repair(model, (x,), under="fp16")) == [f"{LINEAR} in first: full"]

    def test_a_gradient(self, x):
        """A loss scaled by 1e6 overflows in the fp16 backward; the layer is raised to fp32, and no `.grad` remains."""
        model = nn.Linear(16, 16)
        found = nc.repair(model, (x,), under="fp16", backward=lambda y: (y.float() * 1e6).sum())
        assert "backward" in found.before.found
        assert rules_of(found) == [f"{LINEAR}: full"] and model.weight.grad is None

    def test_fp32_that_is_not_finite_itself_is_said(self, x):
        """The logarithm of a negative number is NaN in every format, so there is nothing to repair."""
        found = nc.repair(Layer(lambda y: (y - 1e9).log()), (x,), under="bf16")
        assert found.verdict == "not the policy's fault" and "fp32 itself is not finite: nan made by" in str(found)

    def test_fp32_s_own_are_left_and_the_policy_s_are_mended(self, x):
        """The layer that overflows in fp16 is raised, while a NaN that fp32 makes as well is only noted."""
        model = nn.Sequential(nn.Linear(16, 16), nn.ReLU())
        with torch.no_grad():
            model[0].weight.mul_(1e6)
        found = nc.repair(lambda x: (model(x), (x - 1e9).log()), (x,), under="fp16")
        assert rules_of(found) == [f"{LINEAR} in 0: full"] and found.verdict == "repaired"
        assert any("fp32 itself is not finite" in note for note in found.notes)


class TestErrors:
    """Errors of outputs above a budget, and metrics that fall."""

    @pytest.mark.parametrize("budget", [1e-3, "60 dB"])
    def test_the_layers_that_matter_most_are_kept_high(self, x, budget):
        """Layers are raised by their share of the squared error until the budget is met, so some stay in bf16."""
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))
        found = nc.repair(model, (x,), under="bf16", budget=budget)
        assert found.before.error > 1e-3 >= found.after.error
        assert 0 < found.matmuls_after.low < 6 == found.matmuls_after.all
        assert sum(rule.share for rule in found.rules) == pytest.approx(1.0)
        shares = [rule.share for rule in found.rules]
        assert shares == sorted(shares, reverse=True) and all("squared error" in r.rule.reason for r in found.rules)
        assert rules_of(found)
        with torch.no_grad():
            expected = model(x)
            error = (outputs(model, x, found.policy, torch.bfloat16).float() - expected).norm() / expected.norm()
        assert float(error) == pytest.approx(found.after.error)

    def test_one_bad_layer_is_one_rule(self, x):
        """A layer of large, cancelling weights: the others are left low."""
        model = nn.Sequential(nn.Identity(), nn.Linear(16, 16), nn.Linear(16, 16))
        with torch.no_grad():
            signs = torch.cat([torch.ones(16, 8), -torch.ones(16, 8)], 1)
            model[1].weight.copy_(signs * 100 + torch.randn(16, 16))
        x = torch.ones(4, 16) + torch.randn(4, 16) * 1e-3
        found = nc.repair(model, (x,), under="bf16", budget=0.02)
        assert rules_of(found) == [f"{LINEAR} in 1: full"] and found.rules[0].share == 1.0

    def test_what_is_all_needed_is_one_rule(self, x):
        """A budget of zero needs all four layers in fp32, which a single rule without a module expresses."""
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
        found = nc.repair(model, (x,), under="bf16", budget=0)
        assert rules_of(found) == [f"{LINEAR}: full"] and found.after.error == 0 and found.rules[0].calls == 4

    def test_frozen_weights_and_no_grad_are_attributed_too(self, x):
        """Gradients are computed for the repair even under `no_grad`, and frozen parameters remain frozen."""
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))).requires_grad_(False)
        with torch.no_grad():
            found = nc.repair(model, (x,), under="bf16", budget=1e-3)
        assert found.is_clean and rules_of(found) and not any(p.requires_grad for p in model.parameters())
        assert not any("gradients" in note for note in found.notes)

    def test_without_gradients_own_errors_rank(self, x):
        """With a forward under `no_grad` each call's own error decides instead, and a note says so."""
        layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))

        class Detached(nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = layers

            @torch.no_grad()
            def forward(self, x):
                return self.layers(x)

        found = nc.repair(Detached(), (x,), under="bf16", budget=1.5e-3)
        assert found.is_clean and rules_of(found) and any("gradients" in note for note in found.notes)

    @torch.no_grad()
    def test_code_that_takes_no_gradients_is_run_without(self, x):
        """`.numpy()` raises on what requires grad."""
        model = Layer(lambda y: torch.from_numpy(y.float().numpy() * 2))
        found = nc.repair(model, (x,), under="bf16", budget=1e-4)
        assert rules_of(found) == [f"{LINEAR} in first: full"] and found.is_clean
        assert any("requires grad" in step.found for step in found.steps) and "gradients" in found.notes[0]

    def test_what_gradients_do_not_show_is_kept_high_at_last(self, x):
        """The fused layer is another path than the one that records gradients."""
        model = Layer(nn.TransformerEncoderLayer(16, 2, batch_first=True)).eval()
        with torch.no_grad():
            found = nc.repair(model, (x,), under="bf16", budget=1e-3)
        assert "aten._transformer_encoder_layer_fwd.default in then: full" in rules_of(found) and found.is_clean

    def test_a_metric_of_the_output(self, x):
        """Calls are raised to fp32 until the caller's metric is within the tolerance of its fp32 value."""
        model, best = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)), None
        with torch.no_grad():
            best = model(x)
        off = lambda y: {"off": float((y - best).abs().max())}
        found = nc.repair(model, (x,), under="bf16", better="lower", tolerance=1e-3, metric=off)
        assert found.before.metric["off"] > 1e-3 >= found.after.metric["off"] and found.reference == {"off": 0.0}
        assert rules_of(found) and "metric at most 0.001 above fp32's" in str(found)

    def test_a_subject_s_own_metric_runs_the_model_and_is_counted(self, x):
        """A `Case` with its own evaluation is evaluated three times, and those runs count towards the total."""
        model, calls = nn.Linear(16, 1), []
        with torch.no_grad():
            best = model(x)

        def off(model):
            calls.append(1)
            with torch.no_grad():
                return float((model(x) - best).abs().max())

        found = nc.repair(nc.Case(model, (x,), evaluate=off), under="bf16", better="lower", tolerance=1e-4)
        assert found.is_clean and rules_of(found) == [f"{LINEAR}: full"] and len(calls) == 3
        assert found.runs == 4  # one more to see who is to blame

    def test_nothing_is_added_to_what_is_right(self, x):
        """A sound model costs one run and keeps the native policy."""
        found = nc.repair(nn.Linear(16, 16), (x,), under="bf16")
        assert (found.verdict, found.runs, rules_of(found)) == ("nothing to repair", 1, [])
        assert found.policy == nc.Policy.native() and "VERDICT: Nothing to repair: " in str(found)


class TestLeftBehind:
    """Nothing."""

    def test_model_gradients_and_random_numbers_are_as_they_were(self, x):
        """Batch statistics, weights, `.grad` and the generator's state survive a repair that ran the model."""
        model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(16, 16))
        with torch.no_grad():
            model[0].weight.mul_(1e5)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        state = torch.get_rng_state()
        found = nc.repair(model, (x,), under="fp16", backward=True, budget=0.01)
        assert found.is_clean and torch.equal(torch.get_rng_state(), state)
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
        assert all(p.grad is None and p.requires_grad for p in model.parameters())

    def test_random_numbers_are_as_they_were_where_the_model_raises(self, x):
        """The call that raised is tried alone, and draws random numbers itself."""

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.generator = nn.Linear(16, 16), torch.Generator().manual_seed(1)

            def forward(self, x):
                drawn = torch.bernoulli(torch.full((16,), 0.5), generator=self.generator)
                return nn.functional.rrelu(self.a(x) + drawn.to(torch.float16), training=True)

        model, state = Model(), torch.get_rng_state()
        own = model.generator.get_state()
        assert nc.repair(model, (x,), under="fp16").verdict == "repaired"
        assert torch.equal(torch.get_rng_state(), state) and torch.equal(model.generator.get_state(), own)

    def test_the_user_s_policy_is_extended_and_never_changed(self, x, tmp_path):
        """New rules form a second layer on top of the user's, whose comments are kept and whose file is not written."""
        file = tmp_path / "mine.toml"
        file.write_text('name = "mine"\n# kept\n[[rule]]\nop = "aten.gelu"\naction = "full"\n')
        found = nc.repair(
            Layer(lambda y: y.masked_fill(y > 9, -1e9)),
            (x,),
            under=nc.autocast("cpu", "fp16", policy=nc.Policy.load(file)),
        )
        assert rules_of(found) and "# kept" in found.policy.to_toml() and "masked_fill" not in file.read_text()
        assert found.policy.layers[0] == nc.Policy.load(file).layers[0] and len(found.policy.layers) == 2

    def test_a_saved_one_is_shown_again(self, x, tmp_path):
        """The loaded repair prints the same text and has the same policy; a record without a field is refused."""
        found = nc.repair(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), (x,), under="bf16", budget=1e-3)
        found.save(tmp_path / "repair.json")
        again = load(tmp_path / "repair.json")
        assert str(again) == str(found) and again.policy == found.policy
        data = json.loads((tmp_path / "repair.json").read_text())
        data["rules"][0].pop("action")
        (tmp_path / "broken.json").write_text(json.dumps(data))
        with pytest.raises(RunError, match="a record lacks"):
            load(tmp_path / "broken.json")


class TestTimes:
    """What rules cost, where a profile says so; nothing is measured."""

    def test_without_a_profile_that_is_said(self, x, tmp_path, monkeypatch):
        """The cost is NaN, a note gives the reason, and nothing is written to the cache."""
        monkeypatch.setenv("NARROWCAST_CACHE_DIR", str(tmp_path))
        found = nc.repair(nn.Linear(16, 16), (x,), under="bf16", budget=0)
        assert math.isnan(found.rules[0].cost_ns) and any("No profile" in note for note in found.notes)
        assert not list(tmp_path.iterdir())

    def test_a_profile_prices_them(self, x, tmp_path, monkeypatch):
        """A layer that takes 5 us in fp32 and 2 us in bf16 makes its rule cost 3 us per run."""
        from narrowcast.reports.results.profile import Profile, Sample
        from narrowcast.runtime.devices.device import device_now

        monkeypatch.setenv("NARROWCAST_CACHE_DIR", str(tmp_path))
        profile = Profile(device_now("cpu"))
        for format, ns in (("fp32", 5000.0), ("bf16", 2000.0)):
            shapes = f"{format}[2, 4, 16], {format}[16, 16], {format}[16]"
            profile.samples[f"{LINEAR}({shapes})"] = Sample("gemm", format, False, 4096, 1000, 256, ns, ns, ns, 9)
        profile.write()
        found = nc.repair(nn.Linear(16, 16), (x,), under="bf16", budget=0)
        assert found.rules[0].cost_ns == 3000.0 and "the rules cost a run 3 us by the profile" in " ".join(
            str(found).split()
        )


class TestRefused:
    """What cannot be repaired, or asked."""

    @pytest.mark.parametrize(
        ("options", "says"),
        [
            ({"budget": -1}, "not an error that an output can have"),
            ({"budget": "loud"}, "not an error that an output can have"),
            ({"better": "more"}, "not a choice"),
            ({"tolerance": 1.0}, "no metric that it could apply to"),
            ({"tolerance": -1.0, "metric": lambda y: 1.0}, "it is negative"),
            ({"metric": lambda y: 0.0}, "1 % of that allows nothing"),
            ({"backward": lambda y: y.detach()}, "no output of the model has a gradient"),
            ({"under": nc.autocast("cuda", "bf16")}, "the model is on cpu"),
        ],
    )
    def test_with_what_to_do(self, x, options, says):
        """Invalid or contradictory options raise a RunError that carries advice."""
        with pytest.raises(RunError, match=says) as raised:
            nc.repair(nn.Linear(16, 4), (x,), **{"under": "bf16", **options})
        assert raised.value.advice

    def test_a_budget_of_what_gives_no_tensor(self, x):
        """An error budget has no meaning for a model that returns an integer."""
        with pytest.raises(RunError, match="no floating-point tensor"):
            nc.repair(Layer(lambda y: 1), (x,), under="bf16", budget=0.1)

    def test_compiled_code_and_scripts(self, x):
        """Their casts were fixed when they were made, so a rule could not change them."""
        compiled = nc.compile(nn.Linear(16, 4), under="bf16", backend="eager")
        for model in (compiled, torch.jit.trace(nn.Linear(16, 4), x)):
            with pytest.raises(RunError, match="its casts are in it"):
                nc.repair(model, (x,), under="bf16")


class TestCompiledParts:
    """Parts that torch.compile compiled: rules about what they call name no module, since their code says none."""

    @pytest.mark.parametrize("whole", [False, True])
    def test_its_policy_runs_them(self, whole):
        """An op that raises, and others that are off, inside and beside a compiled part."""
        torch._dynamo.reset()

        class Inner(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear, self.weight = nn.Linear(8, 8), nn.Parameter(torch.randn(8, 8))

            def forward(self, x):
                return torch.tensordot(self.linear(x), self.weight, dims=([1], [0]))

        torch.manual_seed(0)
        x = torch.randn(4, 8)
        inner = torch.compile(Inner(), backend="eager")
        model = inner if whole else nn.Sequential(inner, nn.Linear(8, 8), nn.Softmax(-1))
        with torch.no_grad():
            found = nc.repair(model, (x,), budget=1e-4)
            with nc.autocast("cpu", policy=found.policy):
                mended = model(x)
            torch.testing.assert_close(mended, model(x), rtol=1e-4, atol=1e-4)  # the budget
        assert found.verdict == "repaired" and not [r for r in found.rules if "tensordot" in str(r) and r.rule.module]


class TestWhatIsLeft:
    """A repaired policy keeps what was asked for, and what else is wrong is mentioned."""

    def test_gradients_that_underflow_and_an_output_that_is_far_off(self, x):
        """A scale of 1e-9 loses all in fp16: the overflow is repaired, and the notes name the rest."""
        found = nc.repair(
            Layer(lambda y: y * 1e-9 + (y * 300 @ (y * 300).mT).mean() * 0), (x,), under="fp16", backward=True
        )
        far, lost = found.notes[:2]
        assert found.verdict == "repaired" and "nothing is wrong" not in str(found)
        assert far.startswith("It is finite, but the output is 1.0e+00 from fp32's: budget=")
        assert lost.startswith("The gradients of 2 parameters of 2 are zero (first first.weight), and not in fp32")

    def test_nothing_where_nothing_is(self, x):
        """Neither note where outputs and gradients are near fp32's."""
        found = nc.repair(Layer(lambda y: y * 300 @ (y * 300).mT), (x,), under="fp16", backward=True)
        assert found.verdict == "repaired" and not any("from fp32's" in n or "gradients" in n for n in found.notes)


class Normed(nn.Module):
    """A root mean square of large values, written out, which overflows in fp16."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x):
        h = self.first(x) * 300
        return self.last(h / h.pow(2).mean(-1, keepdim=True).sqrt())


class TestLowModels:
    """Models whose own weights are in a low format: the reference is a copy in fp32."""

    def test_what_fp16_makes_is_not_taken_for_fp32_s(self, x):
        """An overflow of a `.half()` model is repaired by one rule, and near fp32."""
        model = Normed().half()
        before = {name: p.clone() for name, p in model.named_parameters()}
        found = nc.repair(model, (x.half(),), under="fp16", backward=True)
        assert rules_of(found) == ["aten.pow.Tensor_Scalar: full"] and found.verdict == "repaired"
        assert 0 < found.after.error < 0.01 and math.isfinite(found.before.error)
        assert all(torch.equal(p, before[name]) and p.grad is None for name, p in model.named_parameters())

    def test_a_budget_is_against_fp32(self, x):
        """Its output is not exact because it is low already."""
        model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)).bfloat16()
        found = nc.repair(model, (x.bfloat16(),), under="bf16", budget=1e-3)
        assert found.verdict == "repaired" and found.before.error > 1e-3 > found.after.error

    def test_a_metric_of_a_case_is_asked_of_a_copy_in_fp32(self, x):
        """`evaluate` is given the copy; the model stays in bf16."""
        model, asked = nn.Linear(16, 4).bfloat16(), []

        def evaluate(model):
            asked.append(model.weight.dtype)
            return {"size": float(model(x.to(model.weight.dtype)).float().norm())}

        found = nc.repair(nc.Case(model, (x.bfloat16(),), evaluate=evaluate), under="bf16", tolerance=1.0)
        assert set(asked) == {torch.float32, torch.bfloat16} and found.verdict == "nothing to repair"

    def test_code_that_names_the_format_runs_as_it_is(self, x):
        """Its copy in fp32 does not run: the reference is then in the model's own format."""
        layer = nn.Linear(16, 4).half()
        found = nc.repair(Layer(lambda y: layer(y.to(torch.float16))).half(), (x.half(),), under="fp16", budget=0.1)
        assert found.verdict == "nothing to repair"


def test_products_are_those_of_the_model_whatever_an_evaluation_runs():
    """It runs the model again, several times."""
    model, x = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)), torch.randn(8, 16)
    case = nc.Case(model, (x,), evaluate=lambda m: {"score": float(m(x).mean() + m(-x).mean())})
    found = nc.repair(case, under="bf16", budget=1e-6)
    assert found.matmuls_before.all == found.matmuls_after.all == 2


class Kernel(nn.Module):
    """A kernel matrix that is positive definite, but not once its product is rounded."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        z = torch.tanh(self.layer(x)).float()
        kernel = z @ z.t() * 4 + 2e-3 * torch.eye(len(x))
        return torch.linalg.cholesky(kernel.float())


def test_what_raises_for_its_values_runs_with_a_rule_about_what_they_come_of():
    """In the outermost module, about the product alone; an explanation that runs says what raised."""
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    found = nc.repair(Kernel(), (x,), under="bf16")
    assert found.verdict == "repaired" and [row.rule.op for row in found.rules] == ["aten.matmul.default"]
    explained = nc.explain(Kernel(), (x,), under="bf16", run=True)
    assert "LinAlgError" in explained.failure.error and explained.comparison is None
    assert "nc.repair" in str(explained)


class Flow(nn.Module):
    """Takes a gradient inside of its forward, in the region."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(self.net(x).sum(), x)[0]


def test_products_of_a_gradient_inside_of_the_forward_are_counted_and_kept():
    """The region decides them: rules about their ops hold, in no module."""
    found = nc.repair(Flow(), (torch.randn(8, 4),), under="bf16", budget=1e-6)
    assert found.verdict == "repaired" and found.matmuls_after.low == 0
    assert found.matmuls_before.low == found.matmuls_before.all == 4
    assert "aten.mm.default" in {row.rule.op for row in found.rules}


@pytest.mark.parametrize("inner", ["native", "policy"])
def test_the_region_s_inner_setting_holds_where_rules_are_tried(inner):
    """A block of torch's in a library: a rule reaches it where the region says so, and is not promised elsewhere."""

    class Guarded(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 12), nn.Linear(12, 3)
            self.b.weight.data.mul_(4e5)

        def forward(self, x):
            h = torch.tanh(self.a(x))
            with torch.autocast("cpu", torch.float16, enabled=torch.is_autocast_enabled("cpu")):
                return self.b(h)

    torch.manual_seed(0)
    model, x = Guarded(), torch.randn(5, 6)
    region = nc.autocast("cpu", torch.float16, inner=inner)
    repaired, compared = nc.repair(model, x, under=region), nc.compare(model, x, under=region)
    with region, nc.watch() as watched:
        model(x)
    assert (repaired.verdict == "repaired") is (inner == "policy"), str(repaired)
    assert (compared.remedy is not None) is (inner == "policy"), str(compared)
    assert ('inner="policy"' in watched.first.advice) is (inner == "native"), str(watched)
    if inner == "policy":
        with nc.autocast("cpu", torch.float16, policy=repaired.policy):
            assert bool(model(x).isfinite().all())


@torch.jit.script
def gate(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(torch.nn.functional.linear(x, weight))


def test_what_a_script_inside_makes_low_counts():
    """TorchScript's own autocast asks no Python: the reference runs it in fp32, and the promise holds."""

    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(9, 16)
            self.weight = nn.Parameter(torch.randn(32, 16) / 4)

        def forward(self, x):
            return gate(self.first(x), self.weight)

    torch.manual_seed(0)
    model, x = Gated(), torch.randn(6, 9)
    reference = model(x).double()
    found = nc.repair(model, x, under="fp16", budget=1e-4)
    with nc.autocast("cpu", torch.float16, policy=found.policy):
        error = float((model(x).double() - reference).norm() / reference.norm())
    assert error == pytest.approx(found.after.error, rel=0.1) and (error <= 1e-4) is (found.verdict == "repaired")


def test_products_of_a_jacobian_under_vmap_are_counted_and_repaired():
    """Torch computes them from matmul, in no module, on tensors that lie in no memory of their own."""

    class Contractive(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(6, 24), nn.Softplus(), nn.Linear(24, 3))
            self.out = nn.Linear(18, 4)

        def forward(self, x):
            jacobians = torch.func.vmap(torch.func.jacrev(lambda row: self.net(row)))(x)
            return self.out(jacobians.flatten(1))

    torch.manual_seed(0)
    model, x = Contractive(), torch.randn(4, 6)
    found = nc.repair(model, x, under="bf16", budget=3e-4)
    assert found.verdict == "repaired" and found.after.error <= 3e-4, str(found)
    expected = model(x)
    with nc.autocast("cpu", torch.bfloat16, policy=found.policy):
        assert float((model(x) - expected).norm() / expected.norm()) <= 3e-4


def test_a_metric_that_is_nan_in_fp32_is_refused():
    """Nothing is worse, so that nothing was to be repaired."""
    with pytest.raises(nc.errors.RunError, match="it is NaN in fp32"):
        nc.repair(torch.nn.Linear(8, 4), (torch.randn(4, 8),), under="bf16", metric=lambda y: float("nan"))
