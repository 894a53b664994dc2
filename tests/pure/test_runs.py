"""Runs, findings, comparisons and fits as data: written, read back, refused where they are broken."""

import gzip
import json
import math
from dataclasses import replace

import pytest

from narrowcast.core.ledger.identity import CallId
from narrowcast.errors import RunError
from narrowcast.formats import fp32
from narrowcast.reports.results.differences import CallError, Differences, GradientError, OutputError
from narrowcast.reports.results.findings import Finding, InspectedStep, Watching
from narrowcast.reports.results.headroom import PER_ROW, PER_TENSOR, UNSCALED
from narrowcast.reports.results.run import Run
from narrowcast.reports.results.run_records import CallRecord, Histogram, TensorFacts
from narrowcast.reports.results.saved import load, parse

LINEAR = CallId("encoder.layer.0", "aten.linear.default")


def facts(low=-1.0, high=1.0, exponents=None, **more):
    exponents = exponents or Histogram(-3, (1, 2, 3))
    return TensorFacts("fp32", (2, 3), "cpu", 6, low, high, exponents=exponents, inspected=6, **more)


def a_run():
    calls = [
        CallRecord(LINEAR, "model.py", 3, "fp32", "bf16", "aten.linear: lower", "a product", (("input", 0),),
                   (("result", 1),), (("alpha", "1"),)),
        CallRecord(CallId("", "aten.mm.default", 2, 3, "backward"), "model.py", 9, "bf16", "bf16", forward=LINEAR,
                   inputs=(("self", 1),), outputs=(("result", 2),)),
    ]  # fmt: skip
    tensors = [facts(), facts(nan=0.5), facts(-70000.0, 5.0, Histogram(14, (5, 0, 1)), below=Histogram(0, (1, 5)))]
    return Run({"device": "a cpu"}, calls, tensors, {"weight": {"gradient": 2}}, ["a note"])


@pytest.mark.parametrize(
    "identity",
    [LINEAR, CallId("", "aten.mm.default", 3), CallId("a", "aten.mm.default", 1, 2),
     CallId("a b.c", "aten.add.Tensor", 2, 5, "backward"), CallId("l", "gradient.weight", direction="recomputation")],
)  # fmt: skip
def test_an_identity_is_read_back_from_its_text(identity):
    """Module, op, number, module call and direction survive, also with an empty path or one that contains a space."""
    assert CallId.parse(str(identity)) == identity


@pytest.mark.parametrize("text", ["", "aten.mm.default", "x aten.mm #", "x aten.mm.default #1 sideways"])
def test_other_text_is_no_identity(text):
    """A missing number or an unknown direction is an error rather than a guess."""
    with pytest.raises(RunError, match="no identity"):
        CallId.parse(text)


