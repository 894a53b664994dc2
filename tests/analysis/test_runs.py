"""Runs captured, watched, compared and replayed: what is found, what is left behind, what is refused."""

import copy
import itertools
import json
import pickle
import subprocess
import sys
import warnings
from collections import Counter
from dataclasses import fields

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import narrowcast as nc
from narrowcast.errors import NotFiniteError, RunError
from narrowcast.observation.observer import mode
from narrowcast.observation.statistics import statistics

warnings.filterwarnings("ignore", message=".*LeafSpec.*")


class Attention(nn.Module):
    """Two products in one module, a layer called twice."""

    def __init__(self, width=16):
        super().__init__()
        self.q, self.o, self.norm = nn.Linear(width, width), nn.Linear(width, width), nn.LayerNorm(width)
        self.twice = nn.Linear(width, width)

    def forward(self, x):
        q = self.q(x)
        weights = torch.matmul(q, q.transpose(-1, -2)).softmax(-1)
        y = self.norm(self.o(torch.matmul(weights, q)) + x)
        return self.twice(nn.functional.gelu(self.twice(y)))


class Checkpointed(nn.Module):
    """Two layers that are recomputed; of the second nothing is needed."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        block = lambda x: self.second(self.first(x).tanh())
        return torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)


@pytest.fixture
def model():
    torch.manual_seed(0)
    yield Attention()
    torch._dynamo.reset()


@pytest.fixture
def x():
    return torch.randn(2, 5, 16)


def calls(run):
    """Identities, formats and lines of what is no cast and no accumulation of gradients."""
    accumulating = ("aten.add_.Tensor", "aten.add.Tensor")
    kept = [c for c in run.calls if not c.is_cast and not (c.id.direction == "backward" and c.id.op in accumulating)]
    return [(str(c.id), c.computes, c.line) for c in kept]


class TestIdentity:
    """One identity for a call, in every form."""

    def test_numbers_calls_of_an_op_in_a_module_and_calls_of_the_module(self, model, x):
        """Two products in a module are #1 and #2; a layer's second call starts again at #1, in module call 2."""
        names = [name for name, _, _ in calls(nc.capture(model, (x,), under="bf16"))]
        assert [n for n in names if "matmul" in n] == ["aten.matmul.default #1", "aten.matmul.default #2"]
        assert [n for n in names if n.startswith("twice")] == [
            "twice aten.linear.default #1", "twice aten.linear.default #1 module call 2"]  # fmt: skip

    def test_is_the_same_under_every_policy_and_in_fp32(self, model, x):
        """Only formats differ between fp32 and bf16, so the two runs can be matched call by call."""
        fp32, bf16 = nc.capture(model, (x,), backward=True), nc.capture(model, (x,), under="bf16", backward=True)
        assert [c[0] for c in calls(fp32)] == [c[0] for c in calls(bf16)]
        assert {c[1] for c in calls(fp32)} == {"fp32"} and "bf16" in {c[1] for c in calls(bf16)}

    @pytest.mark.parametrize("backend", ["aot_eager", "eager"])
    @pytest.mark.parametrize("when", ["before", "inside"])
    def test_is_the_same_in_compiled_code(self, model, x, backend, when):
        """Names, formats and lines equal eager's, whether the model is compiled before the capture or during it."""
        eager = nc.capture(model, (x,), under="bf16", backward=True)
        compiled = nc.compile(model, under="bf16", backend=backend)
        if when == "before":
            compiled(x)
        assert calls(nc.capture(compiled, (x,), backward=True)) == calls(eager)

    def test_is_the_same_where_there_is_an_accelerator_too(self, model, x, monkeypatch):
        """Whose lists name ops, `softmax.int` and `layer_norm`, that those of the model's own device do not."""
        alone = nc.capture(model, (x,), under="bf16")
        program = nc.export(model, (x,), under="bf16")
        monkeypatch.setattr(mode, "present_device_types", lambda: ["cpu", "cuda"])
        assert calls(nc.capture(model, (x,), under="bf16")) == calls(alone)
        assert calls(nc.capture(program, (x,))) == calls(alone)

    def test_is_the_same_in_exported_code_also_when_loaded(self, model, x, tmp_path):
        """Names, formats and lines equal those of eager code, in the backward as well as in the forward."""
        eager = nc.capture(model, (x,), under="bf16", backward=True)
        program = nc.export(model, (x,), under="bf16")
        assert calls(nc.capture(program, (x,), backward=True)) == calls(eager)
        torch.export.save(program, tmp_path / "program.pt2")
        loaded = torch.export.load(tmp_path / "program.pt2")
        assert calls(nc.capture(loaded, (x,), backward=True)) == calls(eager)

    def test_of_a_model_that_torch_compiled_is_eagers(self, model, x):
        """The region is around code from `torch.compile`, and names, formats and lines are the same."""
        eager = nc.capture(model, (x,), under="bf16")
        assert calls(nc.capture(torch.compile(model, backend="eager"), (x,), under="bf16")) == calls(eager)

    def test_a_backward_call_names_its_forward_call(self, model, x):
        """Matmuls in the backward refer to the linear layer that they differentiate, in the same module."""
        run = nc.capture(model, (x,), under="bf16", backward=True)
        backward = [c for c in run.calls if c.id.direction == "backward" and c.id.op == "aten.mm.default"]
        assert {c.forward.op for c in backward} == {"aten.linear.default"}
        assert all(c.id.module_path == c.forward.module_path for c in backward)

    def test_a_recomputation_has_a_direction_of_its_own(self, model, x):
        """What a checkpoint computes again during the backward is labeled neither forward nor backward."""
        x.requires_grad_()
        with nc.capture() as run:
            torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).sum().backward()
        directions = {c.id.direction for c in run.calls}
        assert directions == {"forward", "backward", "recomputation"}

    def test_a_recomputation_has_the_paths_of_its_forward(self, x):
        """Under the native policy, too, which asks for none."""
        model = Checkpointed()
        run = nc.capture(model, (x.requires_grad_(),), under="bf16", backward=True)
        paths = {d: {c.id.module_path for c in run.calls if c.id.direction == d and "linear" in c.id.op}
                 for d in ("forward", "recomputation")}  # fmt: skip
        assert paths["forward"] >= paths["recomputation"] == {"first"}

    def test_what_is_called_outside_of_modules_is_counted_with_the_outermosts_calls(self, model, x):
        """An addition in the loss is #2 after the model's own, so every identity is unique."""
        run = nc.capture(model, (x,), under="bf16", backward=lambda y: sum([y.float().mean()]))
        assert len({c.id for c in run.calls if not c.is_cast}) == sum(not c.is_cast for c in run.calls)
        assert str(next(c.id for c in run.calls[::-1] if c.id.op == "aten.add.Tensor"
                        and c.id.direction == "forward")) == "aten.add.Tensor #2"  # fmt: skip

    def test_compiled_code_is_compiled_after_it_was_observed(self, model, x):
        """A capture discards no compiled graph: later calls need at most one more."""
        graphs = []

        def backend(graph, inputs):
            graphs.append(graph)
            return graph.forward

        compiled = nc.compile(model, under="bf16", backend=backend)
        nc.capture(compiled, (x,))
        made = len(graphs)
        compiled(x)
        compiled(x)
        assert len(graphs) <= made + 1 and graphs


