"""The page: what is on it, that what comes from users stays text, and that its script is the one of its sources."""

import base64
import hashlib
import json
import math
import re
import subprocess
import sys
import tomllib
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from page_results import (
    SCRIPT,
    a_comparison,
    a_failure,
    a_fit,
    a_ledger,
    a_run,
    all_results,
    differences,
    explained,
    not_finite,
    watching,
)
from program_text import parse_program

from narrowcast.analysis.explain.flow import graph_flow
from narrowcast.core.ledger.identity import CallId
from narrowcast.core.policy import Policy
from narrowcast.core.policy.text import rule_text
from narrowcast.errors import RunError
from narrowcast.reports.documents.model import OUTSIDE, Node
from narrowcast.reports.documents.of_results import document_of
from narrowcast.reports.documents.rules import call_rule, shared_modules
from narrowcast.reports.render.html import BUILT
from narrowcast.reports.results.findings import Watching
from narrowcast.reports.results.graphs import CompiledGraph
from narrowcast.reports.results.ledger import Ledger
from narrowcast.reports.results.run import Run
from narrowcast.reports.results.run_records import CallRecord, Histogram, TensorFacts
from narrowcast.reports.results.saved import load

ROOT = Path(__file__).parents[2]
WEB = ROOT / "web"
RESULTS = all_results()
LINEAR, SOFTMAX = "aten.linear.default", "aten.softmax.int"
each = pytest.mark.parametrize("name", RESULTS)


def page(result):
    return document_of(result)


class Elements(HTMLParser):
    """The elements of a text, as a browser reads them."""

    def __init__(self, text):
        super().__init__()
        self.found, self.scripts, self._in_script = [], [], False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        self._in_script = tag == "script"
        if self._in_script:
            self.scripts.append("")

    def handle_endtag(self, tag):
        self._in_script = False

    def handle_data(self, data):
        if self._in_script:
            self.scripts[-1] += data


@each
def test_the_data_of_each_page_is_json_and_each_row_has_its_columns(name):
    """Under a version of its own; without NaN, which is no JSON."""
    data = json.loads(json.dumps(page(RESULTS[name]).data(), allow_nan=False))
    assert data["schema"] == "narrowcast.page/1" and data["verdict"]
    graph = data["graph"]
    assert all(len(row) == len(graph["node_columns"]) for row in graph["nodes"])
    assert all(len(row) == len(graph["edge_columns"]) for row in graph["edges"])
    end = graph["edge_columns"].index("end")
    assert all(0 <= row[end] < len(graph["nodes"]) for row in graph["edges"])
    for table in data["tables"]:
        assert table["rows"] and all(len(row) == len(table["columns"]) for row in table["rows"]), table["name"]
        assert len(table["rules"]) in (0, len(table["rows"])), table["name"]
    for series in data["series"]:
        assert all(len(values) == len(series["xs"]) for _, values in series["lines"])


@each
def test_a_unit_is_a_field_and_stands_in_no_label(name):
    """Of figures, axes and columns: what shows them has not to read English, and no number of theirs is a text."""
    made = document_of(RESULTS[name])
    kinds = {"text", "number", "bytes", "ns", "decibels", "bits", "share", "error", "format", "op", "module", "line"}
    assert {f.unit for f in made.figures} <= {"", "bytes", "ns", "relative", "times fp32"}
    units = {"", "bytes", "ns", "relative", "multiplications", "whole", "percent"}
    assert {unit for s in made.series for unit in (s.x_unit, s.y_unit)} <= units
    assert {c.kind for t in made.tables for c in t.columns} <= kinds | {"call", "call_b"}
    labels = [f.name for f in made.figures] + [label for s in made.series for label in (s.x, s.y, *dict(s.lines))]
    labels += [c.name for t in made.tables for c in t.columns]
    assert not [label for label in labels if re.search(r"\b(ms|ns|us|dB|MiB|KiB)\b|%", label)]
    assert not [f for f in made.figures if isinstance(f.amount, str) and re.match(r"[-+]?\d", f.amount)]
    assert all(row["value"] and row["amount"] is not None for row in made.data()["figures"])


