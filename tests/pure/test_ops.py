"""The one table of op facts: its names exist, and its facts do not contradict each other."""

import tomllib
from pathlib import Path

import pytest

import narrowcast
from narrowcast.core.ops import FAMILIES, called_by, named, op_kind, written_as

FOLDER = Path(narrowcast.__file__).parent
TABLE = tomllib.loads((FOLDER / "core/ops/facts.toml").read_text(encoding="utf-8"))
NAMED = {f"{table}.{key}": names for table, rows in TABLE.items() for key, names in rows.items() if "aten." not in key}
FACTS = [fact for fact, names in NAMED.items() if "higher_order." not in names]


def packets():
    """The names of all ops of all supported torches."""
    listed = (FOLDER / "core/policy/builtin/aten_ops.txt").read_text(encoding="utf-8")
    return {line.split()[0].split(".")[1] for line in listed.splitlines()[1:]}


@pytest.mark.parametrize("fact", FACTS)
def test_every_name_is_that_of_an_op(fact):
    """Of some supported torch: a misspelt op would silently lack the fact. Nor does any stand there twice."""
    table, _, key = fact.partition(".")
    names = TABLE[table][key].split()
    assert not set(names) - packets()
    assert len(names) == len(set(names)) == len(named(fact))


def test_what_an_op_calls_is_an_op():
    """Overloads, all of them, of some supported torch; and none that is called represents another in turn."""
    listed = (FOLDER / "core/policy/builtin/aten_ops.txt").read_text(encoding="utf-8").split()
    for table, device_type in (("calls", "cpu"), ("calls_on_cuda", "cuda")):
        rows = TABLE[table]
        assert rows and {*rows, *rows.values()} <= set(listed)
        for op, called in rows.items():
            assert called_by(op, device_type) == called and called_by(called, device_type) is None
    assert called_by("aten.lstm.input") != called_by("aten.lstm.input", "cuda")


def test_an_op_is_written_as_another_op():
    """Both are ops of some supported torch, and the other one is what programs call."""
    listed = (FOLDER / "core/policy/builtin/aten_ops.txt").read_text(encoding="utf-8").split()
    rows = TABLE["written_as"]
    assert rows and {*rows, *rows.values()} <= set(listed)
    assert all(written_as(op) == whole and written_as(whole) == whole for op, whole in rows.items())


def test_an_op_has_one_family():
    """Each is one of those that costs are asked for; casts alone are copies."""
    assert (*TABLE["family"], "copy") == FAMILIES
    names = [name for family in TABLE["family"] for name in named(f"family.{family}")]
    assert len(names) == len(set(names))


def test_facts_do_not_contradict_each_other():
    """What gives no floats keeps no format; what commutes with rounding is known; exceptions are of what moves."""
    assert not named("result.keeps") & named("result.counts")
    moving = named("family.movement") | named("family.view")
    known = {name for family in TABLE["family"] for name in named(f"family.{family}")}
    assert named("rounding.commutes") <= named("family.pointwise")
    assert named("rounding.chooses_an_index") <= moving
    assert not named("rounding.commutes") & (named("rounding.puts_in_a_constant") | named("rounding.chooses_an_index"))
    assert not named("backward.linear") & named("backward.linear_by_a_number")
    assert named("backward.linear") | named("backward.linear_by_a_number") <= known
    assert not named("computation.none") & named("computation.recurrent")


@pytest.mark.parametrize(
    ("op", "name", "family", "commutes", "in_place"),
    [
        ("aten.mm.default", "mm", "gemm", False, False),
        ("aten.relu_.default", "relu", "pointwise", True, True),
        ("aten.max_pool2d_with_indices.default", "max_pool2d_with_indices", "movement", False, False),
        ("aten.constant_pad_nd.default", "constant_pad_nd", "movement", False, False),
        ("aten.transpose.int", "transpose", "view", True, False),
        ("aten.__and__.Tensor", "__and__", "", False, False),
        ("mine.mm.default", "mm", "", False, False),
        ("cast", "", "", False, False),
        ("prim.Loop", "Loop", "", False, False),
    ],
)
def test_what_an_op_is_like(op, name, family, commutes, in_place):
    """By its id; nothing is known of ops of other libraries."""
    kind = op_kind(op)
    assert (kind.name, kind.family, kind.commutes, kind.in_place) == (name, family, commutes, in_place)
    assert kind.is_known == bool(family)


def test_an_unknown_fact_is_an_error():
    """Not an empty list of ops."""
    with pytest.raises(KeyError):
        named("result.kept")


def test_a_fusing_compiler_leaves_products_to_a_library():
    """And what nothing is known of; the rest becomes part of its neighbours' loops."""
    fused = {op: op_kind(f"aten.{op}.default").is_fused for op in ("mm", "relu", "softmax", "cat", "no_such_op")}
    assert fused == {"mm": False, "relu": True, "softmax": True, "cat": True, "no_such_op": False}
