"""Snapshots of formats: their text, what is refused, what changed; and whether two runs agree."""

import json

import pytest

from narrowcast.core.ledger import CallKind, Cast
from narrowcast.core.ledger.identity import CallId
from narrowcast.core.policy import Policy
from narrowcast.errors import SnapshotError
from narrowcast.reports.results.explanation import Explanation
from narrowcast.reports.results.ledger import Ledger
from narrowcast.testing.agreement import RanCall, compare_calls, disagreement_lines
from narrowcast.testing.snapshot import CallFormats, Found, Snapshot, Snapshots, check_versions, holds_for, snapshot_of
from narrowcast.testing.snapshot_changes import SHOWN, check_text, compare_snapshots, unmet, unmet_text
from narrowcast.testing.snapshot_text import call_text, load_snapshots, parse_snapshots, save_snapshots, snapshots_text

TORCH = "2.13.0+cpu"
LOW = ("fp32", "bf16", "bf16", "lower")
HIGH = ("fp32", "fp32", "fp32", "full")
AS_IS = ("bf16", "bf16", "bf16", "no rule")


def call(text, formats=LOW, casts=("input", "weight"), times=1, found=None):
    return CallFormats(CallId.parse(text), *formats, casts if formats is LOW else (), times, found)


CALLS = (
    call("encoder.0 aten.linear.default #1"),
    call("encoder.0 aten.gelu.default #1", AS_IS),
    call("encoder.1 aten.linear.default #1"),
    call("encoder.1 aten.gelu.default #1", AS_IS),
    call("aten.mm.default #1", LOW, ("mat2",), 3),
)


def snapshot(*calls, **facts):
    known = {
        "device_type": "cpu", "model": "a net (2 M)", "policy": "my own", "digest": "0123abcd", "low": "bf16",
        "torch": "2.13", "gradients": False, "file": "formats.txt",
    }  # fmt: skip
    return Snapshot(calls=calls or CALLS, **(known | facts))


def text_of(*sections):
    return snapshots_text(Snapshots(sections))


# -- text --------------------------------------------------------------------------------------------------------------


def test_a_file_has_a_section_for_each_device_and_a_line_for_each_call():
    """The whole text: the schema, what a section holds for, and its calls in order with their casts."""
    text = text_of(snapshot())
    assert text == (
        "narrowcast.formats/1\n"
        "# call | input dtypes -> compute dtypes -> output dtypes | what decided: the arguments that are cast\n"
        "\n"
        "device cpu\n"
        "model a net (2 M)\n"
        "policy my own 0123abcd\n"
        "low bf16\n"
        "torch 2.13\n"
        "gradients off\n"
        "calls 5\n"
        "\n"
        "encoder.0 aten.linear.default #1 | fp32 -> bf16 -> bf16 | lower: input, weight\n"
        "encoder.0 aten.gelu.default #1 | bf16 -> bf16 -> bf16 | no rule\n"
        "encoder.1 aten.linear.default #1 | fp32 -> bf16 -> bf16 | lower: input, weight\n"
        "encoder.1 aten.gelu.default #1 | bf16 -> bf16 -> bf16 | no rule\n"
        "aten.mm.default #1 | fp32 -> bf16 -> bf16 | lower: mat2 | 3 times\n"
    )


def test_what_is_written_is_read_as_it_was():
    """Several sections; formats of several arguments, of none; actions with a format; turns and directions."""
    odd = (
        call("a b aten.cat.default #2 module call 3 backward", ("bf16,fp32", "fp32", "fp32", "promote")),
        call("aten.arange.default #1", ("", "", "fp32", "no rule")),
        call("head aten.mm.default #1", ("e4m3fn", "fp16", "fp16", "to(fp16)")),
    )
    sections = (snapshot(), snapshot(*odd, device_type="cuda", torch=">=2.11,<2.16", gradients=True))
    read = parse_snapshots(text_of(*sections), "formats.txt")
    assert [s.calls for s in read.sections] == [CALLS, odd]
    assert snapshots_text(read) == text_of(*sections)
    assert read.sections[1].gradients and read.sections[0].policy == "my own"
    lines = text_of(*sections).splitlines()
    assert all(lines[c.line - 1] == call_text(c) for s in read.sections for c in s.calls)