@each
def test_what_comes_from_a_user_is_never_markup(name):
    """A module named `<script>`: the file has the two scripts that it was made with, and notebooks have none."""
    made = Elements(RESULTS[name].to_html())
    assert len(made.scripts) == 2
    assert [tag for tag, _ in made.found if tag in ("b", "img", "iframe", "link")] == []
    assert json.loads(made.scripts[0])["schema"] == "narrowcast.page/1"
    small = Elements(RESULTS[name]._repr_html_())
    assert small.scripts == [] and "b" in {tag for tag, _ in small.found}
    assert "model</b>" not in RESULTS[name]._repr_html_()


@each
def test_the_page_needs_nothing_but_itself(name):
    """Its policy allows the one script and the one style that stand in it, by digest, and nothing from outside."""
    text = RESULTS[name].to_html()
    made = Elements(text)
    (policy,) = [a["content"] for tag, a in made.found if a.get("http-equiv") == "Content-Security-Policy"]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    digest = base64.b64encode(hashlib.sha256(made.scripts[1].encode()).digest()).decode()
    assert rules["script-src"] == f"'sha256-{digest}'"
    assert "unsafe" not in policy and "http" not in policy
    assert not [a for _, a in made.found if "src" in a or "href" in a or "style" in a or any(k[:2] == "on" for k in a)]


def test_a_changed_script_is_not_allowed_by_the_policy():
    """The digest above rejects one letter more."""
    text = RESULTS["ledger"].to_html()
    made = Elements(text.replace("</script>\n</body>", " </script>\n</body>"))
    digest = base64.b64encode(hashlib.sha256(made.scripts[1].encode()).digest()).decode()
    assert digest not in text


def digest_of(folder):
    """As web/build.mjs makes it."""
    files = [f"src/{file.name}" for file in (folder / "src").iterdir()]
    found = hashlib.sha256()
    for name in sorted([*files, "build.mjs", "package-lock.json", "package.json", "tsconfig.json"]):
        found.update(f"{name}\n".encode() + (folder / name).read_bytes())
    return found.hexdigest()


def test_the_built_files_are_what_the_sources_give():
    """`make page` writes them, with the digest of what they were built from."""
    for name in ("page.js", "page.css"):
        written = re.search(r"sources ([0-9a-f]{64})", (BUILT / name).read_text(encoding="utf-8")).group(1)
        assert written == digest_of(WEB), f"web/ has changed since {name} was built: make page"


def test_a_changed_source_is_noticed(tmp_path):
    """The check above rejects a source with one letter more."""
    (tmp_path / "src").mkdir()
    for file in [*WEB.glob("*.*"), *WEB.glob("src/*")]:
        if file.is_file():
            (tmp_path / file.relative_to(WEB)).write_bytes(file.read_bytes())
    assert digest_of(tmp_path) == digest_of(WEB)
    with (tmp_path / "src/words.ts").open("a") as source:
        source.write(" ")
    assert digest_of(tmp_path) != digest_of(WEB)


def test_the_bundle_brings_the_licences_of_what_is_in_it():
    """Of the three libraries, at the versions of the lock file."""
    text = (BUILT / "page.js").read_text(encoding="utf-8")
    lock = json.loads((WEB / "package-lock.json").read_text(encoding="utf-8"))["packages"]
    for name in ("uplot", "@dagrejs/dagre", "@dagrejs/graphlib"):
        assert f"{name} {lock[f'node_modules/{name}']['version']}" in text
    assert text.count("Permission is hereby granted") == 3 and "Leon Sorokin" in text and "Chris Pettitt" in text
    assert len(text) < 200_000


def nodes(result):
    graph = page(result).graph
    return graph.nodes, graph.edges


