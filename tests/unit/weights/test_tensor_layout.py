import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from treadle.weights import WeightSpec
from treadle.weights.tensor_layout import ALIGNMENT, Layout, bucket_views, buckets

SPECS = st.dictionaries(
    st.text("abc", min_size=1, max_size=3),
    st.builds(
        WeightSpec,
        st.lists(st.integers(0, 9), max_size=3).map(tuple),
        st.sampled_from([torch.bfloat16, torch.float32, torch.int64, torch.uint8]),
    ),
    min_size=1,
    max_size=6,
)


@given(SPECS)
def test_weights_lie_apart_and_aligned(specs):
    layout = Layout.of(specs)
    ends = 0
    for name, spec in specs.items():
        assert layout.offsets[name] % ALIGNMENT == 0
        assert layout.offsets[name] >= ends
        ends = layout.offsets[name] + spec.num_bytes
    assert ends <= layout.num_bytes
    flat = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    for name, view in layout.views(flat).items():
        assert WeightSpec.of(view) == specs[name]
        view.fill_(1)
    assert sum(view.double().sum().item() for view in layout.views(flat).values()) == sum(
        s.num_elements for s in specs.values()
    )


@given(SPECS, st.sampled_from([64, 100, 128, 1000, 1 << 20]))
def test_buckets_carry_every_element_once_in_order_and_no_more_than_they_may(specs, bucket_bytes):
    seen = dict.fromkeys(specs, 0)
    buffer = torch.empty(bucket_bytes, dtype=torch.uint8)
    for pieces in buckets(specs, bucket_bytes):
        assert pieces
        views = bucket_views(pieces, specs, buffer)  # raises where they do not fit
        for piece, view in zip(pieces, views, strict=True):
            assert piece.start == seen[piece.name] < piece.stop
            assert (view.dtype, view.shape) == (specs[piece.name].dtype, (piece.stop - piece.start,))
            seen[piece.name] = piece.stop
    assert seen == {name: spec.num_elements for name, spec in specs.items()}


def test_a_large_weight_is_split_and_small_ones_share_a_bucket():
    specs = {
        "a": WeightSpec((10,), torch.float32),
        "b": WeightSpec((100,), torch.float32),
        "c": WeightSpec((1,), torch.int8),
    }
    found = [[(p.name, p.start, p.stop) for p in pieces] for pieces in buckets(specs, 256)]
    assert found == [[("a", 0, 10), ("b", 0, 48)], [("b", 48, 100)], [("c", 0, 1)]]


def test_a_bucket_too_small_for_anything_is_refused():
    with pytest.raises(ValueError, match="at least 64"):
        list(buckets({"a": WeightSpec((1,), torch.int8)}, 63))