def test_a_file_is_written_at_once_and_read_back(tmp_path):
    """Missing folders are created, no temporary file stays, and a write that fails changes nothing."""
    path = tmp_path / "formats" / "net.txt"
    save_snapshots(Snapshots((snapshot(),)), path)
    assert load_snapshots(path).sections[0].calls == CALLS
    assert [p.name for p in path.parent.iterdir()] == ["net.txt"]
    with pytest.raises(SnapshotError, match="nothing was changed"):
        save_snapshots(Snapshots(), path / "below" / "a file")


@pytest.mark.parametrize(
    ("old", "new", "line", "says"),
    [
        ("narrowcast.formats/1", "", 1, "empty"),
        ("narrowcast.formats/1", "narrowcast.formats/2", 1, "schema 'narrowcast.formats/2'"),
        ("narrowcast.formats/1", "PK\x03\x04", 1, "begins with"),
        ("model a net (2 M)", "model", 5, "`model` says nothing"),
        ("low bf16\n", "", 4, "lacks: low"),
        ("low bf16\n", "low bf16\nlow fp16\n", 8, "`low` is twice"),
        ("low bf16\n", "height 3\n", 7, "neither a call"),
        ("device cpu\n", "", 4, "before the first line `device"),
        ("gradients off", "gradients maybe", 4, "'maybe'"),
        ("torch 2.13", "torch newest", 4, "not a range of versions"),
        ("calls 5", "calls 6", 4, "says calls 6 and has 5"),
        ("aten.mm.default #1 | fp32 -> bf16 -> bf16 | lower: mat2 | 3 times\n", "", 4, "cut off"),
        ("lower: mat2 | 3 times", "lower: mat2 | 0 times", 16, "not of the form"),
        ("#1 | fp32 -> bf16 -> bf16 | lower: mat2", "#1 | fp32 -> bf16 | lower: mat2", 16, "not of the form"),
        ("#1 | fp32 -> bf16 -> bf16 | lower: mat2", "#1 | fp32 -> bf61 -> bf16 | lower: mat2", 16, "'bf61' is no form"),
        ("aten.mm.default #1", "aten.mm.default", 16, "is no call"),
        ("encoder.1 aten.linear.default", "encoder.0 aten.linear.default", 14, "and on line 12"),
        ("encoder.1 aten.gelu", "<<<<<<< HEAD\nencoder.1 aten.gelu", 15, "a merge was not resolved"),
    ],
)  # fmt: skip
def test_a_broken_file_is_refused_with_the_line_and_what_is_wrong(old, new, line, says):
    """Wrong headers, truncation, repeated calls and merge conflicts are reported at their line with advice."""
    text = text_of(snapshot())
    broken = text.replace(old, new, 1) if new or old != "narrowcast.formats/1" else ""
    assert broken != text
    with pytest.raises(SnapshotError, match=r"formats\.txt") as caught:
        parse_snapshots(broken, "formats.txt")
    assert says in caught.value.found and caught.value.where[0].line == line and caught.value.advice


def test_a_file_that_is_missing_or_no_text_is_refused(tmp_path):
    """A missing file is reported with the command that writes it, and a binary one as no text."""
    with pytest.raises(SnapshotError, match="Write it once with pytest --narrowcast-update"):
        load_snapshots(tmp_path / "none.txt")
    (tmp_path / "model.bin").write_bytes(b"\x80\x04\x95")
    with pytest.raises(SnapshotError, match="it is not text"):
        load_snapshots(tmp_path / "model.bin")


# -- versions of torch, devices ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("versions", "torch", "holds"),
    [
        ("2.13", "2.13.1+cu130", True), ("2.13", "2.1.3", False), ("2.13 or 2.15", "2.15.0", True),
        (">=2.11,<2.16", "2.15.0.dev20260101", True), (">=2.11,<2.13", "2.13.0", False),
    ],
)  # fmt: skip
def test_versions_of_torch(versions, torch, holds):
    """A single version holds for its patch releases and builds, and the upper end of a range is excluded."""
    assert holds_for(versions, torch) is holds