def test_a_ledger_has_a_node_for_each_kind_of_call_and_its_casts_from_outside():
    """Nobody recorded who made what was cast."""
    found, edges = nodes(a_ledger(2))
    assert [(n.path, n.computes) for n in found[:3]] == [
        ("encoder.layer.0.dense", "bf16"), ("encoder.layer.0", "fp32"), ("encoder.layer.0", "fp32"),
    ]  # fmt: skip
    assert len(found) == 7 and not page(a_ledger()).graph.flow
    assert {e.start for e in edges} == {OUTSIDE}
    assert [(e.end, e.argument, e.src, e.dst, e.bytes) for e in edges[:3]] == [
        (0, "weight", "fp32", "bf16", 600), (0, "input", "fp32", "bf16", 900), (1, "self", "bf16", "fp32", 5000),
    ]  # fmt: skip


def test_a_ledger_whose_casts_are_only_counted_shows_how_many_there_were(monkeypatch):
    """As many on edges and in the table as were made."""
    monkeypatch.setattr("narrowcast.reports.results.ledger.LISTED", 2)
    ledger = a_ledger(3)
    assert ledger.counted
    made = page(ledger)
    assert sum(e.times for e in made.graph.edges) == ledger.totals().casts == 9
    (casts,) = [table for table in made.tables if table.name == "casts"]
    assert sum(row[8] for row in casts.rows) == 9


def test_a_ledger_says_what_is_worth_doing_with_the_rule():
    """Its own advice first; then the norm whose casts move most. A softmax is in fp32 for its error."""
    first, again = page(a_ledger()).todos
    assert first.what == "open a region"
    assert "2 casts" in again.why and "1.8 KiB" in again.why
    ledger = Ledger()
    for cast in a_ledger().casts:
        ledger.add(replace(cast, op=cast.op.replace("softmax.int", "layer_norm.default")))
    [*_, most] = page(ledger).todos
    assert most.rule == {"op": "aten.layer_norm.default", "action": "follow", "reason": "no casts to fp32"}


def test_no_advice_is_against_a_rule_of_the_users_own():
    """A list has a source; what a user's rule asks for is wanted."""
    ledger = Ledger()
    for cast in a_ledger().casts:
        ledger.add(replace(cast, source=""))
    assert not [todo for todo in page(ledger).todos if todo.rule]


def test_a_run_shows_what_flows_through_views_and_which_tensors_were_cast():
    """A view has another number in the table of tensors, and the same values."""
    found, edges = nodes(a_run())
    assert [n.op for n in found] == ["aten.linear.default", "aten.add.Tensor"] * 2  # and no call without floats
    flow = [(e.start, e.end, e.argument, e.src, e.dst, e.kind) for e in edges]
    assert flow == [
        (OUTSIDE, 0, "input", "fp32", "bf16", "input"), (OUTSIDE, 0, "weight", "fp32", "bf16", "weight"),
        (0, 1, "self", "bf16", "bf16", "activation"), (1, 2, "input", "bf16", "bf16", "activation"),
        (OUTSIDE, 2, "weight", "fp32", "bf16", "weight"), (2, 3, "self", "bf16", "bf16", "activation"),
    ]  # fmt: skip
    assert edges[0].bytes == 16 * 4 + 16 * 2


def test_a_run_s_call_that_is_not_finite_is_a_finding():
    """And whether its inputs were finite."""
    found, _ = nodes(a_run())
    assert [n.finding for n in found] == ["", "", "", "result is not finite, and its inputs are"]
    made = page(a_run())
    assert made.tone == "bad" and made.todos[0].rule["module"] == "layer.1"
    assert next((e.node, e.first, e.counts) for e in made.exponents) == (0, -4, [1, 5, 9, 2])


def test_a_cast_that_is_a_call_is_on_the_edge_of_who_reads_it():
    """The run's own casts are no nodes."""
    run = a_run(1)
    cast = run.calls[1]
    run.calls[1] = type(cast)(cast.id, cast.file, 7, "", "", inputs=cast.inputs, outputs=cast.outputs, is_cast=True)
    reader = type(cast)(cast.id, cast.file, 7, "bf16", "bf16", inputs=cast.outputs, outputs=(("result", 0),))
    run.calls.append(reader)
    found, edges = nodes(run)
    assert len(found) == 2 and (edges[-1].start, edges[-1].end) == (0, 1)