class TestCapture:
    """What a run holds."""

    def test_facts_are_those_of_the_tensors(self, x):
        """Range, mean, zeros, subnormals and exponents of five numbers match values worked out by hand."""
        scaled = torch.tensor([0.0, 1.0, -2.0, 1e-40, 3.0])
        run = nc.capture(lambda t: torch.relu(t) * 2, (scaled,), statistics="whole")
        given = run.facts(run.calls[0].inputs)["self"]
        assert (given.low, given.high, given.zeros, given.subnormal) == (
            -2.0,
            3.0,
            pytest.approx(0.2),
            pytest.approx(0.2),
        )
        assert given.mean == pytest.approx(0.4) and given.exponents.last == 1 and given.exponents.total == 4

    def test_non_finite_shares_and_the_range_of_the_rest(self):
        """NaN and infinities are given as shares, and the range is that of the finite values."""
        run = nc.capture(torch.neg, (torch.tensor([1.0, float("nan"), float("inf"), -4.0]),))
        gave = run.facts(run.calls[0].outputs)["result"]
        assert (gave.nan, gave.infinite, gave.low, gave.high) == (0.25, 0.25, -1.0, 4.0)

    def test_parts_of_one_tensor_have_facts_of_their_own(self):
        """Chunks, strided slices and transposes that share storage each have their own maximum."""
        both = torch.cat([torch.ones(4, 4), torch.full((4, 4), 7.0)])
        with nc.capture() as run:
            for part in (*both.chunk(2), both[::2], both[:4].t()):
                torch.exp(part)
        given = [run.facts(call.inputs)["self"] for call in run.calls]
        assert [facts.high for facts in given] == [1.0, 7.0, 7.0, 1.0]

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_exponents_are_those_of_frexp_also_of_subnormal_numbers(self, dtype):
        """The histogram counts subnormals at their true exponents, and an argument such as `eps` keeps every digit."""
        tiny = torch.finfo(dtype).smallest_normal
        values = torch.tensor(
            [[0.0, -1.0, 1.999, tiny, tiny / 2, -tiny / 3], [-0.0, 3e30, 0.1, 1e-7, 5.0, 8.0]], dtype=dtype
        )
        run = nc.capture(torch.neg, (values,), statistics="whole")
        given = run.facts(run.calls[0].inputs)["self"]
        wanted = Counter((torch.frexp(values[values != 0]).exponent - 1).tolist())
        found = {e: n for e, n in enumerate(given.exponents.counts, given.exponents.first) if n}
        assert found == wanted and given.zeros == pytest.approx(2 / 12) and given.subnormal == pytest.approx(2 / 12)

        norm = nn.LayerNorm(4, eps=1.2345678901234567e-7)
        run = nc.capture(norm, (torch.randn(2, 4),), under="bf16")
        assert dict(run.calls[0].given)["eps"] == repr(norm.eps)

    def test_a_block_captures_gradients_and_moments(self, model, x):
        """A training step in the block records each parameter's gradient and both of Adam's moments."""
        optimizer = torch.optim.Adam(model.parameters())
        with nc.capture() as run:
            model(x).sum().backward()
            optimizer.step()
        row = run.parameters["q.weight"]
        assert {"value", "gradient", "exp_avg", "exp_avg_sq"} <= set(row)
        assert run.tensors[row["gradient"]].shape == (16, 16)

    def test_leaves_gradients_buffers_and_random_state_alone(self, x):
        """Neither a capture nor a comparison with a backward changes `.grad`, batch statistics or the generator."""
        model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(5), nn.Dropout()).train()
        model[0].weight.grad = torch.ones_like(model[0].weight)
        before = {k: v.clone() for k, v in model.state_dict().items()}
        torch.manual_seed(3)
        state = torch.get_rng_state()
        nc.capture(model, (x,), backward=True)
        nc.compare(model, (x,), under="bf16", backward=True, isolate=1)
        assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
        assert torch.equal(torch.get_rng_state(), state) and bool((model[0].weight.grad == 1).all())
        assert model[0].bias.grad is None

    @pytest.mark.parametrize("how", ["mul_", "copy_", "data", "view", "exchanged", "function"])
    def test_weights_that_the_model_changes_are_put_back(self, x, how):
        """A weight halved in the forward, by whichever means, keeps its values and memory, and a note names it."""

        class Moving(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = nn.Linear(16, 4)

            def forward(self, x):
                weight = self.linear.weight
                with torch.no_grad():
                    if how == "exchanged":
                        weight.data = weight * 0.5
                    elif how == "copy_":
                        weight.copy_(weight * 0.5)
                    else:
                        {"data": weight.data, "view": weight.view(-1)[8:]}.get(how, weight).mul_(0.5)
                return self.linear(x)

        model = Moving()
        weight, before = model.linear.weight.data_ptr(), model.linear.weight.clone()
        function = lambda x: model(x)  # closes over the module
        called = function if how == "function" else model
        run, found = nc.capture(called, (x,)), nc.compare(called, (x,), under="bf16", isolate=0)
        assert torch.equal(model.linear.weight, before) and model.linear.weight.data_ptr() == weight
        assert "(linear.weight)" in run.notes[0] and "(linear.weight)" in " ".join(found.notes)
        assert not found.faults, found

    def test_weights_that_share_memory_are_put_back_each(self, x):
        """Parameters are slices of one tensor; the one that changed is restored and is the only one in the note."""
        flat = torch.randn(2 * 16)

        class Flat(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b = nn.Parameter(flat[:16]), nn.Parameter(flat[16:])

            def forward(self, x):
                with torch.no_grad():
                    self.a.mul_(0.5)
                return x * self.a * self.b

        before = flat.clone()
        run = nc.capture(Flat(), (x,))
        assert torch.equal(flat, before) and "(a)" in run.notes[0]

    def test_a_weight_written_with_what_it_has_is_not_said_to_change(self, x):
        """Multiplying a weight by one in place changes nothing, so there is no note."""
        layer = nn.Linear(16, 4)

        def same(x):
            layer.weight.data.mul_(1.0)
            return layer(x)

        assert nc.capture(same, (x,)).notes == []

    def test_tensors_are_written_within_their_limit(self, model, x, tmp_path):
        """Files stay within the byte limit, a note reports those left out, and every tensor has a checksum."""
        run = nc.capture(model, (x,), tensors=tmp_path / "t", tensor_limit_bytes=2000, checksums=True)
        files = list((tmp_path / "t").iterdir())
        assert files and sum(f.stat().st_size for f in files) < 2000 + 128 * len(files)
        assert "were not written" in run.notes[0] and all(t.checksum for t in run.tensors)

    @pytest.mark.parametrize(
        ("call", "found"),
        [
            (lambda x: nc.capture(nn.ReLU(), 3.0), "a tuple of arguments"),
            (lambda x: nc.capture(3, (x,)), "cannot be called"),
            (lambda x: nc.capture(nn.ReLU(), (x,), statistics="all"), "no such statistics"),
            (lambda x: nc.capture(under="bf16"), "without a model"),
            (lambda x: nc.capture(nn.ReLU(), (x,), tensors="/nowhere/t"), "/nowhere/t"),
            (lambda x: nc.capture(torch.relu, (x,), backward=True), "has a gradient"),
            (lambda x: nc.compare(nn.ReLU(), (x,), reference="fp8"), "no such reference"),
            (lambda x: nc.compare(nn.ReLU(), (x,), by="layer"), "not a choice"),
            (lambda x: nc.compare(lambda t: "text", (x,)), "no floating-point tensor"),
            (lambda x: nc.watch(at="end"), "not a choice"),
            (lambda x: nc.watch(every=0), "from 1"),
        ],
    )
    def test_what_cannot_be_is_said(self, x, call, found):
        """Models, arguments, options and paths that cannot be used raise a RunError that says why."""
        with pytest.raises(RunError, match=found):
            call(x)

    def test_a_run_that_raises_is_kept_as_far_as_it_went(self, model, x):
        """The exception propagates, calls made before it are kept, and a note gives its type."""
        with pytest.raises(ZeroDivisionError), nc.capture() as run:
            model(x)
            1 / 0
        assert run.calls and run.tensors and "ZeroDivisionError" in run.notes[0]

    @pytest.mark.parametrize("copy", [copy.deepcopy, lambda run: pickle.loads(pickle.dumps(run))])
    def test_tensors_are_put_together_when_they_are_first_read(self, model, x, copy, monkeypatch):
        """Samples are taken during the call; statistics are computed from them once, by a copy or a pickle as well."""
        called, facts_of = [], statistics.facts_of
        monkeypatch.setattr(statistics, "facts_of", lambda taken: called.append(taken) or facts_of(taken))
        with nc.capture() as run:
            assert not run.tensors
            y = model(x)
        with torch.no_grad():
            y.zero_()
        assert not called
        assert copy(run).to_json() == run.to_json() and len(called) == 1
        plain = nc.Run(**{each.name: getattr(run, each.name) for each in fields(nc.Run)})
        assert copy(run) == run == plain == run and "calls" in str(run)
        assert run.tensors[run.calls[-1].outputs[0][1]].largest > 0

    def test_samples_that_wait_take_no_more_than_their_room(self, model, x, monkeypatch):
        """Beyond the memory limit they are reduced to statistics early, with the same results."""
        whole, called, facts_of = nc.capture(model, (x,)).tensors, [], statistics.facts_of
        monkeypatch.setattr(statistics, "_HELD_BYTES", 1000)
        monkeypatch.setattr(statistics, "facts_of", lambda taken: called.append(taken) or facts_of(taken))
        assert nc.capture(model, (x,)).tensors == whole and len(called) > 5

    @pytest.mark.parametrize("order", [(2, 0, 1), (1, 2, 0), (0, 2, 1)])
    def test_ranges_are_read_as_memory_lies(self, order):
        """Permuted and strided tensors are read in order of decreasing stride, without losing an element."""
        x = torch.randn(5, 6, 7).permute(order)[:, ::2]
        in_order = statistics.in_memory_order(x)
        assert sorted(in_order.stride(), reverse=True) == list(in_order.stride())
        assert torch.equal(in_order.flatten().sort()[0], x.flatten().sort()[0])


class TestWatch:
    """Findings over steps, and how they are told."""

    def train(self, steps=4, learning_rate=1e-2):
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
        x = torch.randn(8, 4)
        for _ in range(steps):
            optimizer.zero_grad()
            (model(x) ** 2).sum().backward()
            optimizer.step()

    def test_a_sound_run_has_no_finding_and_a_history(self):
        """With `every=2`, five steps leave rows for steps 1, 3 and 5, each with both gradients."""
        with nc.watch(every=2) as w:
            self.train(5)
        assert w.first is None and not w.findings and [row.step for row in w.history] == [1, 3, 5]
        assert set(w.history[0].gradients) == {"weight", "bias"} and w.steps == 5

    @pytest.mark.parametrize("at", ["op", "step"])
    def test_the_scale_of_each_step_is_kept_beside_its_gradients(self, at):
        """nc.Scaler and torch's own unscale before the optimizer steps: 1,024, and 512 after a skipped step."""
        for make in (nc.Scaler, torch.amp.GradScaler):
            weight, scaler = nn.Parameter(torch.ones(2)), make("cpu", init_scale=1024.0)
            optimizer = torch.optim.SGD([weight], 0.1)
            with nc.watch(at=at) as w:
                for loss in (weight.sum(), weight.sum() * float("inf"), weight.sum()):
                    scaler.scale(loss).backward()
                    scaler.step(optimizer)
                    scaler.update()
                    optimizer.zero_grad()
            assert [(row.scale, next(iter(row.gradients.values())).largest) for row in w.history] == [
                (1024.0, 1.0),
                (512.0, 1.0),
            ]

    @pytest.mark.parametrize("at", ["op", "step"])
    def test_a_run_that_diverges_shows_growth_before_infinity(self, at):
        """With a learning rate of 100, a trend is found some steps before the infinity, whose line is named."""
        with nc.watch(at=at) as w:
            self.train(30, 1e2)
        assert w.first is not None and "(model(x) ** 2)" in line(w.first)
        assert w.findings[0].made_by == "trend" and w.findings[0].step < w.first.step

    def test_stops_where_it_is_told_to(self):
        """With `stop=True`, the first value that is not finite raises a NotFiniteError."""
        with pytest.raises(NotFiniteError, match="made by"), nc.watch(stop=True) as w:
            self.train(30, 1e2)
        assert len([f for f in w.findings if f.made_by != "trend"]) == 1

    def test_tells_a_callback_and_writes_lines(self, tmp_path):
        """The callback receives every finding, and the log has a line for each finding and each step."""
        told = []
        with nc.watch(callback=told.append, log=tmp_path / "log.jsonl") as w:
            self.train(30, 1e2)
        assert told == w.findings
        rows = [json.loads(row) for row in (tmp_path / "log.jsonl").read_text().splitlines()]
        assert sum("finding" in row for row in rows) == len(told) and sum("gradients" in row for row in rows) == 30

    @pytest.mark.parametrize(
        ("dtype", "factor"), [(torch.float16, 1e-2), (torch.bfloat16, 1e-2), (torch.bfloat16, 1e-25)]
    )
    def test_gradients_that_underflow_are_a_trend(self, dtype, factor):
        """In fp16 what is this small is lost; in bf16 it is not, though its square is zero, and idle inputs have no
        gradient by right.
        """
        layer = nn.Linear(100, 1, bias=False)
        optimizer = torch.optim.SGD(layer.parameters(), lr=1e-9)
        x = torch.full((4, 100), 1e-3)
        with nc.watch() as w:
            for step in range(6):
                optimizer.zero_grad()
                if step:
                    x[:, :90] = 1e-6 if dtype is torch.float16 else 0
                with nc.autocast("cpu", dtype):
                    out = layer(x)
                (out.float().mean() * factor).backward()
                optimizer.step()
        said = [(f.what, "90%" in f.sentence) for f in w.findings]
        assert said == ([("underflow", True)] if dtype is torch.float16 else []), str(w)

    def test_nan_that_is_given_is_told_of_its_first_reader(self, model, x):
        """No call makes the NaN of a parameter, so the first call to read it is found and the parameter is named."""
        with nc.watch() as w:
            model(x * float("nan"))
        assert w.first.made_by == "given" or w.first.id.op == "aten.mul.Tensor"
        model.q.weight.data[0, 0] = float("nan")
        with nc.watch() as w:
            model(x)
        assert w.first.made_by == "given" and "the parameter q.weight" in w.first.sentence

    def test_what_an_op_writes_is_looked_at_before_it_runs(self):
        """Batch norm's running variance overflows in fp32: a finding, even though the op overwrites what it reads."""
        norm = nn.BatchNorm1d(3)
        with nc.watch() as w:
            norm(torch.tensor([[-3e38, 3e38, -3e38], *([[3e38, -3e38, 3e38]] * 3)]))
        assert not norm.running_var.isfinite().all()
        assert w.first.made_by == "format" and "meant" not in w.first.sentence and not w.intentional

    def test_the_logarithm_of_zero_is_no_finding_where_it_is_masked(self):
        """`torch.where` discards the infinity; without it, the logarithm is a finding that counts the zeros."""
        x = torch.tensor([0.0, 1.0, 2.0])
        with nc.watch() as w:
            torch.where(x > 0, x.log(), torch.zeros(()))
        assert w.first is None and "masked" in next(iter(w.intentional))
        with nc.watch() as w:
            kept = x.log() * 2
        assert w.first.id.op == "aten.log.default" and "1 of 3 elements of self is zero" in w.first.sentence, kept

    def test_who_rounded_a_value_onto_a_limit_is_found_by_running_it_again(self):
        """acos of a cosine, and what is divided by a root of squares: no format of the call itself is to blame."""
        layer, x = nn.Linear(8, 8), torch.randn(64, 8)
        with nc.watch() as w, nc.autocast("cpu"):
            low = layer(x)
            angle = ((low @ low.T).diagonal() / low.float().square().sum(-1) * 0.9999).acos()
        assert angle.isnan().any() and w.first.id.op == "aten.acos.default"
        assert "with aten.matmul.default in fp32, it is finite" in w.first.advice, w.first.advice
        assert '[[rule]] with op = "aten.matmul.default", action = "full"' in w.first.todo
        x = torch.full((4, 8), 1e-4, dtype=torch.float16) * torch.tensor([1, -1] * 4)
        with nc.watch() as w:
            (x / x.square().mean(-1, keepdim=True).sqrt()).sum()
        assert "run again with aten.pow.Tensor_Scalar in fp32, it is finite. Convert what it reads" in w.first.advice
        assert w.first.rules == (), "of a loop's own arithmetic, where no region is"
        with nc.watch() as w, nc.autocast("cpu", torch.float16):
            small = layer(x.float())
            logarithms = small.mul_(1e-6).mul_(1e-4).abs().log()
            assert logarithms.sum().isinf()
        assert '"aten.linear.default", action = "full"' in w.first.todo, "what is written in place keeps its format"

    def test_a_true_zero_is_not_laid_on_rounding(self):
        """A relu's zeros are zeros in fp32, too, which running it again shows; what is gone cannot be run again."""
        layer, x = nn.Linear(8, 8), torch.randn(4, 8)
        with nc.watch() as w, nc.autocast("cpu", torch.float16):
            logarithms = layer(x).abs().neg().relu().log()
        assert logarithms.isinf().all() and w.first.advice == (
            "No format of this call fixes it: keep its inputs off that value (a clamp, an epsilon, where)."
        )
        with nc.watch() as w, nc.autocast("cpu", torch.float16):
            logarithms = (torch.rand(4, 8) @ torch.zeros(8, 8)).log()
        assert logarithms.isinf().all()
        assert "is not known here" in w.first.advice and "aten.matmul.default" in w.first.advice

    def test_a_fully_masked_row_is_a_finding(self):
        """Each -inf is intentional, but their softmax is NaN all the same."""
        with nc.watch() as w:
            torch.zeros(2, 3).masked_fill(torch.ones(2, 3, dtype=torch.bool), float("-inf")).softmax(-1)
        assert w.first.what == "nan" and "intentional" in w.first.sentence

    def test_nan_of_an_infinite_number_is_a_finding(self):
        """Zero times infinity is NaN: a mask that is multiplied is none; one that is filled in, or chosen, is."""
        keep, scores = torch.tensor([[1.0, 0.0, 1.0]]), torch.zeros(1, 3)
        with nc.watch() as w:
            (scores + (1 - keep) * -float("inf")).softmax(-1)
        assert w.first.what == "nan" and w.first.id.op == "aten.mul.Tensor"
        with nc.watch() as w:
            torch.where(keep > 0, scores, scores - float("inf")).softmax(-1)
            torch.where(keep > 0, scores, (1 - keep) * -float("inf")).softmax(-1)
        assert w.first is None, "the NaN of it is not chosen"

    def test_a_policy_may_allow_it(self, tmp_path):
        """A rule with `allow_nonfinite` changes no format, hence no digest, and its calls are no findings."""
        text = 'name = "p"\n[[rule]]\nop = "aten.log"\nallow_nonfinite = true\n'
        policy = nc.Policy.parse(text)
        assert policy.digest == nc.Policy.native().digest and policy.to_toml() == text
        with nc.watch() as w, nc.autocast("cpu", torch.bfloat16, policy=policy):
            kept = torch.zeros(3).log()
        assert w.first is None and "allowed by a rule about aten.log" in next(iter(w.intentional)), kept

    def test_a_finding_is_a_script_of_its_own(self, tmp_path):
        """The saved script makes the infinity again in fp16, and none with `--format fp32`."""
        layer = nn.Linear(64, 8)
        with torch.no_grad():
            layer.weight.mul_(1e4)
        with nc.watch() as w, nc.autocast("cpu", torch.float16):
            layer(100 * torch.randn(4, 64))
        script = w.first.save(tmp_path / "repro")
        for options, infinite in (([], True), (["--format", "fp32"], False)):
            ran = subprocess.run([sys.executable, str(script), *options], capture_output=True, text=True, timeout=120)
            assert ran.returncode == 0, ran.stderr
            assert (" 0 infinite" not in ran.stdout) is infinite, ran.stdout

    def test_it_sees_on_after_a_call_that_raised_and_beside_modes_of_the_users(self):
        """While a call that a policy decides runs, the observer is out of the way, and afterwards in its place."""

        class Mode(TorchDispatchMode):
            seen = 0

            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                self.seen += 1
                return func(*args, **(kwargs or {}))

        around, inside = Mode(), Mode()
        depth = torch._C._len_torch_dispatch_stack()
        with around, nc.watch() as w, nc.autocast("cpu", torch.bfloat16), nc.capture() as run:
            with pytest.raises(RuntimeError):
                torch.randn(2, 3) @ torch.randn(2, 3)
            with inside:
                torch.ones(2, 2) @ torch.ones(2, 2)
            torch.zeros(2).reciprocal().sub(torch.inf)
            torch.ones(2, 2) @ torch.full((2, 2), torch.nan)
        assert torch._C._len_torch_dispatch_stack() == depth
        assert [call.id.op for call in run.calls if "matmul" in call.id.op] == ["aten.matmul.default"] * 2
        assert len(w.findings) == 2 and inside.seen > 2 and around.seen > 10

    def test_nothing_stays_behind(self, model, x):
        """`Module.__call__` and `torch.autocast.__enter__` are the originals, and recording works afterwards."""
        before = torch.nn.Module.__call__, torch.autocast.__enter__
        with nc.watch(), nc.capture():
            model(x)
        assert (torch.nn.Module.__call__, torch.autocast.__enter__) == before
        with nc.record() as ledger, nc.autocast("cpu", torch.bfloat16):
            model(x)
        assert ledger.casts


def line(finding):
    with open(finding.file, encoding="utf-8") as file:  # noqa: PTH123
        return file.read().splitlines()[finding.line - 1]


class TestCompare:
    """References, groupings, what is no fault."""

    @pytest.mark.parametrize("reference", ["fp32", "fp64"])
    def test_every_low_call_has_an_own_error_within_its_band(self, model, x, reference):
        """The kernels' errors stay within bf16's band, and each parameter's gradient is compared."""
        found = nc.compare(model, (x,), under="bf16", reference=reference, backward=True)
        assert found.verdict == "round-off" and not found.unmatched, found
        low = [row for row in found.rows if row.computes == "bf16"]
        assert low and all(row.local < 1.5 * row.round_off_bound for row in low)
        assert all(row.kernel <= row.round_off_bound for row in low)
        assert {g.parameter for g in found.gradients} == {n for n, _ in model.named_parameters()}
        assert any(row.alone == row.alone for row in found.rows)

    def test_without_a_low_format_nothing_differs(self, model, x):
        """A policy without rules casts nothing, so the verdict is exact."""
        found = nc.compare(model, (x,), under=nc.Policy("nothing", extends=()))
        assert found.verdict == "exact" and not found.differing

    def test_compiled_code_differs_nowhere_from_eager(self, model, x):
        """A compiled bf16 model has every call of its eager reference, and the verdict is exact."""

        def eager(x):
            with nc.autocast("cpu", torch.bfloat16):
                return model(x)

        found = nc.compare(nc.compile(model, under="bf16", backend="aot_eager"), (x,), reference=eager)
        assert found.verdict == "exact" and not found.differing and not found.unmatched, found

    def test_random_numbers_are_the_same_in_every_run(self, x):
        """Dropout zeros the same elements under bf16 and fp32, for otherwise far more than round-off would remain."""
        model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.Linear(16, 4)).train()
        found = nc.compare(model, (x,), under="bf16")
        assert found.verdict == "round-off", found

    def test_what_differs_between_two_runs_of_the_reference_is_no_fault(self, x):
        """A model that multiplies by its number of runs is nondeterministic, and a note says so."""
        runs = itertools.count(1)  # a list, or an attribute, is as before in each

        class Counting(nn.Module):
            def forward(self, x):
                return torch.mm(x[0], x[0].T) * next(runs)

        found = nc.compare(Counting(), (x,), under="bf16")
        assert "nondeterministic" in {row.verdict for row in found.rows}
        assert any("between two runs of the reference" in note for note in found.notes)

    @pytest.mark.parametrize("kind", ["dict", "tuple", "generator"])
    def test_outputs_of_many_kinds(self, kind):
        """Tensors in dictionaries, nested lists and generators are compared, and a number among them is ignored."""
        layer = nn.Linear(16, 4)

        def run(x):
            if kind == "generator":
                return (layer(x * k).sum() for k in (1, 2))
            y = layer(x)
            return {"logits": y, "n": 3} if kind == "dict" else (y, [y * 2])

        found = nc.compare(run, (torch.randn(3, 16),), under="bf16", backward=True)
        assert found.outputs and found.verdict == "round-off", found

    def test_a_model_that_differentiates_in_its_forward(self):
        """Forces from `torch.autograd.grad` have rows for the forward and for the backward."""

        class Forces(nn.Module):
            def __init__(self):
                super().__init__()
                self.energy = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))

            def forward(self, positions):
                with torch.enable_grad():
                    positions = positions.detach().requires_grad_()
                    energy = self.energy(positions).sum()
                    return energy, torch.autograd.grad(energy, positions)[0]

        found = nc.compare(Forces(), (torch.randn(5, 3),), under="bf16")
        assert {row.id.direction for row in found.rows} == {"forward", "backward"}

    def test_the_first_screen_is_short_and_the_rest_is_there(self, model, x):
        """The text has at most 25 lines, and the JSON has every row under its schema."""
        found = nc.compare(model, (x,), under="bf16", by="module")
        assert len(str(found).splitlines()) <= 25
        data = json.loads(found.to_json())
        assert data["schema"] == "narrowcast.compare/3" and len(data["rows"]) == len(found.rows)


