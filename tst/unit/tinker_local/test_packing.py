"""Packing: what is shared, in which rows, and who sees whom."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tinker_local.packing import common_prefix, pack, side_by_side

token_lists = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=8)


def arrays(*sequences):
    return [np.array(sequence, dtype=np.int64) for sequence in sequences]


def test_a_shared_beginning_is_computed_once():
    """Two sequences with a common prefix of three take the rest of the second and nothing more."""
    (row,) = pack(arrays([5, 6, 7, 8], [5, 6, 7, 9, 1]), budget=100)
    assert row.tokens.tolist() == [5, 6, 7, 8, 9, 1]
    assert row.positions.tolist() == [0, 1, 2, 3, 3, 4]
    assert [path.tolist() for path in row.paths] == [[0, 1, 2, 3], [0, 1, 2, 4, 5]]
    assert [(segment.start, segment.stop, segment.context.tolist()) for segment in row.segments] == [
        (0, 4, []),
        (4, 6, [0, 1, 2]),
    ]


def test_a_sequence_that_is_there_already_adds_nothing():
    """Equal sequences share every token, and have no segment of their own."""
    (row,) = pack(arrays([1, 2], [1, 2]), budget=100)
    assert (row.tokens.tolist(), len(row.segments)) == ([1, 2], 1)
    assert [path.tolist() for path in row.paths] == [[0, 1], [0, 1]]


def test_a_row_ends_at_the_budget():
    """A sequence that would not fit starts another row, from its own beginning."""
    rows = pack(arrays([1, 2, 3], [1, 2, 4], [1, 2, 5]), budget=4)
    assert [(row.tokens.tolist(), row.members) for row in rows] == [([1, 2, 3, 4], (0, 1)), ([1, 2, 5], (2,))]


def test_side_by_side_each_sequence_goes_on_from_its_own_offset():
    """Behind known beginnings positions go on counting, and nothing is shared: what came before may differ."""
    row = side_by_side(arrays([4, 5], [4, 5, 6]), [7, 2])
    assert row.tokens.tolist() == [4, 5, 4, 5, 6]
    assert row.positions.tolist() == [7, 8, 2, 3, 4]
    assert [path.tolist() for path in row.paths] == [[0, 1], [2, 3, 4]]
    assert [(segment.start, segment.stop, segment.context.tolist()) for segment in row.segments] == [
        (0, 2, []),
        (2, 5, []),
    ]


@given(token_lists, st.integers(1, 30))
def test_every_sequence_is_found_along_its_path(sequences, budget):
    """Tokens and positions along a path are the sequence's, and each token sees exactly those before it."""
    rows = pack(arrays(*sequences), budget=budget)
    assert sorted(member for row in rows for member in row.members) == list(range(len(sequences)))
    for row in rows:
        seen = {}
        for segment in row.segments:
            for index in range(segment.start, segment.stop):
                seen[index] = [*segment.context.tolist(), *range(segment.start, index + 1)]
        for member, path in zip(row.members, row.paths, strict=True):
            assert row.tokens[path].tolist() == sequences[member]
            assert row.positions[path].tolist() == list(range(len(sequences[member])))
            assert all(seen[index] == path[: place + 1].tolist() for place, index in enumerate(path.tolist()))


@given(token_lists, st.integers(1, 30))
def test_rows_keep_to_the_budget(sequences, budget):
    """Only a sequence that is over the budget by itself makes a longer row."""
    for row in pack(arrays(*sequences), budget=budget):
        assert len(row.tokens) <= max(budget, max(len(sequences[member]) for member in row.members))


def test_common_prefix_stops_at_the_first_difference():
    """The prefix ends where the sequences differ or one of them ends."""
    left, middle, right = arrays([1, 2, 3], [1, 2, 4], [1])
    assert [common_prefix(left, other) for other in (left, middle, right)] == [3, 2, 1]