def test_a_comparison_shows_errors_by_depth_and_keeps_the_fault_in_fp32():
    """The call at fault is the finding and the first thing to do."""
    made = page(differences())
    assert [n.finding for n in made.graph.nodes] == ["", "", f"beyond its band {SCRIPT}"]
    assert made.todos[0].rule["module"] == "layer.1" and made.todos[0].rule["action"] == "full"
    (series,) = made.series
    assert series.lines[0] == ("local", [None, 2e-3, 0.5]) and series.nodes == [0, 1, 2]
    assert {t.name for t in made.tables} >= {
        "findings",
        "errors",
        "ops",
        "modules",
        "outputs",
        "gradients",
        "unmatched",
    }


def test_a_call_that_passed_on_what_is_not_finite_is_not_to_blame():
    """The one that made it is; so say the verdict and what is worth doing."""
    found = not_finite()
    found.rows[2] = replace(found.rows[2], verdict="not finite", why="alone, it gives NaN", local=math.nan)
    late = replace(found.rows[2], id=CallId("head", "aten.mm.default"), verdict="passed on", local=0.1)
    found.rows.append(late)
    made = page(found)
    assert [bool(n.finding) for n in made.graph.nodes] == [False, False, True, False]
    assert [todo.path for todo in made.todos] == ["layer.1"]
    assert made.verdict.startswith("Not finite: output error ")
    assert "; first infinity in the fp16 result of aten.linear in layer.1" in made.verdict


def test_a_watch_shows_its_findings_and_the_figures_over_steps():
    """A trend is no NaN."""
    made = page(watching())
    assert made.verdict == "1 call made a NaN or an infinity; 5 later calls passed it on" and len(made.graph.nodes) == 2
    assert (
        made.todos[0].what == "Keep aten.mul.Tensor in layer.1 in fp32"
        and made.todos[0].rule["op"] == "aten.mul.Tensor"
    )
    largest, smallest, scale = made.series[0].lines
    assert largest == ("largest gradient", [0.5, 0.25]) and scale == ("loss scale", [1024.0, 1024.0])
    assert smallest == ("smallest rms of a parameter's", [0.1, 0.05])
    assert made.series[1].lines == [("forward", [8.0, 16.0]), ("the largest of fp16", [65504.0, 65504.0])]
    (figure,) = [figure for figure in made.figures if figure.name == "largest |x| in fp16, forward"]
    assert (figure.amount, figure.detail) == (16.0, "of 65504, by layer.0 aten.linear.default #1")
    assert [bar.parts for bar in made.bars] == [(("fp32", 60), ("fp16", 30))]
    (gradients,) = [table for table in made.tables if table.name == "gradients"]
    assert gradients.rows == [["layer.0.weight", 0.25, 0.05, 0.25]] and "step 2" in gradients.title
    assert page(all_results()["empty watching"]).tone == "good"


def test_a_fit_gives_each_call_the_first_format_that_it_fits():
    """1e6 is beyond fp16, not beyond bf16."""
    made = page(a_fit())
    assert [n.computes for n in made.graph.nodes] == ["fp16", "bf16"]
    keep, first = made.todos
    assert "headroom.policy('fp16')" in keep.why
    assert first.path == "b" and first.why == "result does not fit fp16: 100% of it overflows, by 3.9 bits"
    (table,) = [table for table in made.tables if table.name == "headroom"]
    assert [row[:5] for row in table.rows][-1] == ["b", 1, "aten.add.Tensor", "#1", "result"]
    assert table.rows[-1][6:] == [1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0]


