"""Prefill and decode on the key/value store, against attention over the whole sequence at once."""

from dataclasses import replace

import pytest
import torch

from treadle.models.attention import LayerAttention, PackedAttention
from treadle.models.cpu.decode_kernels import load_kernels
from treadle.models.layout import Family, PackedLayout
from treadle.rollout.engines.torch_engine import attention
from treadle.rollout.engines.torch_engine.attention import DecodeAttention, PrefillAttention
from treadle.rollout.engines.torch_engine.kv_store import KVShape, KVStore

CPU = torch.device("cpu")


def kernels_of(heads_per_kv_head, head_size):
    kernels = load_kernels(torch.float32, heads_per_kv_head, head_size)
    return kernels or pytest.skip("no GCC here, or torch.compile is turned off")


SHAPE = KVShape(
    layers=2, kv_heads=2, head_dim=8, slots=3, rows=6, prefix_capacity=40, row_capacity=24, dtype=torch.float32
)


@pytest.mark.parametrize("way", ["operations", "kernel", "kernel, prompts by a matmul"])
@pytest.mark.parametrize(
    "layer",
    [
        LayerAttention(8**-0.5),
        LayerAttention(0.3, sliding_window=7),
        LayerAttention(8**-0.5, sliding_window=1),
        LayerAttention(1.0, softcap=2.0),
        LayerAttention(1.0, sliding_window=12, softcap=1.5),
    ],
    ids=str,
)
def test_prefill_and_decode_attend_as_the_whole_sequence_does(layer, way, monkeypatch):
    """Three prompts (one with two samples, one with three), 18 new tokens each, decoded one by one."""
    new, heads, size = 18, 4, 8
    kernels = None
    if way != "operations":
        size, kernels = 32, kernels_of(heads // 2, 32)
    if "matmul" in way:
        monkeypatch.setattr(attention, "READ_BY_ROW", 0)
    families = (Family(33, (new, new)), Family(4, (new,)), Family(17, (new, new, new)))
    layout = PackedLayout(families)
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(layout.num_tokens, heads, size, generator=generator) * 2
    key, value = (torch.randn(layout.num_tokens, 2, size, generator=generator) * 2 for _ in range(2))
    want = PackedAttention(layout, "sdpa").attend(query, key, value, layer)

    store = KVStore(replace(SHAPE, head_dim=size), CPU)
    starts = layout.starts
    prefix = torch.cat([torch.arange(s, s + f.prefix) for s, f in zip(starts, families, strict=True)])
    prefill = PrefillAttention(store, PackedLayout.of_lengths([f.prefix for f in families]), [0, 1, 2])
    found = prefill.attend(query[prefix], key[prefix], value[prefix], layer)
    torch.testing.assert_close(found, want[prefix], rtol=1e-5, atol=1e-5)

    slots, firsts = [], []  # of each row: which prompt, and where its new tokens begin in the packed row
    for slot, (start, family) in enumerate(zip(starts, families, strict=True)):
        for i in range(len(family.suffixes)):
            slots.append(slot)
            firsts.append(start + family.prefix + i * new)
    order = torch.tensor([3, 0, 5, 1, 4, 2])  # rows of a prompt need not be side by side
    slots, firsts = torch.tensor(slots)[order], torch.tensor(firsts)[order]
    lengths = torch.tensor([f.prefix for f in families])
    for place in range(new):
        at = firsts + place
        decode = DecodeAttention(store, slots, torch.full((6,), place), lengths, kernels)
        found = decode.attend(query[at], key[at], value[at], layer)
        torch.testing.assert_close(found, want[at], rtol=3e-5, atol=3e-5)


def test_rows_at_different_places():
    """A row that came later is at an earlier place; both are as if alone."""
    layer = LayerAttention(8**-0.5)
    layout = PackedLayout((Family(6, (20, 3)),))
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(layout.num_tokens, 4, 8, generator=generator)
    key, value = (torch.randn(layout.num_tokens, 2, 8, generator=generator) for _ in range(2))
    want = PackedAttention(layout, "sdpa").attend(query, key, value, layer)
    store = KVStore(SHAPE, CPU)
    PrefillAttention(store, PackedLayout.of_lengths([6]), [0]).attend(query[:6], key[:6], value[:6], layer)
    lengths = torch.tensor([6])
    for place in range(17):
        at = torch.tensor([6 + place])
        DecodeAttention(store, torch.zeros(1, dtype=int), torch.tensor([place]), lengths).attend(
            query[at], key[at], value[at], layer
        )
    for place in range(3):
        at = torch.tensor([6 + 17 + place, 26 + place])
        decode = DecodeAttention(store, torch.zeros(2, dtype=int), torch.tensor([17 + place, place]), lengths)
        torch.testing.assert_close(decode.attend(query[at], key[at], value[at], layer), want[at], rtol=1e-5, atol=1e-5)