def test_a_section_is_found_by_its_device_and_torch():
    """If none matches, the error lists those that there are; if two match, that is an error as well."""
    cuda, newer = snapshot(device_type="cuda", torch="2.13 or 2.14"), snapshot(torch=">=2.14")
    kept = Snapshots((snapshot(), cuda, newer), "formats.txt")
    assert kept.of("cpu", TORCH) is kept.sections[0] and kept.needed("cpu", "2.15.0") is newer
    with pytest.raises(SnapshotError, match=r"holds cpu with torch 2.13, cuda with torch 2.13 or 2.14, cpu with"):
        kept.needed("cuda", "2.15.0")
    with pytest.raises(SnapshotError, match=r"2 sections of formats\.txt hold"):
        Snapshots((snapshot(), snapshot(torch=">=2.11")), "formats.txt").of("cpu", TORCH)


def test_a_run_under_another_torch_is_put_with_what_is_equal():
    """And stands alone where it differs: what another version has was not looked at."""
    kept = Snapshots((snapshot(device_type="cuda"),)).with_section(snapshot(torch="?"), TORCH)
    assert [(s.device_type, s.torch) for s in kept.sections] == [("cpu", "2.13"), ("cuda", "2.13")]
    both = kept.with_section(snapshot(torch="?"), "2.15.0")
    assert [s.torch for s in both.sections] == ["2.13 or 2.15", "2.13"]
    assert both.with_section(snapshot(torch="?"), "2.15.0") == both
    other = both.with_section(snapshot(*CALLS[:1], torch="?"), TORCH)
    assert [(s.torch, len(s.calls)) for s in other.sections if s.device_type == "cpu"] == [("2.13", 1), ("2.15", 5)]
    again = other.with_section(snapshot(*CALLS[:1], torch="?"), "2.15.0")
    assert [(s.torch, len(s.calls)) for s in again.sections if s.device_type == "cpu"] == [("2.13 or 2.15", 1)]


def test_a_range_that_is_given_replaces_what_is_in_it():
    """It outlives later updates from inside the range, and has to include the torch that runs."""
    kept = Snapshots((snapshot(), snapshot(*CALLS[:1], torch="2.15"), snapshot(*CALLS[:1], torch="2.17")))
    wide = kept.with_section(snapshot(torch="?"), TORCH, ">=2.11,<2.16")
    assert [s.torch for s in wide.sections] == ["2.17", ">=2.11,<2.16"]
    narrowed = wide.with_section(snapshot(*CALLS[:2], torch="?"), TORCH)
    assert [(s.torch, len(s.calls)) for s in narrowed.sections] == [("2.17", 1), (">=2.11,<2.16", 2)]
    check_versions(">=2.11,<2.16", TORCH)
    with pytest.raises(SnapshotError, match=r"this is torch 2\.13"):
        check_versions(">=2.14", TORCH)
    with pytest.raises(SnapshotError, match="not a range of versions"):
        check_versions("latest", TORCH)


# -- from a ledger -----------------------------------------------------------------------------------------------------


def kind(op, path, line, formats, reason="follows input dtype", direction="forward"):
    return CallKind(op, path, "net.py", line, *formats, reason, "native", direction)


def cast(op, argument, path, line, src, dst):
    return Cast(op, argument, path, "net.py", line, src, dst, 4, 24, "copied", "forward", "input", "lower", "", "", "",
                "native")  # fmt: skip


def test_a_ledger_gives_a_line_for_each_call_with_its_casts_its_rule_and_its_line():
    """Calls are numbered by source line and repeats counted; calls without floating tensors have no line."""
    ledger, policy = Ledger(), Policy.native("cpu").resolve("cpu")
    rule = next(r for r in policy.rules if r.op == "aten.mm.default")
    ledger.count_call(kind("aten.mm.default", "a", 7, LOW, rule.reason), 8)
    ledger.count_call(kind("aten.mm.default", "a", 9, LOW, rule.reason), 8)
    ledger.count_call(kind("aten.mm.default", "a", 9, LOW, rule.reason), 8)
    ledger.count_call(kind("aten.arange.default", "a", 9, ("", "", "", "no rule")), 8)
    ledger.count_call(kind("aten._to_copy.default", "", 11, ("bf16", "bf16", "fp32", "no rule")), 8)
    ledger.count_match(rule.label, "a", 3)
    ledger.add(cast("aten.mm.default", "self", "a", 7, "fp32", "bf16"))
    ledger.add(cast("aten.mm.default", "mat2", "a", 9, "fp32", "bf16"))
    ledger.add(cast("aten.mm.default", "mat2", "b", 9, "fp32", "bf16"))
    explained = Explanation("a\nnet", "cpu", "bf16", "native", policy.digest, "fake tensors", "a note", ledger)
    found = snapshot_of(explained, policy.rules, "2.13", True)
    assert [call_text(c) for c in found.calls] == [
        "a aten.mm.default #1 | fp32 -> bf16 -> bf16 | lower: self",
        "a aten.mm.default #2 | fp32 -> bf16 -> bf16 | lower: mat2 | 2 times",
        "aten._to_copy.default #1 | bf16 -> bf16 -> fp32 | no rule: self",
    ]
    assert (found.model, found.digest, found.notes) == ("a net", policy.digest[:8], "a note")
    seen = found.calls[0].found
    assert (seen.file, seen.line, seen.rule) == ("net.py", 7, rule.label) and "builtin/native_cpu.toml:" in seen.rule
    assert found.calls[2].found.rule == ""