def _nested(layer, x):
    return layer(torch.nested.nested_tensor([x, x[:2]]))


def _jagged(layer, x):
    return layer(torch.nested.nested_tensor([x, x[:2]], layout=torch.jagged))


def _of_two(layer, x):
    from torch.testing._internal.two_tensor import TwoTensor

    return layer(TwoTensor(x, x.clone()))


@pytest.mark.parametrize("look", [nc.watch, nc.capture])
@pytest.mark.parametrize(
    "run",
    [
        _nested, _jagged, _of_two,
        lambda layer, x: torch.vmap(layer)(x),
        lambda layer, x: torch.func.hessian(lambda v: layer(v).square().sum())(x[0]),
        lambda layer, x: torch.sparse.mm(torch.eye(4).to_sparse(), x),
        lambda layer, x: torch.inference_mode()(lambda: layer(x) * 2)(),
        lambda layer, x: layer(x[:0]),
        lambda layer, x: layer.to("meta")(x.to("meta")),
        lambda layer, x: x.to(torch.float8_e4m3fn).float() + 1,
        lambda layer, x: torch.fft.fft(x).abs(),
    ],
    ids=["nested", "jagged", "two", "vmap", "hessian", "sparse", "inference", "empty", "meta", "fp8", "complex"],
)  # fmt: skip
def test_tensors_of_every_kind_pass_and_those_without_memory_of_their_own_are_not_looked_at(look, run):
    """Nested, sparse, fp8, complex, meta and vmapped tensors raise nothing under a watch or a capture."""
    with look(), nc.autocast("cpu", torch.bfloat16):
        run(nn.Linear(8, 8), torch.randn(4, 8))