class TestRun:
    """A run and its file."""

    def test_is_read_back_from_its_text(self):
        """Calls, tensors, gradients, environment and notes survive, histograms and shares of NaN included."""
        run = a_run()
        again = parse(run.to_json())
        assert (again.calls, again.tensors, again.parameters) == (run.calls, run.tensors, run.parameters)
        assert (again.environment, again.notes) == (run.environment, run.notes)

    @pytest.mark.parametrize(
        ("low", "came_infinite", "nan", "value", "said"),
        [
            (-1.0, False, 0.0, "-inf", "which were given, fill masks, or go no further"),
            (-3.4e38, False, 0.0, "1", "which were given, fill masks, or go no further"),
            (-1.0, True, 0.0, "1", "which were given, fill masks, or go no further"),
            (-1.0, False, 0.0, "1", "the first from finite inputs: aten.masked_fill.Scalar #1"),
            (-1.0, False, 0.5, "-inf", "the first from finite inputs: aten.masked_fill.Scalar #1"),
            (-1.0, True, 0.5, "1", "the first from finite inputs: aten.masked_fill.Scalar #1"),
        ],
    )
    def test_an_infinity_that_is_meant_is_told_from_one_that_is_made(self, low, came_infinite, nan, value, said):
        """An infinite fill value, infinite inputs or the lowest fp32 number excuse an infinity, never a NaN."""
        tensors = [facts(low, infinite=0.5 if came_infinite else 0.0), facts(infinite=0.5 - nan, nan=nan)]
        call = CallRecord(CallId("", "aten.masked_fill.Scalar"), "model.py", 3, "fp32", "fp32",
                          inputs=(("self", 0),), outputs=(("result", 1),), given=(("value", value),))  # fmt: skip
        assert said in " ".join(str(Run({}, [call], tensors)).split())

    @pytest.mark.parametrize(("name", "written"), [("run", "run.json.gz"), ("run.json", "run.json")])
    def test_is_saved_compressed_unless_the_name_says_json(self, tmp_path, name, written):
        """A name without a suffix becomes `.json.gz`, and both kinds of file load alike."""
        path = a_run().save(tmp_path / name)
        assert path.name == written and load(path).calls == a_run().calls
        assert load(path).calls == a_run().calls

    def test_a_call_is_found_by_its_identity(self):
        """Its CallId and the text of that both find a call, one without module call and direction finds none."""
        run = a_run()
        assert run.call(LINEAR) is run.calls[0] and run.call(str(run.calls[1].id)) is run.calls[1]
        assert set(run.facts(run.calls[0].inputs)) == {"input"}
        with pytest.raises(RunError, match="has none like it"):
            run.call(CallId("", "aten.mm.default"))

    def test_says_which_calls_are_not_finite(self):
        """The second call only reads the NaN that the first one made, so the first alone is listed."""
        run = a_run()
        assert run.not_finite() == [run.calls[0]]
        assert "the first from finite inputs: encoder.layer.0 aten.linear.default #1 (model.py:3)" in " ".join(
            str(run).split()
        )

    @pytest.mark.parametrize(
        ("content", "found"),
        [
            (b"", "not JSON"),
            (b"[1]", "it holds no result"),
            (b'{"schema": "narrowcast.run/99"}', "narrowcast.run/99"),
            (b'{"schema": "narrowcast.run/2"}', "lacks"),
            (gzip.compress(b"x" * 1000)[:-20], "EOFError|Error"),
            (b"\xff\xfe\x00", "not text"),
        ],
        ids=["empty", "a list", "another schema", "no records", "cut off", "no text"],
    )
    def test_a_broken_or_foreign_file_is_refused_with_what_is_wrong(self, tmp_path, content, found):
        """Truncated gzip, binary content, lists and unknown schemas raise a RunError with the path."""
        path = tmp_path / "run.json.gz"
        path.write_bytes(content)
        with pytest.raises(RunError, match=found) as refused:
            load(path)
        assert str(path) in str(refused.value)

    def test_a_number_that_no_tensor_has_is_refused(self):
        """An index past the end of the table of tensors is found while the file is read."""
        data = json.loads(a_run().to_json())
        data["tensors"] = data["tensors"][:1]
        with pytest.raises(RunError, match="broken"):
            parse(json.dumps(data))

    def test_a_folder_that_is_missing_is_said_and_nothing_is_left(self, tmp_path):
        """Saving raises a RunError, and neither a folder nor a partial file is created on the way."""
        with pytest.raises(RunError, match="saving a run"):
            a_run().save(tmp_path / "nowhere" / "run.json")
        assert not list(tmp_path.iterdir())