def test_a_fit_has_one_row_for_layers_that_are_alike_with_the_worst_of_them():
    """What does not fit is folded only where one rule is about all of them and nothing else."""
    facts = [
        TensorFacts("fp32", (2,), "cpu", 2, -top, top, exponents=Histogram(0, (2,)), inspected=2)
        for top in (1.0, 8.0, 1e6)
    ]
    large = replace(facts[2], exponents=Histogram(19, (2,)))

    def rows(tensors, paths):
        calls = [
            CallRecord(CallId(path, "aten.add.Tensor"), "", 0, "fp32", "fp32", outputs=(("result", n),))
            for n, path in enumerate(paths)
        ]
        (table,) = [table for table in page(Run({}, calls, tensors).headroom()).tables if table.name == "headroom"]
        return [(row[0], row[1]) for row in table.rows], [rule.get("module", "") for rule in table.rules]

    stack = ("h.0.mlp", "h.1.mlp")
    assert rows([facts[0], facts[1]], stack) == ([("h.1.mlp", 2)], ["h.*.mlp"])
    assert rows([large, facts[1]], stack) == ([("h.0.mlp", 2)], ["h.*.mlp"])
    others = (*stack, "h.0.x.mlp")  # the glob means this one, too
    assert rows([facts[0], facts[1], facts[0]], others) == ([("h.1.mlp", 2), ("h.0.x.mlp", 1)], ["", "h.0.x.mlp"])
    assert rows([large, facts[1], facts[0]], others)[0] == [("h.0.mlp", 1), ("h.1.mlp", 1), ("h.0.x.mlp", 1)]


def test_an_explanation_says_first_what_raises_then_what_is_at_fault_then_what_costs():
    """Each with what does it."""
    failed = page(explained(failure=a_failure()))
    assert failed.tone == "bad" and failed.todos[0].what == 'Use policy="safe", which runs it.'
    compared = page(explained(comparison=a_comparison()))
    assert compared.todos[0].rule["module"] == "layer.1"
    assert "2.00 times the time" in compared.verdict
    assert {f.name: f.value for f in compared.figures}["accuracy"] == "0.25"
    alone = page(explained(ledger=type(a_ledger())()))
    assert "explain --run" in alone.todos[0].what


BEFORE = """
program forward
region 0: cpu bf16 enabled cached session 0 policy -
block main(%0: fp32[2, 4] cpu, %1: fp32[8, 4] cpu weight) {
  %2: bf16[2, 8] cpu = aten.linear.default(input=%0, weight=%1) computes in 0 #1 at 0: layer, model.py:3
  %3: bf16[8, 2] cpu = aten.t.default(self=%2) ~0 in 0 #1 at 0: layer, model.py:3
  %4: bf16[8, 2] cpu = aten.relu.default(self=%3) computes in 0 #1 at 0: layer, model.py:3
  return %4
}
site 0: {"file": "model.py", "line": 3, "module_path": "layer"}
"""
AFTER = BEFORE.replace(
    "  %2: bf16[2, 8] cpu = aten.linear.default(input=%0, weight=%1)",
    "  %5: bf16[2, 4] cpu = cast(self=%0) in 0 #1 at 0: layer, model.py:3\n"
    "  %6: bf16[8, 4] cpu = cast(self=%1) in 0 #1 at 0: layer, model.py:3\n"
    "  %2: bf16[2, 8] cpu = aten.linear.default(input=%5, weight=%6)",
)


def test_a_graph_flows_through_casts_and_views():
    """Which are no steps of their own."""
    graph = CompiledGraph(0, before=parse_program(BEFORE.lstrip()), after=parse_program(AFTER.lstrip()))
    flow = graph_flow(graph)
    assert [(row[1], row[6], row[7], row[8]) for row in flow.steps] == [
        ("aten.linear.default", "fp32", "bf16", "bf16"), ("aten.relu.default", "bf16", "bf16", "bf16"),
    ]  # fmt: skip
    assert [list(edge) for edge in flow.edges] == [
        [OUTSIDE, 0, "input", "fp32", "bf16", 48, "input", "copied", "[2, 4]"],
        [OUTSIDE, 0, "weight", "fp32", "bf16", 192, "weight", "copied", "[8, 4]"],
        [0, 1, "self", "bf16", "bf16", 32, "activation", "", "[8, 2]"],
    ]
    nothing = graph_flow(CompiledGraph(1))
    assert nothing.steps == nothing.edges == []
    made = page(explained(graphs=(graph,), front_end="compile")).graph
    assert made.flow and [(e.start, e.end) for e in made.edges] == [(OUTSIDE, 0), (OUTSIDE, 0), (0, 1)]