@pytest.mark.parametrize("under", ["bf16", "fp16"])
def test_the_logarithm_of_zero_is_meant_where_all_that_reads_it_is_finite(under):
    """A point without mass in a transport plan; an overflow that a sigmoid hides is not meant."""

    class Plan(nn.Module):
        def __init__(self, factor):
            super().__init__()
            self.layer, self.factor = nn.Linear(8, 6), factor

        def forward(self, x, mass):
            logits = self.layer(x * self.factor)
            plan = torch.logsumexp(logits.float() + mass.log(), 1)
            return torch.sigmoid(logits).sum() + plan.sum()

    mass = torch.tensor([0.2, 0.2, 0.2, 0.4, 0.0, 0.0])
    run = nc.capture(Plan(1.0), (torch.rand(4, 8), mass), under=under)
    assert run.verdict == "finite" and run.not_finite()
    if under == "fp16":
        over = nc.capture(Plan(1e38), (torch.rand(4, 8), mass), under=under)
        assert over.verdict == "not finite"


def test_the_logarithm_of_zero_that_is_returned_is_not_finite():
    """Nothing makes it finite."""
    run = nc.capture(nn.Sequential(nn.ReLU(), Log()), (torch.tensor([-1.0, 2.0]),))
    assert run.verdict == "not finite"


