"""Pages of what real runs gave."""

import torch

import narrowcast as nc
from narrowcast.page.model import OUTSIDE
from narrowcast.page.read import page_of


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
    graph = page_of(result.data()).graph
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
        run = nc.capture(Net(), (X,), policy="native", dtype="bf16")
    found, graph = flow(run)
    assert found == FLOW
    casts = {(graph.nodes[e.end].path, e.argument, e.src, e.dst) for e in graph.edges if e.src != e.dst}
    assert ("head", "weight", "fp32", "bf16") in casts and ("head", "input", "fp32", "bf16") in casts


def test_a_compiled_graph_s_page_has_the_same_flow(fresh_dynamo):
    """Read off the program, in which views and casts are steps of their own."""
    with torch.no_grad():
        found, graph = flow(nc.explain(Net(), X, dtype="bf16", front_end="export"))
    assert found == FLOW
    kinds = {(e.argument, e.kind) for e in graph.edges if e.src != e.dst}
    assert ("weight", "weight") in kinds and ("input", "activation") in kinds
    assert {n.action for n in graph.nodes if n.op == "aten.linear.default"} == {"lower"}


def test_errors_of_a_comparison_are_on_the_nodes_of_an_explanation():
    """Each call's own error, where the explanation was run."""
    with torch.no_grad():
        found = nc.explain(Net(), X, dtype="bf16", run=True)
    page = page_of(found.data())
    errors = [n.own for n in page.graph.nodes if n.op == "aten.linear.default"]
    assert len(errors) == 3 and all(errors) and page.series[0].title == "Error by depth"


def test_a_recording_has_a_page_and_a_compact_form():
    """Backward included."""
    with nc.record() as ledger, nc.autocast("cpu", torch.bfloat16):
        Net()(X).sum().backward()
    page = page_of(ledger.data())
    assert {n.direction for n in page.graph.nodes} == {"forward", "backward"}
    assert sum(e.times for e in page.graph.edges) == ledger.totals().casts
    assert "aten.linear.default" in ledger._repr_html_() and "aten.linear.default" in ledger.to_html()
