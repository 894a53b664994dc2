"""Two runs as data: sketches, pieces that are put together, sequences, mappings, files; all without torch."""

import json
import math
import random
import struct
from dataclasses import replace

import pytest

from narrowcast.analysis.diff.alignment import aligned_sequences, in_order_on_both
from narrowcast.analysis.diff.diff import diff
from narrowcast.analysis.diff.pieces import (
    NOTHING,
    RANGES,
    SKETCHES,
    STATISTICS,
    beside,
    distance,
    in_best_module_calls,
    in_best_order,
    piece_of,
    stacked,
)
from narrowcast.core.ledger.identity import CallId
from narrowcast.errors import RunError
from narrowcast.reports.results.mapping import MappingLine, RunMapping, generalised
from narrowcast.reports.results.run import Run
from narrowcast.reports.results.run_differences import DIFFERS, INHERITED, RunDifferences
from narrowcast.reports.results.run_records import CallRecord, TensorFacts
from narrowcast.reports.results.saved import load, parse
from narrowcast.reports.results.sketch import SUMS, sketch_rows, sketch_text, sketched_rows


def numbers(rows, columns, seed=0):
    draw = random.Random(seed)
    return [[draw.gauss(0, 1) for _ in range(columns)] for _ in range(rows)]


def facts(values, shape, format="fp32", **more):
    """What a run keeps of a tensor, given as rows."""
    raw = b""
    for number in sketched_rows(len(values)):
        row = values[number]
        sums = [sum(row[n::SUMS]) for n in range(SUMS)]
        raw += struct.pack(f"<{SUMS + 1}f", *sums, math.hypot(*row))
    flat = [x for row in values for x in row]
    made = TensorFacts(
        format, shape, "cpu", len(flat), min(flat), max(flat), sum(flat) / len(flat),
        math.hypot(*flat) / math.sqrt(len(flat)), inspected=len(flat), sketch=sketch_text(raw),
    )  # fmt: skip
    return replace(made, **more)


def moved(values, by):
    return [[x * (1 + by) for x in row] for row in values]


class TestSketches:
    """Sums of some rows."""

    def test_the_first_and_the_last_row_are_looked_at(self):
        """A sketch keeps all rows of a small tensor, and sixteen of a large one that span it from end to end."""
        assert sketched_rows(3) == (0, 1, 2)
        many = sketched_rows(1000)
        assert (many[0], many[-1], len(set(many))) == (0, 999, 16)

    @pytest.mark.parametrize("text", ["AAAA", "not base 64", "\u00e4"])
    def test_other_text_is_refused(self, text):
        """What is not base64, or has other values than the shape asks for, raises ValueError."""
        with pytest.raises(ValueError, match=r".+"):
            sketch_rows(text, (4, 32))

    @pytest.mark.parametrize("size", [1e-6, 1e-3, 0.1])
    def test_the_distance_is_estimated(self, size):
        """Sketches of a few rows give the size of relative noise from 1e-6 to 0.1, to within half of it."""
        values, noise = numbers(64, 96), numbers(64, 96, 1)
        other = [[x + size * e for x, e in zip(*rows, strict=True)] for rows in zip(values, noise, strict=True)]
        found = distance(piece_of(facts(values, (4, 16, 96))), piece_of(facts(other, (4, 16, 96), inspected=9)))
        assert found.by == SKETCHES and found.relative == pytest.approx(size, rel=0.5)