def test_nothing_of_the_page_is_imported_before_one_is_made():
    """A program that shows none does not pay for it."""
    code = "import sys, narrowcast; print([n for n in sys.modules if n.startswith('narrowcast.reports.')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_rules_of_a_page_are_those_of_a_policy_file(tmp_path):
    """Whatever a module is called."""
    name = 'a"b\\c\n<script>'
    text = rule_text({"op": "aten.linear.default", "module": name, "action": "full", "reason": "tab\t"})
    assert tomllib.loads(text)["rule"][0]["module"] == name
    todos = [todo for result in RESULTS.values() for todo in page(result).todos if todo.rule]
    assert len(todos) > 5
    for todo in todos:
        file = tmp_path / "p.toml"
        file.write_text(f'name = "p"\nextends = "native"\n{rule_text(todo.rule)}\n')
        assert Policy.load(file).rules


def test_other_files_and_broken_records_have_no_page(tmp_path):
    """With what is wrong."""
    (tmp_path / "other.json").write_text('{"schema": "narrowcast.profile/0"}')
    with pytest.raises(RunError, match=r"narrowcast\.profile/0., which this version does not know"):
        load(tmp_path / "other.json")
    (tmp_path / "run.json").write_text(json.dumps({**RESULTS["run"].data(), "calls": [["one", "two"]]}))
    with pytest.raises(RunError, match="a record is broken"):
        load(tmp_path / "run.json")


def test_modules_share_a_rule_where_a_glob_stands_for_these_calls_alone():
    """Not for a call besides, nor where rules of several actions are about the op. Casts and modules have none."""
    paths = [f"layers.{n}.up" for n in range(3)]
    rules = [call_rule(LINEAR, path, "full") for path in paths]
    shared = [(LINEAR, "layers.*.up")]
    nodes = [Node(path, LINEAR) for path in paths]
    assert shared_modules(rules, nodes) == shared and not shared_modules(rules[:1], nodes)
    assert not shared_modules(rules, [*nodes, Node("layers.3.up", LINEAR)])
    assert not shared_modules(rules, [*nodes, Node("layers.0.up.inner", LINEAR)])
    assert shared_modules(rules, [*nodes, Node("layers.3.up", SOFTMAX)]) == shared
    assert not shared_modules([*rules, call_rule(LINEAR, "head", "follow")], nodes)
    assert not call_rule("aten._to_copy.default", "a", "full") and not call_rule("module.call.default", "a", "follow")


def test_a_watch_that_could_not_look_is_no_good_news():
    """Neither as text nor as a page."""
    found = Watching(calls=3, not_inspected=2)
    made = document_of(found)
    assert made.tone == "" and "inspecting failed 2 times" in made.verdict and "inspecting failed 2 times" in str(found)


def test_infinities_that_were_filled_in_are_no_finding():
    """A mask: the page says what the text says, and lists no call for them."""
    run = Run(calls=[replace(call, given=(("value", "-inf"),)) for call in a_run().calls], tensors=a_run().tensors)
    run.tensors = [replace(facts, nan=0.0, infinite=0.25 if n else 0.0) for n, facts in enumerate(run.tensors)]
    run.calls = [replace(call, inputs=(("input", 0),)) for call in run.calls]
    made = document_of(run)
    assert made.tone == "good" and "fill masks" in made.verdict and "fill masks" in " ".join(str(run).split())
    assert not any(node.finding for node in made.graph.nodes) and not made.todos