class Log(nn.Module):
    """A logarithm."""

    def forward(self, x):
        return x.log()


def test_a_capture_advises_rules_for_calls_that_make_what_is_not_finite():
    """Not for those that only pass it on."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    with torch.no_grad():
        model[0].weight.fill_(1e4)
    run = nc.capture(model, (torch.full((4, 8), 100.0),), under="fp16")
    assert run.verdict == "not finite"
    assert [todo.path for todo in run.todos] == ["0"]


class Quotients(nn.Module):
    """Gives 0/0 where all of a row is zero."""

    def forward(self, x):
        return x / x.sum(-1, keepdim=True)


@pytest.mark.parametrize("ends", [nn.Softmax(-1), Quotients(), Log()], ids=["pole", "quotient", "logarithm"])
def test_a_capture_advises_no_rule_where_no_format_helps(ends):
    """A quotient by zero, or a logarithm of it, is the same in fp32; an overflow before it is another fault."""
    x = torch.zeros(2, 4) if not isinstance(ends, nn.Softmax) else torch.full((2, 4), torch.nan)
    run = nc.capture(nn.Sequential(nn.ReLU(), ends), (x,), under="fp16")
    assert run.verdict == "not finite"
    assert not [todo.rule for todo in run.todos if todo.rule]
    assert [todo.what for todo in run.todos] == ["Run it inside nc.watch()"]


class Bags(nn.Module):
    """The means of bags, of which one is empty."""

    def forward(self, x, number):
        return x * torch.where(number > 0, 1 / number, 0.0)[:, None]


def test_what_goes_no_further_is_no_fault():
    """A quotient by an empty bag's size, a whole number; what the CTC loss keeps for its backward alone."""
    run = nc.capture(Bags(), (torch.rand(3, 4), torch.tensor([4, 0, 2])), under="bf16")
    assert run.verdict == "finite" and run.not_finite()
    lengths, targets = (torch.tensor([20, 18, 15]), torch.tensor([5, 4, 3])), torch.randint(1, 12, (3, 5))

    def loss(scores):
        return nn.functional.ctc_loss(scores.float().log_softmax(-1), targets, *lengths)

    model, inputs = nn.Linear(16, 12), (torch.randn(20, 3, 16),)
    run = nc.capture(model, inputs, under="bf16", backward=loss)
    assert run.verdict == "finite" and not run.not_finite()
    compared = nc.compare(model, inputs, under="bf16", backward=loss)
    assert compared.verdict == "round-off" and not any("two runs" in note for note in compared.notes)