class TestPieces:
    """Tensors that are shaped otherwise in the other run."""

    def test_parts_side_by_side_are_the_fused_tensor(self):
        """Separate q and k are compared with a fused projection, although only that has its batch flattened."""
        q, k = numbers(20, 32), numbers(20, 16, 1)
        fused = [[*a, *b] for a, b in zip(q, k, strict=True)]
        parts = beside([piece_of(facts(q, (2, 10, 32))), piece_of(facts(k, (2, 10, 16)))])
        same = distance(parts, piece_of(facts(fused, (20, 48))))
        assert same.by == SKETCHES and same.relative < 1e-6
        other = distance(parts, piece_of(facts(moved(fused, 0.01), (20, 48))))
        assert other.relative == pytest.approx(0.01, rel=0.1)

    def test_turns_of_a_cache_are_one_sequence(self):
        """A prefill and then single tokens are compared with the whole sequence, and one wrong token shows."""
        values = numbers(24, 32)
        whole = piece_of(facts(values, (1, 24, 32)))
        turns = [piece_of(facts(values[:16], (1, 16, 32)))] + [piece_of(facts([v], (1, 1, 32))) for v in values[16:]]
        assert in_best_order([whole], turns).relative < 1e-6
        turns[-1] = piece_of(facts(moved(values[-1:], 0.5), (1, 1, 32)))
        assert in_best_order([whole], turns).relative > 0.05

    @pytest.mark.parametrize("is_time_first", [False, True])
    def test_turns_of_a_batch_are_one_sequence_each_however_rows_were_flattened(self, is_time_first):
        """Matmuls read [B * T, C]: no shape says which rows are of one sequence."""
        row = {divmod(n, 8): values for n, values in enumerate(numbers(16, 32))}

        def flat(tokens, by=0.0):
            places = sorted(((s, t) for s in range(2) for t in tokens), key=lambda p: p[::-1] if is_time_first else p)
            return piece_of(facts(moved([row[p] for p in places], by), (2 * len(tokens), 32)))

        parts = [range(5), *(range(t, t + 1) for t in range(5, 8))]
        assert in_best_order([flat(range(8))], [flat(part) for part in parts]).relative < 1e-6
        wrong = [flat(part, 0.2 * (n == 2)) for n, part in enumerate(parts)]
        assert 0.02 < in_best_order([flat(range(8))], wrong).relative < 0.3

    def test_calls_of_one_step_are_told_apart_and_what_has_no_order_is_not_compared(self):
        """A module called twice per step gives two sequences; reversed steps or surplus rows are not compared."""
        values, others = numbers(8, 32), numbers(8, 32, 1)
        wholes = [piece_of(facts(each, (8, 32))) for each in (values, others)]
        steps = [piece_of(facts(each[n : n + 2], (2, 32))) for n in range(0, 8, 2) for each in (values, others)]
        assert in_best_module_calls(wholes, steps).relative < 1e-6
        assert not in_best_module_calls(wholes, steps[::-1]).is_known
        assert not in_best_order([piece_of(facts(values, (2, 4, 32)))], [wholes[0], steps[0]]).is_known

    def test_ranks_are_parts_of_a_batch(self):
        """Two ranks stacked in order equal the whole batch, swapped they are far off, and one alone is a part."""
        values = numbers(40, 32)
        whole = piece_of(facts(values, (4, 10, 32)))
        ranks = [piece_of(facts(values[:20], (2, 10, 32))), piece_of(facts(values[20:], (2, 10, 32)))]
        assert distance(whole, stacked(ranks)).relative < 1e-6
        assert distance(whole, stacked(ranks[::-1])).relative > 0.5
        half = distance(whole, ranks[0])
        assert half.is_part and half.relative < 1e-6

    def test_heads_in_another_order_are_compared_by_statistics(self):
        """A transpose of heads and tokens permutes the rows, but leaves mean and rms of all elements the same."""
        values = numbers(24, 16)
        turned = [values[12 * part + 3 * token + head] for part in (0, 1) for head in range(3) for token in range(4)]
        found = distance(piece_of(facts(values, (2, 4, 3, 16))), piece_of(facts(turned, (2, 3, 4, 16))))
        assert found.by == STATISTICS and found.relative < 1e-6

    @pytest.mark.parametrize("shape", [(1, 5, 3, 16), (15, 16)])
    def test_tokens_before_sequences_are_compared_row_by_row(self, shape):
        """As they are, or flattened; in no order are other rows the same."""
        values = numbers(15, 16)
        turned = [values[sequence * 5 + token] for token in range(5) for sequence in range(3)]
        whole = piece_of(facts(values, (3, 5, 16)))
        found = distance(whole, piece_of(facts(turned, shape)))
        assert found.by == SKETCHES and found.relative < 1e-6
        assert distance(whole, piece_of(facts([*turned[1:], turned[0]], shape))).relative > 0.5

    def test_what_cannot_be_compared_is_said(self):
        """Other widths, integers and rows of padding alone have no distance; an infinity is infinitely far off."""
        a, whole = piece_of(facts(numbers(4, 16), (4, 16))), piece_of(facts(numbers(4, 32), (4, 32)))
        assert distance(a, whole).by == NOTHING and math.isnan(distance(a, None).relative)
        ids = piece_of(TensorFacts("int64", (4, 16), "cpu", 64))
        assert not distance(ids, ids).is_known
        sampled = replace(facts(numbers(4, 32), (4, 32)), sketch="", inspected=8)
        assert distance(whole, piece_of(sampled)).by == RANGES
        zeros = [[0.0] * 32] * 4
        margin = piece_of(replace(facts(zeros, (4, 32)), high=6.0, inspected=8))  # rows that are looked at, of others
        assert not distance(margin, margin).is_known and distance(piece_of(facts(zeros, (4, 32))), margin).by
        infinite = piece_of(replace(facts(numbers(4, 32), (4, 32)), infinite=0.1))
        assert distance(whole, infinite).relative == math.inf