class TestFit:
    """What formats would lose."""

    def test_overflow_is_told_by_the_range_and_the_exponents(self):
        """One of six values exceeds fp16: its share, the headroom in bits and the call are given, and bf16 fits."""
        found = a_run().headroom()
        worst = found.unfit("fp16")[0]
        assert (worst.argument, worst.overflow) == ("result", pytest.approx(1 / 6))
        assert worst.headroom_bits == pytest.approx(math.log2(65504 / 70000))
        assert not found.unfit("bf16") and found.calls("fp16") == [CallId("", "aten.mm.default", 2, 3, "backward")]

    def test_a_scale_per_tensor_leaves_underflow_and_one_per_row_less(self):
        """Values 45 powers of two apart need more range than fp16 has under one scale; each row by itself fits."""
        wide = facts(-1.0, 1.0, Histogram(-45, (3, *[0] * 44, 3)), below=Histogram(0, (3, 3)))
        run = Run(calls=[CallRecord(LINEAR, "m.py", 1, "fp32", "fp32", inputs=(("x", 0),))], tensors=[wide])
        found = run.headroom()
        under = {s: next(r.underflow for r in found.rows if (r.format, r.scale) == ("fp16", s))
                 for s in (UNSCALED, PER_TENSOR, PER_ROW)}  # fmt: skip
        assert under == {UNSCALED: 0.5, PER_TENSOR: 0.5, PER_ROW: 0.0}
        assert "underflow" in str(found)

    def test_the_policy_keeps_in_fp32_what_does_not_fit(self):
        """Its rule names the op, the module and the reason, and only 16-bit formats have such a policy."""
        run = a_run()
        run.calls[1] = CallRecord(LINEAR, "m.py", 1, "fp32", "fp32", inputs=(("x", 2),))
        policy = run.headroom().policy("fp16")
        rule = policy.rules[0]
        assert (rule.op, rule.module, str(rule.action)) == ("aten.linear.default", "encoder.layer.0", "full")
        assert "overflow fp16" in rule.reason and policy.low == "fp16"
        with pytest.raises(RunError, match="16-bit"):
            run.headroom().policy("e4m3fn")

    def test_a_normalization_is_judged_by_what_it_reads_and_gives_not_by_what_it_keeps(self):
        """Running statistics beyond fp16's range do not count, and an input beyond it does."""
        tensors = [facts(), facts(0.0, 1e9, Histogram(20, (1,)))]
        norm = CallId("norm", "aten.native_batch_norm.default")
        kept = (("input", 0), ("running_var", 1))
        call = CallRecord(norm, "model.py", 3, "fp32", "fp32", inputs=kept, outputs=(("result.0", 0), ("result.2", 1)))
        assert not Run({}, [call], tensors).headroom().unfit("fp16")
        assert Run({}, [replace(call, inputs=(("input", 1),))], tensors).headroom().calls("fp16") == [norm]

    def test_what_is_about_to_be_overwritten_is_no_value(self):
        """Dropout draws into memory that nobody has written to."""
        junk = facts(0.0, 1e9, Histogram(20, (1,)))
        drawn = CallRecord(CallId("drop", "aten.bernoulli_.float"), "m.py", 3, "fp32", "fp32", inputs=(("self", 0),),
                           outputs=(("result", 1),))  # fmt: skip
        assert not Run({}, [drawn], [junk, facts()]).headroom().unfit("fp16")
        halved = replace(drawn, id=CallId("drop", "aten.div_.Scalar"))
        assert Run({}, [halved], [junk, facts()]).headroom().calls("fp16") == [halved.id]

    def test_a_mask_of_the_lowest_number_is_no_value_and_another_large_one_is(self):
        """fp32's lowest number is a fill value that leaves nothing to judge; -1e9 is a value that overflows fp16."""
        lowest = -fp32.max
        call = CallRecord(LINEAR, "m.py", 1, "fp32", "fp32", inputs=(("x", 0),))
        mask, large = (facts(low, 0.0, Histogram(20, (1,))) for low in (lowest, -1e9))
        assert Run({}, [call], [large]).headroom().calls("fp16") == [LINEAR]
        with pytest.raises(RunError, match="none of its 1 call has an fp32 tensor"):
            Run({}, [call], [mask]).headroom()

    def test_the_first_screen_of_a_fit_has_room_for_the_worst(self):
        """Nine calls with long paths take at most 25 lines, and the row of fp16 counts all nine."""
        tensors = [facts(-1e38, 1e38, Histogram(120, (1,)))] * 9
        calls = [CallRecord(CallId("a." * 30 + str(n), "aten.mul.Tensor"), "/a/model.py", 3, "fp32", "fp32",
                            outputs=(("result", n),)) for n in range(9)]  # fmt: skip
        lines = str(Run({}, calls, tensors).headroom()).splitlines()
        assert len(lines) <= 25 and any(line.startswith("fp16           9  calls lose values") for line in lines)

    def test_a_share_or_format_that_cannot_be_is_refused(self):
        """A share above 1, an unknown scale, fp32 as the target and an empty run each raise a RunError."""
        with pytest.raises(RunError, match="share"):
            a_run().headroom(2.0)
        with pytest.raises(RunError, match="no such scale"):
            a_run().headroom().unfit("fp16", "per column")
        with pytest.raises(RunError, match="not one of those"):
            a_run().headroom().unfit("fp32")
        with pytest.raises(RunError, match="has an fp32 tensor"):
            Run().headroom()


