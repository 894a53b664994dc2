"""`explain` with front_end="compile" and "export"."""

import json
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import narrowcast as nc
from narrowcast.analysis.record.graph_ledger import decision_differences
from narrowcast.cli.explain import program_parts
from narrowcast.core.ledger import CallKind
from narrowcast.programs.program import print_program
from narrowcast.reports.results.ledger import Ledger
from narrowcast.reports.results.saved import parse

sys.path.insert(0, str(Path(__file__).parents[1] / "pure"))
from program_text import parse_program


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.last = (nn.Linear(8, 8) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        x = x * self.scale
        return self.last(F.gelu(self.q(x)) + self.k(x)).softmax(-1)


@pytest.fixture(autouse=True)
def quiet():
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


POLICY = nc.Policy.native().with_rules(nc.Rule("aten.gelu", "full", reason="for the test"))


def decided(explanation):
    return {(row.op, row.calls, row.computes, row.action) for row in explanation.op_rows() if row.action != "no rule"}


@pytest.mark.parametrize("front_end", ["compile", "export"])
def test_the_table_is_that_of_eager(front_end):
    """Same ops, formats and rules; no difference to report; the user's lines."""
    model, x = Model(), torch.randn(4, 8)
    eager = nc.explain(model, (x,), under=POLICY)
    found = nc.explain(model, (x,), under=POLICY, front_end=front_end)
    assert decided(found) == decided(eager)
    assert found.differences == ()
    assert [(c.op, c.argument, c.module_path, c.src, c.dst) for c in found.ledger.casts] == [
        (c.op, c.argument, c.module_path, c.src, c.dst) for c in eager.ledger.casts
    ]
    assert {c.file for c in found.ledger.casts} == {__file__}
    assert not torch.is_autocast_enabled("cpu")


def test_what_the_passes_did():
    """Casts in eager, shared, left; with gradients the joint graph too; in the text and in JSON."""
    model, x = Model(), torch.randn(4, 8)
    with torch.no_grad():
        found = nc.explain(model, (x,), under=POLICY, front_end="compile")
    (row,) = found.graph_rows()
    assert (row.assigned, row.shared, row.casts, row.joint_before) == (10, 1, 9, 0)
    assert [c.how for c in found.ledger.casts].count("shared") == 1
    with_gradients = nc.explain(model, (x,), under=POLICY, front_end="compile")
    (row,) = with_gradients.graph_rows()
    assert row.shared == 0 and row.joint_after < row.joint_before and row.backward > 0
    text = with_gradients.to_text(every=True)
    assert "mode: compile; ran: graphs: 1;" in " ".join(text.split()) and "BUG" not in text
    assert f"casts left {row.casts} in 1 graph, where eager code makes 10" in " ".join(text.split())
    assert f"casts of the backward {row.backward} forward and backward: {row.joint_after}" in " ".join(text.split())
    data = json.loads(with_gradients.to_json())
    assert data["front_end"] == "compile" and data["differences"] == []
    assert data["graphs"][0]["row"]["casts"] == row.casts
    assert {e["by"] for e in data["ledger"]["edits"]} >= {"assign", "share"}
    assert parse(with_gradients.to_json()).ledger.edits == with_gradients.ledger.edits


def test_graph_breaks_are_listed_with_line_and_reason():
    """And the parts between them."""

    def broken(x):
        y = F.linear(x, torch.ones(8, 8))
        torch._dynamo.graph_break()
        return F.linear(y, torch.ones(8, 8))

    found = nc.explain(broken, (torch.randn(2, 8),), front_end="compile")
    first, second = found.graph_rows()
    assert "graph_break" in first.broken_by and first.broken_at.startswith(f"{__file__}:")
    assert second.broken_by == "" and found.differences == ()
    assert f"ends graph {first.number}, {first.broken_at}" in " ".join(found.to_text(every=True).split())


def test_a_function_that_is_left_to_python_is_listed_with_line_and_reason():
    """Dynamo traces no LSTM: there is no graph, and no difference from eager either; what eager code does is listed."""

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(8, 8)

        def forward(self, x):
            return self.lstm(x)[0]

    found = nc.explain(Recurrent(), (torch.randn(2, 3, 8),), under="safe", front_end="compile")
    (row,) = found.graph_rows()
    assert "LSTM" in row.fallback and row.site.startswith(f"{__file__}:") and row.calls == 0
    assert found.differences == ()
    text = found.to_text(every=True)
    assert "runs as eager code would" in " ".join(text.split())
    assert "nothing was captured, so the eager run is listed" in " ".join(text.split())
    assert found.ledger.calls


def test_a_difference_from_eager_is_a_bug_row(monkeypatch):
    """Shown a graph that decides otherwise."""
    import narrowcast.analysis.explain.explain as explainer

    real = explainer.graph_ledger

    def other(graphs):
        ledger = real(graphs)
        kind = next(k for k in ledger.calls if k.op == "aten.gelu.default")
        del ledger.calls[kind]
        return ledger

    monkeypatch.setattr(explainer, "graph_ledger", other)
    found = nc.explain(Model(), (torch.randn(4, 8),), under=POLICY, front_end="compile")
    assert [(d.op, d.eager, d.graph) for d in found.differences] == [("aten.gelu.default", 1, 0)]
    text = " ".join(found.to_text(every=True).split())
    assert "BUG: aten.gelu.default in (root) computes in " in text


def test_programs_can_be_shown():
    """Before and after, in a text form that parses."""
    found = nc.explain(Model(), (torch.randn(4, 8),), front_end="export")
    parts = [str(part) for part in program_parts(found)]
    assert len(parts) == 4 and "as captured" in parts[0] and "explicit casts" in parts[2]
    assert parse_program(print_program(found.graphs[0].after)) == found.graphs[0].after


@pytest.mark.parametrize(
    "options, says",
    [
        ({"front_end": "onnx"}, "no such front end"),
        ({"front_end": "compile", "device": "cuda"}, "where the model is"),
    ],
)
def test_what_cannot_be_explained(options, says):
    """A front end that is none; a device that is not here."""
    with pytest.raises(nc.errors.NarrowcastError) as caught:
        nc.explain(Model(), (torch.randn(4, 8),), **options)
    assert says in str(caught.value)


@pytest.mark.parametrize("kind", ["code", "script", "converted"])
def test_scripts(kind, tmp_path):
    """The casts of the graph that nc.script or nc.script makes, with lines, and the graph before and after."""
    model, x = Model(), torch.randn(4, 8)
    eager = nc.explain(model, (x,), under=POLICY)
    made = {"code": lambda: model, "script": lambda: torch.jit.script(model), "converted": lambda: nc.script(model)}
    found = nc.explain(made[kind](), (x,), under=POLICY, front_end="script")
    assert {row[0] for row in decided(found)} == {row[0] for row in decided(eager)}
    assert {(c.op, c.argument, c.module_path, c.line, c.dst) for c in found.ledger.casts if c.module_path} == {
        (c.op, c.argument, c.module_path, c.line, c.dst) for c in eager.ledger.casts if c.module_path
    }
    text = found.to_text(every=True)
    assert "mode: script; ran: graphs: 1; nothing was run" in " ".join(text.split())
    assert "TorchScript code" not in text
    shown = "\n".join(str(part) for part in program_parts(found))
    assert "graph 0: as captured" in shown and "cast(self=" in shown
    assert json.loads(found.to_json())["front_end"] == "script"


def test_scripts_for_a_device_that_is_not_here():
    """cuda's lists hold in the graph."""
    model, x = Model(), torch.randn(4, 8)
    found = nc.explain(torch.jit.script(model), (x,), device="cuda", front_end="script")
    eager = nc.explain(model, (x,), device="cuda")
    assert {(row.op, row.computes, row.result, row.action) for row in found.op_rows() if row.action != "no rule"} == {
        (row.op, row.computes, row.result, row.action) for row in eager.op_rows() if row.action != "no rule"
    }
    assert found.low == "fp16"


def test_attention_that_is_fused_in_eager_code_alone_is_no_bug(fresh_dynamo):
    """torch itself takes another path where it traces: it is said, and what differs beside it is a difference still."""
    attention = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
    x = torch.randn(2, 3, 8)
    with torch.no_grad():
        found = nc.explain(attention, ((x, x, x), {"need_weights": False}), front_end="export")
    assert not found.differences and "BUG" not in str(found) and "unfused path" in found.note
    eager, graph = Ledger(), Ledger()
    for ledger, op, path in (
        (eager, "aten._native_multi_head_attention.default", "a"), (graph, "aten.linear.default", "a"),
        (eager, "aten.linear.default", "ab"),
    ):  # fmt: skip
        ledger.count_call(CallKind(op, path, "", 0, "fp32", "bf16", "bf16", "lower", "", "native"), 0)
    assert [d.module_path for d in decision_differences(eager, graph)] == ["ab"]


class Complex(torch.nn.Module):
    def forward(self, x):
        return torch.view_as_real(torch.view_as_complex(x.float().reshape(4, 4, 2)) * 2)


class Twice(torch.nn.Module):
    def __init__(self):
        super().__init__()
        layer = torch.nn.Linear(8, 8)
        self.layers = torch.nn.Sequential(layer, torch.nn.ReLU(), layer)

    def forward(self, x):
        return self.layers(x)


class Times(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x.mm(weight)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient.mm(weight.t()).to(x.dtype), x.t().mm(gradient).to(weight.dtype)


class Own(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        return Times.apply(x, self.weight)


class Branches(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda t: self.layer(t).sin(), lambda t: self.layer(t).cos(), (x,))


@pytest.mark.parametrize("front_end", ["compile", "export"])
@pytest.mark.parametrize("model", [Complex, Twice, Own, Branches])
def test_what_is_decided_alike_is_no_difference(model, front_end, fresh_dynamo):
    """A view that a list names, a module of two names, the backward of a Function; of two branches one runs."""
    found = nc.explain(model(), (torch.randn(4, 8),), under="bf16", front_end=front_end)
    assert found.graphs and not found.differences
    assert ("one branch" in found.note) is (model is Branches)


@pytest.mark.parametrize("gradients", [False, True])
def test_what_is_traced_for_a_branch_is_not_recorded(gradients, fresh_dynamo):
    """torch.cond traces both branches, more than once, before it runs one."""
    with torch.set_grad_enabled(gradients), nc.record() as ledger, nc.autocast("cpu"):
        Branches()(torch.randn(4, 8))
    assert sum(tally.calls for kind, tally in ledger.calls.items() if kind.op == "aten.linear.default") == 1
    assert sorted(cast.argument for cast in ledger.casts) == ["bias", "input", "weight"]


@pytest.mark.parametrize("goal", [None, pytest.param("fast", marks=pytest.mark.slow)])
def test_times_are_those_of_eager_code_and_said_to_be(goal, fresh_dynamo):
    """What is compiled is not run: a goal that was asked for is not advised."""
    asked = {} if goal is None else {"goal": goal}
    with torch.no_grad():
        found = nc.explain(Model(), (torch.randn(4, 8),), under="bf16", front_end="compile", run=True, **asked)
    text = " ".join(str(found).split())
    assert "as eager code it takes" in text.partition("VERDICT")[2]
    assert not goal or "Choose formats by measured time" not in text


def test_a_cast_before_what_only_moves_values_is_no_other_decision():
    """A program whose inputs are cast once, before they are gathered and concatenated, decides as eager code does."""

    class Edges(nn.Module):
        def __init__(self):
            super().__init__()
            self.message, self.update = nn.Linear(32, 16), nn.Linear(16, 16)

        def forward(self, x, i, j):
            return self.message(torch.cat([x[i], x[j]], -1)).sum() + self.update(x).sum()

    inputs = (torch.randn(10, 16), torch.arange(10), torch.arange(10).flip(0))
    found = nc.explain(
        Edges(), inputs, under=nc.autocast("cpu", policy="safe"), front_end="compile", backend="aot_eager"
    )
    assert any(edit.kind == "follow" for edit in found.ledger.edits) and not found.differences, str(found)
    assert "BUG" not in str(found)


def test_what_was_exported_is_explained_as_it_runs(tmp_path):
    """With the casts that it has, loaded again, too: no region is put around it that is not asked for."""
    model, x = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.Linear(8, 4)), torch.randn(2, 16)
    policy = nc.Policy.native().with_rules(nc.Rule("aten.linear", "full", module="1"))
    torch.export.save(nc.export(model, (x,), under=policy), tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2")
    found = nc.explain(loaded, (x,))
    computed = {row.computes for row in found.op_rows() if "linear" in row.op or "addmm" in row.op}
    assert computed == {"bf16", "fp32"} and found.ledger.totals().casts == 0
    assert "with its own casts" in found.note and "policy: none" in str(found)
    assert nc.explain(loaded, (x,), under="bf16").ledger.totals().casts > 0


class FromData(nn.Module):
    """A scale that the first batch sets, in code that a compiled model runs."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(4))
        self.register_buffer("is_ready", torch.tensor(False))

    def forward(self, x):
        if not self.is_ready:
            with torch.no_grad():
                self.scale.copy_(-x.std(0).log())
                self.is_ready.fill_(True)
        return x * self.scale.exp()


def test_weights_that_compiled_code_writes_to_are_as_before():
    """No call is seen that writes to them: what is compiled has weights of its own."""
    model = nn.Sequential(FromData(), nn.Linear(4, 4))
    nc.explain(model, torch.randn(16, 4) * 3, under="bf16", front_end="compile")
    assert bool((model[0].scale == 0).all()) and not model[0].is_ready