class TestSequences:
    """Pairs in order."""

    def test_the_best_pairs_are_found_with_gaps_on_both_sides(self):
        """Items without a partner are skipped in either sequence, and an empty sequence has no pairs."""
        a, b = "xaybzc", "aqbc"
        found = aligned_sequences(len(a), len(b), lambda i, j: float(a[i] == b[j]))
        assert found == [(1, 0), (3, 2), (5, 3)]
        assert aligned_sequences(3, 0, lambda i, j: 1.0) == []

    def test_long_ones_are_looked_at_near_the_diagonal(self):
        """Beyond a million cells only a band is searched, which still holds all 1490 pairs around a replacement."""
        a = [n % 97 for n in range(1500)]
        b = [*a[:300], 1000, 1001, *a[310:]]
        found = aligned_sequences(len(a), len(b), lambda i, j: float(a[i] == b[j]))
        assert len(found) == 1490 and all(a[i] == b[j] for i, j in found)
        assert in_order_on_both(found) == found

    def test_pairs_that_cross_are_left_out(self):
        """The longest chain that rises on both sides is kept."""
        assert in_order_on_both([(0, 5), (1, 1), (2, 2), (3, 0), (4, 4)]) == [(1, 1), (2, 2), (4, 4)]


class TestMapping:
    """The text file."""

    def test_is_read_back_from_its_text(self):
        """Groups, the root module, names without a partner, calls and turns keep their meaning in the text."""
        entries = (
            MappingLine(("a.0.q", "a.0.k"), ("b.0.qk",)),
            MappingLine(("",), ("root",)),
            MappingLine(("a.1",), ()),
            MappingLine(("a aten.mm.default #1",), ("b aten.bmm.default #2 module call 3",)),
        )
        written = RunMapping(entries, comments=("only in a: x",))
        again = RunMapping.parse(str(written))
        assert [(e.a, e.b) for e in again.entries] == [(e.a, e.b) for e in entries] and again.entries[0].line == 3

    def test_layers_become_one_line(self):
        """Equal numbers become a wildcard, shifted ones do not; it expands to the names that both runs have."""
        entries = [MappingLine((f"a.{n}.q",), (f"b.{n}.q",)) for n in range(3)] + [MappingLine(("a.0.x",), ("b.1.x",))]
        assert [str(e) for e in generalised(entries)] == ["a.*.q = b.*.q", "a.0.x = b.1.x"]
        shifted = [MappingLine((f"a.{n}",), (f"b.{n + 1}",)) for n in range(3)]
        assert list(generalised(shifted)) == shifted
        filled = RunMapping((MappingLine(("a.*.q",), ("b.*.q",)),)).modules(
            ["a.0.q", "a.10.q"], ["b.0.q", "b.10.q", "b.11.q"]
        )
        assert [str(e) for e in filled] == ["a.0.q = b.0.q", "a.10.q = b.10.q"]

    @pytest.mark.parametrize(
        ("line", "found"),
        [
            ("a b c", "no line with"),
            ("a = ", "no line with"),
            ("a + b = c + d", "several names on both"),
            ("- = -", "none on both"),
            ("a.* = b", "one side only"),
            ("a #1 x = b aten.mm.default #1", "no identity"),
        ],
    )
    def test_errors_name_file_and_line(self, tmp_path, line, found):
        """A line that is not one clear pair is refused, with its number counted past comments and blank lines."""
        path = tmp_path / "pairs.txt"
        path.write_text(f"# a comment\n\nx = y\n{line}\n")
        with pytest.raises(RunError, match=found) as refused:
            RunMapping.load(path)
        assert f"{path}:4" in str(refused.value)

    def test_what_is_no_text_is_refused(self, tmp_path):
        """Binary content and a missing file raise a RunError that says what was to be read."""
        (tmp_path / "pairs.txt").write_bytes(b"\xff\xfe\x00")
        for path in (tmp_path / "pairs.txt", tmp_path / "missing.txt"):
            with pytest.raises(RunError, match="a mapping of runs"):
                RunMapping.load(path)


def a_chain(change=None, format="fp32", length=6):
    """A run of products one after the other; from `change` on, values are others."""
    run = Run({"device": "a cpu", "packages": {"torch": "2.13.0"}})
    run.tensors.append(facts(numbers(8, 32), (8, 32)))
    for n in range(length):
        values = numbers(8, 32, n + 1)
        run.tensors.append(facts(moved(values, 0.2) if change is not None and n >= change else values, (8, 32)))
        call = CallId(f"layers.{n}", "aten.linear.default")
        run.calls.append(
            CallRecord(call, "m.py", n, format, format, inputs=(("input", n),), outputs=(("result", n + 1),))
        )
    return run