class TestSaved:
    """Comparisons, watches and fits read back."""

    def test_a_comparison_is_read_back(self, tmp_path):
        """Rows, NaN gradients, an infinite SQNR and the call that is not finite survive, and so does the text."""
        mm, why = CallId("x", "aten.mm.default"), "its kernel"
        rows = [
            CallError(LINEAR, "m.py", 1, "bf16", "fp32", "round-off", local=0.1),
            CallError(mm, "m.py", 2, "bf16", "fp32", "fault", why=why, local=0.01, alone=0.2),
        ]
        gradients = [GradientError("weight", "fp32", math.nan, 0.9, 0.0, "not finite")]
        found = Differences("model", "cpu", "native", "bf16", "fp32", rows, gradients=gradients, verdict="fault")
        found.not_finite = Finding(mm, "m.py", 2, "nan", "op", "fp16", "0 by 0")
        found.save(tmp_path / "c.json")
        again = load(tmp_path / "c.json")
        assert again.rows[1] == rows[1] and math.isnan(again.gradients[0].relative_error)
        assert again.not_finite == found.not_finite and math.isinf(again.rows[0].sqnr_db) and str(again) == str(found)

    def test_faults_come_first_then_what_moves_the_output_then_own_error(self):
        """Neither a larger error of its own nor its place in the run moves a call before one at fault."""

        def row(op, own, verdict="round-off", alone=math.nan):
            return CallError(CallId("", op), "m.py", 1, "bf16", "fp32", verdict, local=own, alone=alone)

        rows = [row("a.a.a", 0.3), row("b.b.b", 0.1, alone=0.2), row("c.c.c", 0.01, "fault"), row("d.d.d", 0.0)]
        found = Differences("m", "cpu", "native", "bf16", "fp32", rows)
        assert [r.id.op for r in found.worst] == ["c.c.c", "b.b.b", "a.a.a"]
        assert 'op = "c.c.c"' in str(found) and len(str(found).splitlines()) <= 25

    def test_the_first_screen_has_25_lines_however_much_there_is_to_say(self):
        """Eight faults, nine gradients and long notes fit in 80 columns, with the reason and a rule to copy."""
        why = (
            "its kernel is off by 1.6e-02 from the same op in fp64 on the same rounded inputs, 2.8 times what one unit"
        )
        row = CallError(LINEAR, "model.py", 3, "bf16", "fp32", "fault", why, local=1.0)
        rows = [replace(row, id=CallId("layer" * n, "aten.linear.default")) for n in range(1, 9)]
        gradients = [GradientError(f"weight{n}", "fp32", 0.1, 0.9, 0.0, "round-off") for n in range(9)]
        notes = ["something that a reader has to know of this comparison, and which is long. " * 4] * 3
        for notes_shown in ([], notes[:1], notes):
            found = Differences("m", "cpu", "native", "bf16", "fp32", rows, (), gradients, notes=notes_shown)
            lines = str(found).splitlines()
            assert len(lines) <= 25 and max(map(len, lines)) <= 80, found
            assert "it is at fault: its kernel is off" in str(found) and "[[rule]]" in lines
        assert "rows of tables with --all" in str(found)

    @pytest.mark.parametrize(("alone", "is_spread"), [(6e-3, True), (9e-3, False), (1e-3, False), (math.nan, False)])
    def test_where_no_op_makes_the_most_of_the_error_it_says_so(self, alone, is_spread):
        """An error is spread if the worst op alone makes less than most of it, and all together may make it; not if it
        was not measured; what is round-off needs no rule.
        """
        row = CallError(LINEAR, "model.py", 3, "bf16", "fp32", "round-off", local=1e-3, alone=alone)
        other = CallError(CallId("", "aten.mm.default"), "model.py", 4, "bf16", "fp32", "round-off", local=1e-4)
        output = OutputError("output", "fp32 [2]", "bf16", 40.0, 1e-2, 0.1)
        text = " ".join(str(Differences("m", "cpu", "native", "bf16", "fp32", [row, other], (output,))).split())
        assert ("the error is spread over 2 ops" in text) is is_spread and "[[rule]]" not in text

    def test_a_watch_is_read_back_and_says_findings_before_trends(self, tmp_path):
        """What an op made precedes a trend; the inputs that would reproduce it are not in the file."""
        gradient = CallId("", "gradient.w", direction="backward")
        trend = Finding(gradient, "", 0, "growth", "trend", "", "it grows", "slow down")
        nan = Finding(LINEAR, "m.py", 7, "nan", "op", "fp16", "0 by 0", inputs=(("x", facts()),), step=3)
        found = Watching([trend, nan], {"a mask": 2}, ["a note"], [InspectedStep(1, {})], calls=9, spread=2, repeated=1)
        assert found.first is nan and str(found).index("0 by 0") < str(found).index("it grows")
        found.save(tmp_path / "w.json")
        again = load(tmp_path / "w.json")
        assert (again.first.id, again.intentional, again.repeated) == (LINEAR, {"a mask": 2}, 1)
        with pytest.raises(RunError, match="not kept"):
            again.first.save(tmp_path / "repro")

    def test_a_fit_is_read_back(self, tmp_path):
        """The file keeps all rows exactly, so that a fit can be judged again without its run."""
        found = a_run().headroom()
        found.save(tmp_path / "f.json")
        assert load(tmp_path / "f.json").rows == found.rows

    @pytest.mark.parametrize("text", ["nothing", "{}", '{"schema": "narrowcast.compare/3"}', "[]"])
    def test_anything_else_is_refused(self, tmp_path, text):
        """Plain text, incomplete records, lists and missing files all raise one message about saved results."""
        (tmp_path / "x.json").write_text(text)
        with pytest.raises(RunError, match="saved result"):
            load(tmp_path / "x.json")
        with pytest.raises(RunError, match="saved result"):
            load(tmp_path / "missing.json")
