"""Every result is saved by one codec, and read again by one function."""

import ast
import html
import json
import re
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest

import narrowcast as nc
from narrowcast.core.ledger import Advice
from narrowcast.core.ledger.identity import CallId
from narrowcast.core.policy import Rule, Site
from narrowcast.errors import RunError
from narrowcast.formats import FORMATS
from narrowcast.programs.placement.place import PlacedCall
from narrowcast.reports.documents.model import Todo
from narrowcast.reports.documents.of_results import document_of
from narrowcast.reports.results import codec
from narrowcast.reports.results.codec import of_data, to_data
from narrowcast.reports.results.differences import CallError
from narrowcast.reports.results.result import Result
from narrowcast.reports.results.saved import KINDS, load, parse
from narrowcast.reports.results.scaler_history import History, ScaledStep
from narrowcast.reports.results.training import TrainingCheck
from narrowcast.reports.results.verdicts import VERDICTS

sys.path.insert(0, str(Path(__file__).parent))

import page_results

REPORTS = Path(nc.__file__).parent / "reports"


def a_check():
    """Of a loop in which two things are wrong, one of them twice."""
    advice = [Advice("a loss that is not scaled", f"what {n}", "scale it", "", "train.py", n) for n in (3, 4)]
    return TrainingCheck({advice[0]: 2, advice[1]: 1}, 3, {"inside": 4}, ["a note"])


def a_history():
    """Of three steps, one of them skipped."""
    found = History()
    for row in (ScaledStep(1, 4.0, False), ScaledStep(2, 4.0, True, "infinite", "", ("w",)), ScaledStep(3, 2.0, False)):
        found.add(row)
    return found


RESULTS = {
    **{name: made for name, made in page_results.all_results().items() if isinstance(made, Result)},
    "training": a_check(),
    "history": a_history(),
}


def test_every_kind_is_here():
    """So that the tests below are about all of them."""
    assert {type(made) for made in RESULTS.values()} == set(KINDS.values())


@pytest.mark.parametrize("name", RESULTS)
def test_what_is_read_is_what_was_saved(name, tmp_path):
    """But for what is live; its texts and its page say the same, and so does what is saved again."""
    made = RESULTS[name]
    read = load(made.save(tmp_path / "result.json"))
    assert type(read) is type(made)
    assert json.loads(read.to_json()) == json.loads(made.to_json())
    assert read.verdict == made.verdict
    live = {field.name for field in fields(made) if not field.compare}
    assert live <= {"compared_runs", "timed", "path"}
    if name != "pair":  # its page shows both runs
        assert document_of(read).data() == document_of(made).data()
    for every in (False, True):
        assert read.to_text(every=every) == made.to_text(every=every)


@pytest.mark.parametrize("name", RESULTS)
def test_it_is_equal_to_what_was_saved(name):
    """Field by field, as equality has it. NaN equals nothing: what holds one is compared as text."""
    made = RESULTS[name]
    read = parse(made.to_json())
    for field in fields(made):
        before, after = getattr(made, field.name), getattr(read, field.name)
        assert not field.compare or after == before or repr(after) == repr(before), field.name


@pytest.mark.parametrize("name", RESULTS)
def test_the_verdict_is_one_of_a_closed_list(name):
    """Which a test in CI may compare."""
    assert RESULTS[name].verdict in VERDICTS


def flat(text):
    """A text as one line: a screen ends lines between words."""
    return " ".join(text.split()).lower()


def texts_in(value):
    """All texts in JSON data."""
    if isinstance(value, str):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for part in inner for text in texts_in(part)]


def unsaid(made, document):
    """What of a document's verdict and todos its text, page or notebook cell lack."""
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', made.to_html(), re.S)[1]
    says = {
        "text": flat(made.to_text(every=True, width=400)),
        "notebook": flat(html.unescape(re.sub(r"<[^>]+>", "", made._repr_html_()))),
        "page": flat(" ".join(texts_in(json.loads(data)))),
    }
    wanted = [document.verdict.rstrip("."), *(todo.what.rstrip(".") for todo in document.todos)]
    return [(where, words) for where, said in says.items() for words in wanted if flat(words) not in said]


@pytest.mark.parametrize("name", RESULTS)
def test_text_page_and_notebook_say_the_same_verdict_and_todos(name):
    """They are made of one document."""
    assert unsaid(RESULTS[name], document_of(RESULTS[name])) == []


@pytest.mark.parametrize("name", RESULTS)
def test_another_verdict_or_todo_would_be_seen(name):
    """What the test above compares fails for a document that says something else."""
    document = document_of(RESULTS[name])
    other = replace(
        document, verdict=f"another {document.verdict}", todos=[*document.todos, Todo("Do as you like", "why not")]
    )
    assert {where for where, _ in unsaid(RESULTS[name], other)} == {"text", "page", "notebook"}


@pytest.mark.parametrize("name", RESULTS)
def test_at_a_prompt_it_is_one_short_line(name):
    """Where a prompt or a notebook shows its repr."""
    assert len(repr(RESULTS[name])) < 100 and "\n" not in repr(RESULTS[name])