class TestCompareRuns:
    """What is found."""

    def test_the_producer_is_told_from_what_inherits(self):
        """Of four calls with other values only the first makes a difference itself, and it alone is to be inspected."""
        found = diff(a_chain(), a_chain(change=2))
        assert [row.verdict for row in found.rows] == ["equal", "equal", DIFFERS, INHERITED, INHERITED, INHERITED]
        assert found.verdict == "values differ" and str(found.first_value.a[0]) == "layers.2 aten.linear.default #1"
        shown = str(found)
        assert "Inspect both lines of layers.2 aten.linear.default #1" in " ".join(shown.split())
        assert len(shown.splitlines()) <= 25

    def test_other_numbers_are_named_also_where_the_ops_are_two_of_one_family(self):
        """A norm is `layer_norm` in one run and `native_layer_norm`, what it calls, in the other."""

        def norm(op, eps, change=None):
            run = a_chain(change, length=1)
            run.calls = [replace(run.calls[0], id=CallId("norm", f"aten.{op}.default"), given=(("eps", eps),))]
            return run

        found = diff(norm("layer_norm", "1e-05"), norm("native_layer_norm", "0.01", 0))
        assert found.first_value.given == (("eps", "1e-05", "0.01"),)
        found = diff(norm("layer_norm", "1e-05"), norm("native_layer_norm", "1e-05"))
        assert found.verdict == "alike" and not found.rows[0].given

    def test_formats_alone_are_said_as_such(self):
        """Equal values in another format have a verdict of their own, and no call produces a difference."""
        found = diff(a_chain(), a_chain(format="bf16"))
        assert found.verdict == "formats differ" and len(found.formats) == 6 and not found.producers

    def test_a_line_leaves_out_a_call_of_the_run_that_it_names(self):
        """Not the call of the other run that has the same name."""
        mapping = RunMapping.parse("layers.0 aten.linear.default #1 = -\n")
        found = diff(a_chain(), a_chain(), mapping=mapping)
        assert [(one.run, one.why) for one in found.unaligned] == [("a", "left out by <string>:1"), ("b", "")]

    def test_runs_of_other_lengths_are_compared_as_far_as_they_go(self):
        """Shared calls are paired, and those that only one run has decide the verdict, without a producer."""
        found = diff(a_chain(), a_chain(length=4))
        assert len(found.rows) == 4 and [str(one.id)[:8] for one in found.unaligned] == ["layers.4", "layers.5"]
        assert found.unaligned[0].after.startswith("layers.3")
        assert found.verdict == "values differ" and not found.producers and found.alone == found.unaligned

    def test_runs_that_have_nothing_in_common_are_not_alike(self):
        """Without a single pair the verdict is that nothing was compared, and pairing by hand is advised."""
        other = Run(tensors=[facts(numbers(3, 5), (3, 5))])
        other.calls = [
            CallRecord(CallId("x", "aten.conv2d.default"), "m.py", 1, "fp32", "fp32", outputs=(("result", 0),))
        ]
        found = diff(a_chain(), other)
        assert found.verdict == "not compared" and not found.rows and len(found.unaligned) == 7
        assert "Pair their modules by hand" in str(found)

    def test_environments_come_first_versions_before_all(self):
        """Package versions explain the most, so they lead the first line, before the device and other settings."""
        other = a_chain()
        other.environment = {"device": "a gpu", "packages": {"torch": "2.15.0"}, "seed": 3}
        found = diff(a_chain(), other)
        assert found.environment[:2] == [("packages.torch", "2.13.0", "2.15.0"), ("device", "a cpu", "a gpu")]
        assert str(found).splitlines()[0].startswith("a: a; b: b; packages.torch: 2.13.0 / 2.15.0; ")

    def test_a_device_is_not_another_one_for_its_torch(self):
        """Its text names torch's version, which is told already."""
        runs = [a_chain(), a_chain()]
        for run, version, build in zip(runs, ("2.13.0", "2.15.0"), ("2.13.0+cpu", "2.15.0+cu132"), strict=True):
            run.environment = {"device": f"a cpu (cpu, 1 threads), torch {build}", "packages": {"torch": version}}
        assert [name for name, _, _ in diff(*runs).environment] == ["packages.torch"]
        runs[1].environment["device"] = "a cpu (cpu, 2 threads), torch 2.13.0"
        assert [name for name, _, _ in diff(*runs).environment] == ["packages.torch", "device"]

    def test_log_probabilities_are_compared_as_long_as_tokens_are_the_same(self):
        """The three tokens of the common prefix count; after it, log probabilities belong to different texts."""
        a, b = a_chain(), a_chain()
        a.keep_tokens([[1, 2], [3, 4]], [[-1.0, -2.0], [-3.0, -4.0]])
        b.keep_tokens([1, 2, 3, 9, 5], [-1.0, -2.5, -3.0, -4.0, -5.0])
        found = diff(a, b)
        assert (found.tokens.count, found.tokens.largest, found.tokens.at, found.tokens.first_other) == (3, 0.5, 1, 3)
        assert found.tokens.rms == pytest.approx(0.5 / math.sqrt(3)) and "from token 3 on" in str(found)
        with pytest.raises(RunError, match="2 tokens with 1"):
            a.keep_tokens([1, 2], [-1.0])

    def test_a_run_without_calls_is_refused(self):
        """An empty run, or an empty list of runs, has nothing to compare on either side."""
        with pytest.raises(RunError, match="without calls"):
            diff(a_chain(), Run())
        with pytest.raises(RunError, match="without calls"):
            diff([], a_chain())

    def test_are_saved_and_read_back(self, tmp_path):
        """A file gives the same text and tables, and one in which a row lacks an entry is refused."""
        a, b = a_chain(), a_chain(length=4)
        for run, value in ((a, -1.0), (b, -1.5)):
            run.keep_tokens([3], [value])
        found = diff(a, b)
        assert found.alone and found.tokens.round_off_bound < math.inf
        found.save(tmp_path / "d.json")
        again = load(tmp_path / "d.json")
        assert isinstance(again, RunDifferences) and again.rows[:2] == found.rows[:2]
        assert (again.alone, again.tokens) == (found.alone, found.tokens)
        assert str(again) == str(found) and again.to_text(every=True) == found.to_text(every=True)
        data = json.loads(found.to_json())
        del data["rows"][0]["a"]
        (tmp_path / "d.json").write_text(json.dumps(data))
        with pytest.raises(RunError, match="a record lacks"):
            load(tmp_path / "d.json")


