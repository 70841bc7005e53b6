"""The store of keys and values: its sizes, and what stays as it moves and grows."""

from dataclasses import replace

import torch

from treadle.rollout.engines.torch_engine.kv_store import KVShape, KVStore

CPU = torch.device("cpu")
SHAPE = KVShape(
    layers=2, kv_heads=2, head_dim=8, slots=3, rows=6, prefix_capacity=40, row_capacity=24, dtype=torch.float32
)


def test_sizes_in_bytes():
    token_bytes = 2 * 2 * 2 * 8 * 4  # keys and values, 2 layers, 2 heads of 8 numbers of 4 bytes
    assert SHAPE.num_bytes == (3 * 40 + 6 * 24) * token_bytes
    assert replace(SHAPE, dtype=torch.bfloat16).num_bytes == SHAPE.num_bytes // 2


def test_slots_and_rows_move_and_grow_with_all_layers():
    store = KVStore(SHAPE, CPU)
    for layer in range(2):
        store.write_prefix(layer, 2, torch.full((5, 2, 8), 1.0 + layer), torch.full((5, 2, 8), 3.0 + layer))
        for place in range(3):
            values = torch.zeros(5, 2, 8)
            values[4] = 10.0 * layer + place
            store.rows.write(layer, store.rows.cells(torch.full((5,), place)), values, -values)
    store.prefixes.move(2, 0)
    store.rows.move(4, 1)
    store.grow(replace(SHAPE, slots=4, rows=9, prefix_capacity=48))
    store.fit_rows(20)
    for layer in range(2):
        keys, values = store.prefixes.first(layer, 4)
        assert keys.shape == values.shape == (4 * 2, 48, 8)
        assert keys.is_contiguous()
        assert values.is_contiguous()
        assert (keys[:2, :5] == 1.0 + layer).all()
        assert (values[:2, :5] == 3.0 + layer).all()
        assert keys[:2, 5:].count_nonzero() == 0
        keys, values = store.rows.first(layer, 2)
        assert keys.shape == (2 * 2, 24, 8)
        for place in range(3):
            assert (keys[2:, place] == 10.0 * layer + place).all()
            assert (values[2:, place] == -(10.0 * layer + place)).all()


def test_rows_have_memory_for_what_is_there_and_little_more():
    store = KVStore(replace(SHAPE, row_capacity=1000), CPU)
    spans = []
    for longest in (1, 16, 17, 33, 257, 600, 641, 990, 999, 400, 600, 3):
        store.fit_rows(longest)
        spans.append(store.rows.span)
    assert spans == [16, 16, 32, 48, 288, 640, 704, 1000, 1000, 416, 640, 16]
    assert store.rows.layers[0].shape == (2, SHAPE.rows, 2, 16, 8)
