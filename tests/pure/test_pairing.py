"""Which calls of two runs of one program are pairs."""

from collections import Counter

from hypothesis import given, strategies as st

from narrowcast.core.ledger.identity import CallId
from narrowcast.core.ledger.pairing import grouped, other_counts, pairs_of

IDS = st.builds(
    CallId, st.sampled_from("ab"), st.sampled_from(("aten.mm.default", "aten.cat.default")), st.integers(1, 3)
)
CALLS = st.dictionaries(IDS, st.integers())


@given(CALLS, CALLS)
def test_each_call_is_in_one_place(a, b):
    """In a pair with its equal, or left over on its side; nothing is lost, and each side keeps its order."""
    pairs = pairs_of(a, b)
    assert {**pairs.only_a, **{key: x for key, (x, _) in pairs.both.items()}} == a
    assert {**pairs.only_b, **{key: y for key, (_, y) in pairs.both.items()}} == b
    assert not pairs.only_a.keys() & b.keys() and not pairs.only_b.keys() & a.keys()
    assert [key for key in b if key in a] == list(pairs.both)
    assert list(pairs.only_a) == [key for key in a if key not in b]


@given(st.lists(IDS))
def test_groups_have_every_call_in_its_order(calls):
    """By module: each group is what a filter gives."""
    groups = grouped(calls, lambda call: call.module_path)
    assert list(groups) == list(dict.fromkeys(call.module_path for call in calls))
    for path, group in groups.items():
        assert group == [call for call in calls if call.module_path == path]


@given(st.lists(st.sampled_from("abc")), st.lists(st.sampled_from("abcd")))
def test_other_counts_are_those_that_differ(a, b):
    """With both numbers; none of a run against itself."""
    counts = Counter(a), Counter(b)
    assert other_counts(*counts) == {
        key: (a.count(key), b.count(key)) for key in dict.fromkeys([*a, *b]) if a.count(key) != b.count(key)
    }
    assert not other_counts(counts[0], counts[0])