def test_a_run_and_its_file_are_alike(tmp_path):
    """Although the file has fewer digits."""
    run = a_chain()
    found = diff(run, run.save(tmp_path / "run"))
    assert found.verdict == "alike" and {row.difference for row in found.rows} == {0.0} and found.b == "run.json.gz"


class TestFilesOfRuns:
    """Those without sketches, and those that are none."""

    def test_a_run_without_sketches_is_read_and_compared_by_what_it_has(self):
        """In older files statistics find the first difference instead, and a note says what is lacking."""
        data = json.loads(a_chain(change=3).to_json())
        at = data["tensor_columns"].index("sketch")
        for row in [data["tensor_columns"], *data["tensors"]]:
            del row[at]
        old = parse(json.dumps(data))
        assert old.tensors[0].sketch == "" and old.tokens == []
        found = diff(a_chain(), old)
        assert found.first_value.a[0].module_path == "layers.3" and found.first_value.measured_by == "statistics"
        assert any("sketches" in note for note in diff(old, old).notes)

    @pytest.mark.parametrize(
        "change",
        [
            lambda data: data["tensors"][0].__setitem__(-1, "AAAA"),
            lambda data: data["tensors"][0].__setitem__(-1, 7),
            lambda data: data["calls"][0].__setitem__(data["call_columns"].index("outputs"), [["result", -1]]),
            lambda data: data.__setitem__("parameters", {"w": {"gradient": 99}}),
            lambda data: data.__setitem__("tokens", [1]),
            lambda data: data.__setitem__("tokens", {"1": 2}),
        ],
        ids=["a short sketch", "a number", "below zero", "no such tensor", "tokens alone", "a mapping"],
    )
    def test_broken_ones_are_refused(self, change):
        """Bad sketches, indices that no tensor has and malformed tokens raise a RunError while the file is read."""
        data = json.loads(a_chain().to_json())
        change(data)
        with pytest.raises(RunError):
            parse(json.dumps(data))

    def test_a_file_that_nests_for_ever_is_refused(self, tmp_path):
        """Nesting too deep for the JSON decoder raises a RunError that names the file, at each attempt."""
        (tmp_path / "deep.json").write_text("[" * 100_000)
        for read in (load, load):
            with pytest.raises(RunError, match=r"deep\.json"):
                read(tmp_path / "deep.json")
