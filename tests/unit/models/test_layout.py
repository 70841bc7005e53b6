"""Where the tokens of a packed row lie."""

import torch

from treadle.models.layout import Family, PackedLayout

# Rows:  0 1 2 | 3 4 | 5 ‖ 6 7 ‖ 8 9
LAYOUT = PackedLayout((Family(3, (2, 1)), Family(0, (2,)), Family(2, ())))


def test_positions_continue_the_prefix():
    assert LAYOUT.position_ids.tolist() == [0, 1, 2, 3, 4, 3, 0, 1, 0, 1]
    assert LAYOUT.position_ids.dtype == torch.int64


def test_sizes_and_starts():
    assert LAYOUT.num_tokens == 10
    assert LAYOUT.starts == (0, 6, 8)
    assert LAYOUT.shape == (3, 2, 3, 2)  # families, most suffixes, longest prefix, longest suffix


def test_cells_of_the_prefix_grid_are_three_wide():
    rows, cells = LAYOUT.prefix_cells
    assert rows.tolist() == [0, 1, 2, 8, 9]
    assert cells.tolist() == [0, 1, 2, 6, 7]


def test_cells_of_the_suffix_grid_are_two_by_two():
    rows, cells = LAYOUT.suffix_cells
    assert rows.tolist() == [3, 4, 5, 6, 7]
    assert cells.tolist() == [0, 1, 2, 4, 5]


def test_sequences_pair_each_suffix_with_its_prefix():
    assert tuple((run.prefix, run.tokens) for run in LAYOUT.runs if run.suffix >= 0) == (
        (slice(0, 3), slice(3, 5)),
        (slice(0, 3), slice(5, 6)),
        (slice(6, 6), slice(6, 8)),
    )


def test_of_lengths_is_a_prefix_each():
    layout = PackedLayout.of_lengths([2, 1])
    assert layout.families == (Family(2, ()), Family(1, ()))
    assert layout.position_ids.tolist() == [0, 1, 0]


def test_a_row_without_tokens():
    layout = PackedLayout(())
    assert layout.num_tokens == 0
    assert layout.shape == (0, 0, 0, 0)
    assert layout.position_ids.tolist() == []
    assert layout.prefix_cells[0].tolist() == layout.suffix_cells[0].tolist() == []