# -- what changed ------------------------------------------------------------------------------------------------------


def changes(was, now):
    return [(c.kind, str(c.id)) for c in compare_snapshots(snapshot(*was), snapshot(*now)).changes]


def test_nothing_changed():
    """Another digest of the policy is no change as long as every call computes as before."""
    found = compare_snapshots(snapshot(), snapshot(digest="else"))
    assert found.is_same and check_text(found) == "5 calls of a net (2 M) on cpu: the formats are those of formats.txt"


def numbered(*formats):
    return [call(f"a aten.mm.default #{n}", f) for n, f in enumerate(formats, 1)]


def test_a_call_more_is_one_change_though_all_after_it_have_other_numbers():
    """Calls of one op are aligned by their formats, and removals are found in the same way."""
    before = numbered(LOW, HIGH, LOW)
    assert changes(before, numbered(LOW, AS_IS, HIGH, LOW)) == [("new", "a aten.mm.default #2")]
    assert changes(before, numbered(HIGH, LOW)) == [("gone", "a aten.mm.default #1")]
    assert changes(before, numbered(LOW, LOW, LOW)) == [("changed", "a aten.mm.default #2")]
    assert changes(before, numbered(AS_IS, HIGH)) == [
        ("changed", "a aten.mm.default #1"),
        ("gone", "a aten.mm.default #3"),
    ]


def test_other_casts_another_rule_and_more_calls_are_changes():
    """Equal formats are not enough: the arguments that are cast, the rule and the count have to agree too."""
    base = call("a aten.mm.default #1")
    for other in (
        call("a aten.mm.default #1", casts=("input",)), call("a aten.mm.default #1", times=2),
        call("a aten.mm.default #1", ("fp32", "bf16", "bf16", "promote")),
    ):  # fmt: skip
        assert changes([base], [other]) == [("changed", "a aten.mm.default #1")]


def test_a_renamed_module_is_told_in_a_line():
    """Four calls that changed only their path are reported together, and the snapshot still does not hold."""
    now = [call(str(c.id).replace("encoder", "model.body"), c.facts[:4], c.casts, c.times)
           if "encoder" in str(c.id) else c for c in CALLS]  # fmt: skip
    now[:4] = [CallFormats(CallId.parse(str(n.id)), *c.facts) for n, c in zip(now, CALLS[:4], strict=False)]
    found = compare_snapshots(snapshot(), snapshot(*now))
    assert not found.changes and not found.is_same
    assert [(m.src, m.dst, m.calls) for m in found.moves] == [("encoder", "model.body", 4)]
    assert "moved    encoder is now model.body: 4 calls, with the same formats" in check_text(found)
    assert "formats.txt: 4 moved (5 calls)" in check_text(found)


def test_only_new_casts_are_looked_for():
    """A call counts if it casts more arguments, casts them more often or is new; fewer casts never count."""
    base = call("a aten.mm.default #1")

    def new(*now):
        return len(compare_snapshots(snapshot(base), snapshot(*now)).new_casts().changes)

    assert new(call("a aten.mm.default #1", HIGH)) == 0, "fewer"
    assert new(call("a aten.mm.default #1", casts=("weight",))) == 0
    assert new(call("a aten.mm.default #1", casts=("weight", "bias"))) == 1
    assert new(call("a aten.mm.default #1", times=2)) == 1, "more often"
    assert new(base, call("b aten.mm.default #1")) == 1, "a call that was not there"
    assert new(base, call("b aten.mm.default #1", AS_IS)) == 0, "one that casts nothing"
    assert new(call("b aten.mm.default #1")) == 0, "the same one in a module that was renamed"


