"""Traces of runs and of graphs, and node data for Model Explorer."""

import json

import pytest
import torch

import narrowcast as nc
from narrowcast.core.ledger.identity import CallId
from narrowcast.errors import RegionError, RunError
from narrowcast.reports.render.trace import trace_text
from narrowcast.reports.results.run_records import CallRecord
from narrowcast.reports.results.saved import load


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = torch.nn.Linear(8, 8), torch.nn.LayerNorm(8)

    def forward(self, x):
        return self.norm(x + torch.relu(self.linear(x)))


def case():
    torch.manual_seed(0)
    model = torch.nn.Sequential(Block(), Block(), torch.nn.Linear(8, 4)).eval()
    return nc.Case(model, (torch.randn(4, 8),), name="two blocks")


def checked(text):
    """The slices of a trace, which is what its format asks: complete events on one track, each inside another or
    beside it.
    """
    data = json.loads(text)
    assert data["displayTimeUnit"] in ("ms", "ns") and isinstance(data["otherData"], dict)
    metadata = [event for event in data["traceEvents"] if event["ph"] == "M"]
    assert {event["name"] for event in metadata} == {"process_name", "thread_name"}
    assert all(isinstance(event["args"]["name"], str) for event in metadata)
    slices = [event for event in data["traceEvents"] if event["ph"] != "M"]
    around = []
    last = 0.0
    for event in slices:
        assert event["ph"] == "X" and isinstance(event["name"], str) and event["pid"] == event["tid"] == 1, event
        assert event["ts"] >= last and event["dur"] >= 0 and isinstance(event["args"], dict), event
        last, end = event["ts"], event["ts"] + event["dur"]
        while around and event["ts"] >= around[-1] - 1e-6 and not (event["dur"] == 0 and event["ts"] <= around[-1]):
            around.pop()
        assert not around or end <= around[-1] + 1e-6, event
        around.append(end)
    return slices