def test_ops_on_lists_make_what_they_write_and_gradients_are_those_of_the_backward():
    """An average of weights is made by the op that writes it; a gradient that is clipped is not another one."""
    model, average, x = nn.Linear(4, 4), nn.Linear(4, 4), torch.ones(2, 4)
    with nc.capture() as run:
        model(x).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        with torch.no_grad():
            torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 0.5)
            average(x)
    by_op = {call.id.op: call for call in run.calls}
    assert not by_op["aten._foreach_mul_.Tensor"].outputs
    written = [number for _, number in by_op["aten._foreach_lerp_.Scalar"].outputs]
    read = dict(run.calls[-1].inputs)
    assert len(written) == 2 and {run.tensors[read[n]].lies_in for n in ("mat2", "self")} | {*read.values()} >= {
        *written
    }


def helped(x):
    """A function of the model's file."""
    return x * 2


class Helped(nn.Module):
    """Calls a function on a view."""

    def forward(self, x):
        parts = x.unflatten(-1, (2, 2)).transpose(0, 1)
        return helped(parts)


def test_a_call_has_the_lines_that_lead_to_it(tmp_path):
    """Those that call its function, in its module, and those of the views that it reads."""
    run = nc.capture(Helped(), (torch.ones(3, 4),))
    (call,) = run.calls
    first = Helped.forward.__code__.co_firstlineno
    assert [line for _, line in call.callers] == [first + 2] and [line for _, line in call.views] == [first + 1]
    assert call.line == helped.__code__.co_firstlineno + 2
    assert nc.load(run.save(tmp_path / "run.json")).calls == run.calls


