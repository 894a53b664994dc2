"""What flows between the calls that an explanation lists: from what made a value to what reads it."""

import pytest
import torch
from torch import nn

import narrowcast as nc
from narrowcast.reports.documents.of_results import document_of


class Queries(nn.Module):
    """Queries and keys with norms of their own, of one input: the order of the calls is not what flows."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.q_norm = nn.Linear(16, 16), nn.LayerNorm(16)
        self.k_proj, self.k_norm = nn.Linear(16, 16), nn.LayerNorm(16)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        q = self.q_norm(self.q_proj(x))
        k = self.k_norm(self.k_proj(x))
        return self.head((q @ k.transpose(-1, -2)).contiguous().view(2, 4, 4).float())


def arrows(found):
    """Between which modules values flow, on the page."""
    graph = document_of(found).graph
    assert graph.flow
    return {(graph.nodes[e.start].path, graph.nodes[e.end].path, e.src, e.dst) for e in graph.edges if e.start >= 0}


def test_values_flow_from_what_made_them(tmp_path):
    """Through casts, views and copies; after saving, too."""
    found = nc.explain(Queries(), (torch.randn(2, 4, 16),), under=torch.bfloat16)
    expected = {
        ("q_proj", "q_norm", "bf16", "bf16"), ("k_proj", "k_norm", "bf16", "bf16"),
        ("q_norm", "", "bf16", "bf16"), ("k_norm", "", "bf16", "bf16"), ("", "head", "bf16", "bf16"),
    }  # fmt: skip
    seen = {(a, b) for a, b, _, _ in arrows(found)}
    assert seen == {(a, b) for a, b, _, _ in expected}
    assert arrows(nc.load(found.save(tmp_path / "e.json"))) == arrows(found)


def test_the_nodes_have_what_was_recorded():
    """Each call once, with its format and its bytes; those of a module that is called twice are one."""
    layer = nn.Linear(8, 8)
    model = nn.Sequential(layer, nn.GELU(), layer, nn.Softmax(-1))
    found = nc.explain(model, (torch.randn(4, 8),), under=torch.bfloat16)
    nodes = document_of(found).graph.nodes
    assert [node.op for node in nodes] == ["aten.linear.default", "aten.gelu.default", "aten._softmax.default"]
    assert sum(node.bytes for node in nodes) == sum(tally.moved_bytes for tally in found.ledger.calls.values())


def test_without_fake_tensors_the_page_says_that_it_has_the_order_alone():
    """A real run keeps no memory alive to know what flows."""
    found = nc.explain(Queries(), (torch.randn(2, 4, 16),), under=torch.bfloat16, real=True)
    graph = document_of(found).graph
    assert not graph.flow and "not recorded" in graph.note


@pytest.mark.parametrize("has_bias", [True, False])
def test_every_cast_is_on_an_edge(has_bias):
    """Also of calls whose optional arguments are missing."""
    linear, conv = nn.Linear(8, 8, bias=has_bias), nn.Conv1d(2, 2, 3, bias=has_bias)
    model = nn.Sequential(linear, nn.Unflatten(1, (2, 4)), conv, nn.Softmax(-1))
    found = nc.explain(model, (torch.randn(3, 8),), under=torch.bfloat16)
    drawn = [(edge.argument, edge.src, edge.dst) for edge in document_of(found).graph.edges if edge.src != edge.dst]
    assert sorted(drawn) == sorted((cast.argument, cast.src, cast.dst) for cast in found.ledger.casts), str(found)