def test_a_trace_that_is_none_is_told():
    """Slices that overlap, and those that go back in time."""
    event = {"ph": "X", "name": "a", "pid": 1, "tid": 1, "args": {"name": "x"}}
    head = [{"ph": "M", "name": name, "args": {"name": "x"}} for name in ("process_name", "thread_name")]
    for times in (((0, 5), (3, 5)), ((4, 1), (0, 1)), ((0, -1),)):
        events = [*head, *({**event, "ts": ts, "dur": dur} for ts, dur in times)]
        with pytest.raises(AssertionError):
            checked(json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": {}}))


def test_modules_are_slices_around_their_calls_and_casts_are_slices_of_their_own():
    """In nanoseconds; a module that is called again is another slice."""
    linear = CallId("encoder.layer.0.query", "aten.linear.default")
    call = CallRecord(linear, "m.py", 3, "fp32", "bf16", "lower", "fast")
    again = CallRecord(CallId("encoder.layer.0.query", "aten.linear.default", module_call=2), "", 0, "", "")
    slices = checked(trace_text("m", [(call, 900, "measured", [("fp32", "bf16", 100)]), (again, 50, "x", [])]))
    found = [(event["name"], event["ts"], event["dur"]) for event in slices]
    assert found == [
        ("m", 0.0, 0.95), ("encoder", 0.0, 0.9), ("layer.0", 0.0, 0.9), ("query", 0.0, 0.9),
        ("cast fp32 -> bf16", 0.0, 0.1), ("linear bf16", 0.1, 0.8),
        ("encoder", 0.9, 0.05), ("layer.0", 0.9, 0.05), ("query", 0.9, 0.05), ("linear", 0.9, 0.05),
    ]  # fmt: skip
    assert slices[4]["cname"] != slices[5]["cname"] and slices[5]["args"]["line"] == "m.py:3"


def test_a_run_has_measured_times_if_they_were_asked_for(tmp_path):
    """Of each call and of the casts of its arguments; a file keeps them."""
    model, x = case().model, case().inputs[0]
    run = nc.capture(model, (x,), under="bf16", backward=True, times=True)
    assert len(run.elapsed_ns) == len(run.calls) and min(run.elapsed_ns) > 0
    slices = checked(run.to_trace())
    casts = [event for event in slices if event["cat"] == "cast"]
    forward = [event for event in casts if "backward" not in event["args"]["call"]]
    assert {event["name"] for event in forward} == {"cast fp32 -> bf16"} and len(forward) == 9
    assert {event["name"] for event in slices if event["cat"] == "forward"} >= {"linear bf16", "native_layer_norm fp32"}
    assert {event["args"]["time"] for event in slices if event["cat"] != "module"} == {"measured"}
    assert load(run.save(tmp_path / "run")).to_trace() == run.to_trace()
    plain = nc.capture(model, (x,), under="bf16")
    assert "elapsed_ns" not in plain.to_json()
    with pytest.raises(RunError, match="they were not timed"):
        plain.to_trace()


def test_an_explanation_has_measured_times_of_eager_code_and_predicted_ones_of_graphs():
    """And none without asking, or for a device that is not here."""
    with torch.no_grad():
        eager = nc.explain(case(), under="bf16", times=True)
        exported = nc.explain(case(), under="bf16", times=True, front_end="export")
        plain = nc.explain(case(), under="bf16")
        with pytest.raises(RegionError, match="the model is on cpu"):
            nc.explain(case(), device="cuda", times=True)
    for found, how in ((eager, "measured"), (exported, "predicted")):
        slices = [event for event in checked(found.to_trace()) if event["cat"] != "module"]
        assert all(event["args"]["time"].startswith(how) for event in slices)
        assert sum(event["name"] == "linear bf16" for event in slices) == 3
        assert sum(event["name"] == "cast fp32 -> bf16" for event in slices) == 9
    with pytest.raises(RunError, match="no times were asked for"):
        plain.to_trace()


def test_model_explorer_s_node_data_name_the_nodes_of_the_saved_program(tmp_path):
    """Its adapter makes one graph, `graph`, whose nodes have the names of the loaded program's."""
    with torch.no_grad():
        found = nc.explain(case(), under="bf16", front_end="export", run=True, times=True).to_model_explorer()
        torch.export.save(nc.export(*subject_of_export(), under="bf16"), tmp_path / "model.pt2")
    names = {node.name: node for node in torch.export.load(tmp_path / "model.pt2").graph_module.graph.nodes}
    assert list(found) == ["formats", "errors", "costs"]
    data = {name: json.loads(text)["graph"] for name, text in found.items()}
    for each in data.values():
        assert each["results"] and set(each["results"]) <= set(names)
    formats = {name: row["value"] for name, row in data["formats"]["results"].items()}
    linears = [name for name, node in names.items() if node.target is torch.ops.aten.linear.default]
    casts = [name for name, node in names.items() if node.target is torch.ops.aten._to_copy.default]
    assert len(linears) == 3 and {formats[name] for name in linears} == {"bf16"}
    assert len(casts) == 9 and {formats[name] for name in casts} == {"fp32 -> bf16"}
    assert all(isinstance(row["value"], float) for key in ("errors", "costs") for row in data[key]["results"].values())
    assert set(linears) <= set(data["errors"]["results"]) and set(casts) <= set(data["costs"]["results"])
    assert [item["stop"] for item in data["costs"]["gradient"]] == [0, 1]


def subject_of_export():
    made = case()
    return made.model, made.inputs


@pytest.mark.parametrize("asked", [{}, {"front_end": "export", "goal": nc.Goal.fast(verify=False)}])
def test_what_is_no_exported_program_has_no_node_data(asked):
    """Neither eager code nor a search for a fast policy leaves a graph whose nodes could carry the data."""
    with torch.no_grad(), pytest.raises(RunError, match="no node of an exported program"):
        nc.explain(case(), under="bf16", **asked).to_model_explorer()