class Filled(nn.Module):
    """Normalizes a column with missing values, and fills these in; or gives them back."""

    def __init__(self, fills):
        super().__init__()
        self.layer, self.fills = nn.Linear(4, 4), fills

    def forward(self, x):
        scaled = (x - x.nanmean(0)) / 1.5
        return self.layer(torch.where(x.isnan(), 0.0, scaled)) if self.fills else (self.layer(x), scaled)


@pytest.mark.parametrize("fills", [True, False])
def test_nan_that_is_given_and_goes_no_further_is_no_finding(fills):
    """Nothing is to be done about it, as a watched run says; where the model returns it, it is said."""
    x = torch.randn(6, 4)
    x[1, 2] = float("nan")
    run = nc.capture(Filled(fills), (x,), under="bf16")
    assert (run.verdict, len(run.todos)) == (("finite", 0) if fills else ("not finite", 1))
    if fills:
        with nc.watch() as watched, nc.autocast("cpu", torch.bfloat16):
            Filled(fills)(x)
        assert watched.verdict == "finite"
        assert "NaN and infinities of 2 calls" in run.to_text()


def test_an_ensemble_by_vmap_is_captured_whole():
    """torch makes no tensor from numbers there, inside of a composite op, and what is drawn of a tensor needs some."""
    nets = [nn.Linear(3, 1) for _ in range(4)]
    stacked, _ = torch.func.stack_module_state(nets)
    base = copy.deepcopy(nets[0]).to("meta")

    def ensemble(x):
        return torch.vmap(lambda p, x: torch.func.functional_call(base, p, (x,)), (0, None))(stacked, x)

    run = nc.capture(ensemble, (torch.randn(6, 3),), under="bf16")
    assert run.verdict == "finite" and not any("not inspected" in note for note in run.notes)


@pytest.mark.parametrize("look", [nc.watch, nc.capture, nc.record])
@pytest.mark.usefixtures("fresh_dynamo")
def test_a_block_inside_of_compiled_code_is_refused(look):
    """torch takes no stance there; its error named none of ours. Afterwards all is as before."""
    layer = nn.Linear(4, 4)

    @torch.compile(backend="eager")
    def observed(x):
        with look(), torch.autocast("cpu", torch.bfloat16):
            return layer(x)

    with pytest.raises(RunError, match=r"inside of a function that torch\.compile compiled"):
        observed(torch.randn(2, 4))
    with look(), nc.autocast("cpu", torch.bfloat16):
        assert torch.compile(layer, backend="eager")(torch.randn(2, 4)).dtype is torch.bfloat16