@pytest.mark.parametrize("name", RESULTS)
def test_a_file_that_lacks_a_field_is_refused(name):
    """With its name; an empty result would be good news."""
    data = json.loads(RESULTS[name].to_json())
    with pytest.raises(RunError, match="lacks"):
        parse(json.dumps({"schema": data["schema"]}))


@pytest.mark.parametrize("value", [None, 3, "text", [[]], {"a": {}}, [None], [{"id": 3}]])
@pytest.mark.parametrize("name", RESULTS)
def test_hostile_values_raise_a_run_error_or_are_read(name, value):
    """Whatever stands in a field: no other error, and nothing that prints with one."""
    data = json.loads(RESULTS[name].to_json())
    for key in data:
        if key != "schema":
            try:
                read = parse(json.dumps({**data, key: value}))
            except RunError:
                continue
            assert isinstance(read, Result)


def test_another_kind_than_was_asked_for_is_refused(tmp_path):
    """By what it is."""
    RESULTS["fit"].save(tmp_path / "fit.json")
    with pytest.raises(RunError, match="it holds headroom"):
        nc.load(tmp_path / "fit.json", nc.Run)


UNTYPED = re.compile(r"(dict|Mapping|MutableMapping)\[str, (Any|object)\]")


def mappings_of_anything(code):
    """The lines in which a mapping of anything is asked for by type, or the environment of a run by string."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Subscript) and UNTYPED.fullmatch(ast.unparse(node)):
            yield node.lineno


def test_documents_and_what_renders_them_read_no_mapping_of_anything():
    """They read fields of results; but for what writes a file of another program, and the page's data."""
    writers = {"model.py", "trace.py", "model_explorer.py"}
    files = [*(REPORTS / "documents").glob("*.py"), *(REPORTS / "render").glob("*.py")]
    found = {(f.name, line) for f in files if f.name not in writers for line in mappings_of_anything(f.read_text())}
    assert not found


def json_made(code):
    """The lines in which JSON is made or read, by whatever name json has."""
    tree = ast.parse(code)
    names = {alias.asname or alias.name for node in ast.walk(tree) if isinstance(node, ast.Import)
             for alias in node.names if alias.name == "json"}  # fmt: skip
    for node in ast.walk(tree):
        is_from = isinstance(node, ast.ImportFrom) and node.module == "json"
        if is_from or (isinstance(node, ast.Attribute) and ast.unparse(node.value) in names):
            yield node.lineno


def test_results_are_written_by_the_codec_alone():
    """No other file of theirs makes JSON, but for the base; runs, whose tables are rows; and profiles, whose files
    several processes write.
    """
    allowed = {"result.py", "run.py", "saved.py", "profile.py"}
    found = {file.name for file in (REPORTS / "results").glob("*.py") if list(json_made(file.read_text()))}
    assert found <= allowed


@pytest.mark.parametrize(
    ("checker", "code"),
    [
        (mappings_of_anything, "def f(x: Mapping[str, object]) -> None: ..."),
        (mappings_of_anything, "rows: list[dict[str, Any]] = []"),
        (json_made, "import json\njson.dumps({})"),
        (json_made, "import json as j\nj.loads('{}')"),
        (json_made, "from json import dumps\ndumps({})"),
    ],
)
def test_the_checkers_see_what_they_are_for(checker, code):
    """Else the two above cannot fail."""
    assert list(checker(code))


def test_numbers_and_identities_are_written_as_json_has_them():
    """Infinities as text, a call that is none as nothing; and read as what they were."""
    found = CallError(CallId("a", "aten.mm.default"), "m.py", 3, "bf16", "fp32", "round-off", local=float("inf"))
    rows = found, replace(found, forward=CallId("a", "aten.linear.default", 2), local=0.25)
    written = [codec.to_data(row) for row in rows]
    assert [(row["local"], row["forward"]) for row in written] == [("inf", ""), (0.25, "a aten.linear.default #2")]
    assert [repr(codec.of_data(CallError, row)) for row in written] == list(map(repr, rows))  # NaN equals nothing


@pytest.mark.parametrize("shape", [None, (2, 3)])
def test_a_placed_call_is_read_as_it_was(shape):
    """With the format of the policy first, of which the chosen one may be another."""
    site, formats = Site("a", file="m.py", line=3), (FORMATS["bf16"], FORMATS["fp32"])
    call = PlacedCall(4, "aten.mm.default", site, shape, formats, (5.0, 7.0), FORMATS["fp32"])
    row = codec.to_data(call)
    assert (row["policy"], row["chosen"], row["shape"]) == ("bf16", "fp32", shape)
    assert codec.of_data(PlacedCall, json.loads(json.dumps(row))) == call


def test_a_rule_is_saved_with_all_that_it_says():
    """By the keys of a policy file; one that an older file writes as null is not given."""
    place = {"module": "a", "module_class": "B", "function": "f", "argument": "self"}
    rule = Rule("aten.mm", "to(fp16)", **place, reason="why", source="who", override=True, torch=">=2.11")
    row = to_data(rule)
    assert "call" not in row and of_data(Rule, row) == rule
    again = of_data(Rule, row | {"call": None, "origin": "elsewhere"})
    assert again == rule and again.reason == "why" and again.origin is None