RULE = Found("/home/me/net.py", 41, "aten.linear in encoder.*: full (my.toml:7)", "long inputs overflow")
FOLLOWS = Found("/home/me/net.py", 42, "", "follows input dtype")


def changed_run():
    now = [
        call("encoder.0 aten.linear.default #1", HIGH, found=RULE),
        call("encoder.0 aten.gelu.default #1", ("fp32", "fp32", "fp32", "no rule"), found=FOLLOWS),
        call("encoder.1 aten.linear.default #1", HIGH, found=RULE),
        call("encoder.1 aten.gelu.default #1", ("fp32", "fp32", "fp32", "no rule"), found=FOLLOWS),
        call("head aten.mm.default #1", LOW, ("mat2",), 2, Found()),
    ]
    was = parse_snapshots(text_of(snapshot()), "formats.txt").sections[0]
    return compare_snapshots(was, snapshot(*now, policy="mine", digest="4567cdef"))


def test_a_failure_says_what_changed_why_and_where_causes_first():
    """What a stranger reads."""
    assert check_text(changed_run()) == (
        "a net (2 M) on cpu differs from formats.txt: 4 changed, 1 new, 1 gone (5 calls)\n"
        "\n"
        "changed  encoder.0 aten.linear.default #1\n"
        "  was    fp32 -> bf16 -> bf16 | lower: input, weight    formats.txt:12\n"
        "  now    fp32 -> fp32 -> fp32 | full\n"
        "  rule   aten.linear in encoder.*: full (my.toml:7)\n"
        "         because long inputs overflow\n"
        "  at     /home/me/net.py:41\n"
        "  and 1 more like it, the last in encoder.1\n"
        "\n"
        "new      head aten.mm.default #1\n"
        "  now    fp32 -> bf16 -> bf16 | lower: mat2 | 2 times\n"
        "  rule   none names this op: it follows its input dtype\n"
        "  at     no line of yours\n"
        "\n"
        "gone     aten.mm.default #1\n"
        "  was    fp32 -> bf16 -> bf16 | lower: mat2 | 3 times    formats.txt:16\n"
        "\n"
        "follows  encoder.0 aten.gelu.default #1\n"
        "  was    bf16 -> bf16 -> bf16 | no rule    formats.txt:13\n"
        "  now    fp32 -> fp32 -> fp32 | no rule\n"
        "  rule   none names this op: it follows its input dtype\n"
        "  at     /home/me/net.py:42\n"
        "  and 1 more like it, the last in encoder.1\n"
        "\n"
        "Also changed since it was written: the policy was my own (0123abcd) and is mine (4567cdef)."
    )


def test_a_failure_under_the_same_policy_says_that_it_is_another_s_doing():
    """With an unchanged digest, the last line points to the model, its inputs or a library."""
    found = compare_snapshots(snapshot(*numbered(LOW)), snapshot(*numbered(HIGH)))
    assert check_text(found).endswith("the model, its inputs or a library changed.")
    assert check_text(found).startswith("a net (2 M) on cpu differs from formats.txt: 1 changed (1 call)")


def test_a_failure_lists_so_many_kinds_and_counts_the_rest():
    """Beyond a fixed number of kinds, the report says how many calls and kinds it does not list."""
    ops = [f"a aten.op{n}.default #1" for n in range(SHOWN + 3)]
    found = compare_snapshots(snapshot(*map(call, ops)), snapshot(*(call(op, HIGH) for op in ops)))
    assert check_text(found).count("changed  a aten") == SHOWN and "... and 3 more, of 3 other kinds" in check_text(
        found
    )


def test_the_json_has_every_change():
    """What the text folds is complete here: both sides, the rule, its reason and lines in source and snapshot."""
    data = json.loads(changed_run().to_json())
    assert (data["schema"], data["verdict"], data["was"]["calls"]) == ("narrowcast.check/1", "changed", 5)
    assert [c["kind"] for c in data["changes"]] == ["changed"] * 4 + ["new", "gone"]
    first, new, gone = data["changes"][0], data["changes"][4], data["changes"][5]
    assert first["was"]["computes"] == "bf16" and first["now"]["computes"] == "fp32" and not first["follows"]
    assert (first["file"], first["line"], first["snapshot_line"]) == ("/home/me/net.py", 41, 12)
    assert first["decided_by"].endswith("(my.toml:7)") and first["reason"] == "long inputs overflow"
    assert new["was"] is None and new["new_casts"] == ["mat2"] and gone["now"] is None
    assert json.loads(compare_snapshots(snapshot(), snapshot()).to_json())["verdict"] == "same"


