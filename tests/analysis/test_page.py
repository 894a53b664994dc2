"""Pages of what real runs gave."""

import torch

import narrowcast as nc
from narrowcast.reports.documents.model import OUTSIDE
from narrowcast.reports.documents.of_results import document_of
from narrowcast.reports.results.saved import load


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.dense = torch.nn.LayerNorm(8), torch.nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.softmax(self.dense(self.norm(x)), -1)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.ModuleList(Block() for _ in range(2))
        self.head = torch.nn.Linear(8, 4)

    def forward(self, x):
        for block in self.layer:
            x = block(x)
        return self.head(x.view(-1, 8))


X = torch.linspace(-2, 3, 48).reshape(2, 3, 8)


def flow(result):
    graph = document_of(result).graph
    name = [f"{n.path} {n.op.split('.')[1]}" for n in graph.nodes]
    return {(name[e.start], name[e.end]) for e in graph.edges if e.start != OUTSIDE}, graph


FLOW = {
    ("layer.0.norm native_layer_norm", "layer.0.dense linear"), ("layer.0.dense linear", "layer.0 _softmax"),
    ("layer.0 _softmax", "layer.0 add"), ("layer.0 add", "layer.1.norm native_layer_norm"),
    ("layer.0 add", "layer.1 add"), ("layer.1.norm native_layer_norm", "layer.1.dense linear"),
    ("layer.1.dense linear", "layer.1 _softmax"), ("layer.1 _softmax", "layer.1 add"), ("layer.1 add", "head linear"),
}  # fmt: skip


def test_a_captured_run_s_page_has_the_flow_of_the_model():
    """Through the view in front of the head, too; with the casts that the region made."""
    with torch.no_grad():
        run = nc.capture(Net(), (X,), under="native")
    found, graph = flow(run)
    assert found == FLOW
    casts = {(graph.nodes[e.end].path, e.argument, e.src, e.dst) for e in graph.edges if e.src != e.dst}
    assert ("head", "weight", "fp32", "bf16") in casts and ("head", "input", "fp32", "bf16") in casts


def test_a_compiled_graph_s_page_has_the_same_flow(fresh_dynamo):
    """Read off the program, in which views and casts are steps of their own."""
    with torch.no_grad():
        found, graph = flow(nc.explain(Net(), (X,), under="bf16", front_end="export"))
    assert found == FLOW
    kinds = {(e.argument, e.kind) for e in graph.edges if e.src != e.dst}
    assert ("weight", "weight") in kinds and ("input", "activation") in kinds
    assert {n.action for n in graph.nodes if n.op == "aten.linear.default"} == {"lower"}


def test_the_backward_of_a_compiled_graph_is_on_its_page(fresh_dynamo):
    """Each call at the module whose gradients it makes, fed by the calls of the forward."""
    found, graph = flow(nc.explain(Net(), (X,), under="bf16", front_end="compile"))
    assert found >= FLOW
    backward = [n for n in graph.nodes if n.direction == "backward"]
    assert {n.path for n in backward} == {f"layer.{n}{m}" for n in range(2) for m in ("", ".norm", ".dense")} | {"head"}
    assert ("layer.0.norm native_layer_norm", "layer.0.dense mm") in found  # the gradient of the weight
    assert ("head mm", "layer.1.dense mm") in found or ("head mm", "layer.1 _softmax_backward_data") in found
    assert {"forward", "backward"} == {graph.nodes[e.end].direction for e in graph.edges if e.src != e.dst}


class Halves(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.both, self.head = torch.nn.Linear(8, 16), torch.nn.Linear(8, 4)

    def forward(self, x):
        a, b = self.both(x).chunk(2, -1)
        return self.head(torch.sigmoid(a[:, 1:]) * b[:, 1:])


def test_slices_do_not_end_the_flow_of_a_captured_run():
    """Both halves come from the product; what is neither view nor result of a call comes from outside."""
    with torch.no_grad():
        found, graph = flow(nc.capture(Halves(), (X,), under="native"))
    assert found == {
        ("both linear", " sigmoid"),
        (" sigmoid", " mul"),
        ("both linear", " mul"),
        (" mul", "head linear"),
    }
    outside = [(graph.nodes[e.end].path, e.argument) for e in graph.edges if e.start == OUTSIDE]
    assert outside == [
        (m, a) for m in ("both", "head") for a in ("input", "weight", "bias") if (m, a) != ("head", "input")
    ]


def test_memory_that_is_used_again_is_no_view():
    """A result that lies where another one lay comes from its own call."""
    seen = []
    with torch.no_grad(), nc.capture() as run:
        x = torch.ones(64, 64)
        for _ in range(3):
            y = x + 1
            seen.append(y.data_ptr())
            del y
            x = x * 2
    assert [t.lies_in for t in run.tensors] == [-1] * len(run.tensors)


def test_a_saved_explanation_of_placed_graphs_says_the_same(fresh_dynamo, tmp_path):
    """Its programs apart: text, page and JSON."""
    with torch.no_grad():
        found = nc.explain(Net(), (X,), under="bf16", front_end="export", goal=nc.Goal.fast(verify=False))
    found.save(tmp_path / "e.json")
    again = load(tmp_path / "e.json")
    assert str(again) == str(found) and again.to_html() == found.to_html() and again.to_json() == found.to_json()
    assert "Goal fast" in document_of(again).verdict


def test_errors_of_a_comparison_are_on_the_nodes_of_an_explanation():
    """Each call's own error, where the explanation was run."""
    with torch.no_grad():
        found = nc.explain(Net(), (X,), under="bf16", run=True)
    page = document_of(found)
    errors = [n.local for n in page.graph.nodes if n.op == "aten.linear.default"]
    assert len(errors) == 3 and all(errors) and page.series[0].title == "Error by depth"


def test_a_recording_has_a_page_and_a_compact_form():
    """Backward included."""
    with nc.record() as ledger, nc.autocast("cpu", torch.bfloat16):
        Net()(X).sum().backward()
    page = document_of(ledger)
    assert {n.direction for n in page.graph.nodes} == {"forward", "backward"}
    assert sum(e.times for e in page.graph.edges) == ledger.totals().casts
    assert "aten.linear.default" in ledger._repr_html_() and "aten.linear.default" in ledger.to_html()