# -- a table in the test -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expected", "holds"),
    [
        ({"aten.linear": "bf16"}, True), ({"aten.linear": "torch.bfloat16"}, True), ({"aten.linear": "fp32"}, False),
        ({"encoder aten.gelu.default": "bf16"}, True), ({"encoder.1 aten.*": "bf16"}, True),
        ({"encoder.9 aten.*": "bf16"}, False), ({"aten.mm.default #1": "bf16"}, True),
        ({"aten.mm.default #2": "bf16"}, False), ({"aten.linear": "bf16", "aten.gelu": "fp32"}, False),
        ({"encoder.0 aten.linear.default #1": "bf16,fp32"}, False),
    ],
)  # fmt: skip
def test_a_table_of_formats(expected, holds):
    """Keys are ops, patterns or identities, with or without a module, and one that matches no call fails."""
    assert (unmet(snapshot(), expected) == []) is holds


def test_an_entry_that_does_not_hold_lists_its_calls_and_one_that_names_none_says_so():
    """Three of five calls are listed with their rules and source lines, and the other two are counted."""
    calls = [call(f"a.{n} aten.linear.default #1", HIGH, found=RULE) for n in range(5)]
    text = unmet_text(unmet(snapshot(*calls), {"aten.linear": "bf16", "aten.softmax": "fp32"}))
    assert text.startswith("'aten.linear' is to compute in bf16: 5 calls do not\n  a.0 aten.linear.default #1\n")
    assert "(my.toml:7)" in text and "net.py:41" in text and "... and 2 more" in text
    assert text.endswith("'aten.softmax' is to compute in fp32: no call is one of these")


# -- two runs ----------------------------------------------------------------------------------------------------------


def ran(text, computes="bf16", result="bf16"):
    return RanCall(CallId.parse(text), computes, result, "aten.linear: lower (a.toml:3)", "net.py", 5)


EAGER = [ran("a aten.linear.default #1"), ran("a aten.matmul.default #1"), ran("b aten.relu.default #1")]


def test_calls_agree_by_identity_and_in_order_where_the_ops_are_others():
    """Compilers reorder calls and rewrite `linear` as `addmm`, and neither is a disagreement."""
    assert compare_calls("compile", EAGER, EAGER[::-1]).calls == 3
    lower = [ran("a aten.addmm.default #1"), ran("a aten.bmm.default #1"), EAGER[2]]
    found = compare_calls("script", EAGER, lower)
    assert (found.calls, found.as_a_whole, found.disagreements) == (3, (), ())


def test_a_call_that_computes_otherwise_is_named():
    """Both formats are given, the call's name in the other front end, the rule and the source line."""
    other = [EAGER[0], ran("a aten.bmm.default #1", "fp32", "fp32"), EAGER[2]]
    found = compare_calls("script", EAGER, other)
    assert disagreement_lines(found.disagreements) == [
        "a aten.matmul.default #1", "  eager    bf16 -> bf16", "  script   fp32 -> fp32    a aten.bmm.default #1",
        "  rule     aten.linear: lower (a.toml:3)", "  at       net.py:5",
    ]  # fmt: skip
    assert compare_calls(
        "export", EAGER, [EAGER[0], EAGER[1], ran("b aten.relu.default #1", "bf16", "fp32")]
    ).disagreements


def test_modules_with_other_calls_are_held_as_a_whole():
    """What a compiler leaves out is no disagreement; another format is."""
    fewer = compare_calls("compile", EAGER, EAGER[:1])
    assert (fewer.calls, fewer.as_a_whole, fewer.disagreements) == (1, ("a", "b"), ())
    more = [*EAGER, ran("a aten.mul.Tensor #1"), ran("c aten.mul.Tensor #1")]
    assert compare_calls("compile", EAGER, more).as_a_whole == ("a", "c")
    wider = [*EAGER, ran("a aten.mul.Tensor #1", "fp32", "fp32")]
    (one,) = compare_calls("compile", EAGER, wider).disagreements
    assert str(one.found[0].id) == "a aten.mul.Tensor #1"
