"""Packed attention against attention written out sequence by sequence in float64, and what may not be seen."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.models.attention import LayerAttention, PackedAttention
from treadle.models.cpu import block_attention
from treadle.models.layout import Family, PackedLayout

BACKENDS = ("batched", "sdpa", "auto")
FAMILIES = [
    (Family(5, (2, 4)),),
    (Family(5, ()),),
    (Family(0, (3,)),),
    (Family(0, (1, 5)), Family(3, ())),
    (Family(4, (0,)),),
    (Family(4, (0, 0)), Family(1, (0,))),
    (Family(3, (0, 2, 1)), Family(7, (6,)), Family(0, (0, 4))),
    (Family(0, ()), Family(2, (1,))),
    tuple(Family(1, (1,)) for _ in range(5)),
    (*(Family(1, ()) for _ in range(8)), Family(20, (30,))),  # too ragged to lay side by side
]
LAYERS = [
    LayerAttention(scaling=0.5),
    LayerAttention(scaling=0.3, sliding_window=3),
    LayerAttention(scaling=0.5, softcap=1.5),
    LayerAttention(scaling=0.5, sliding_window=2, softcap=0.7),
]

families = st.lists(
    st.builds(Family, st.integers(0, 6), st.lists(st.integers(0, 5), max_size=3).map(tuple)), min_size=1, max_size=4
).map(tuple)


def rows_of(layout: PackedLayout) -> list[tuple[list[int], list[int]]]:
    """(rows seen at all, rows of its own) of each prefix and each suffix."""
    out = []
    at = 0
    for family in layout.families:
        prefix = list(range(at, at + family.prefix))
        out.append((prefix, prefix))
        at += family.prefix
        for length in family.suffixes:
            own = list(range(at, at + length))
            out.append((prefix + own, own))
            at += length
    return out


def written_out(query, key, value, layout: PackedLayout, layer: LayerAttention) -> torch.Tensor:
    """Softmax attention one query and one head at a time."""
    repeat = query.shape[1] // key.shape[1]
    out = {}
    for seen, own in rows_of(layout):
        for row in own:
            visible = seen[: seen.index(row) + 1]
            if layer.sliding_window is not None:
                visible = visible[-layer.sliding_window :]
            heads = []
            for head in range(query.shape[1]):
                scores = key[visible, head // repeat] @ query[row, head] * layer.scaling
                if layer.softcap is not None:
                    scores = layer.softcap * torch.tanh(scores / layer.softcap)
                heads.append(torch.softmax(scores, 0) @ value[visible, head // repeat])
            out[row] = torch.stack(heads)
    return torch.stack([out[row] for row in range(layout.num_tokens)])


def inputs(layout: PackedLayout, kv_heads: int, dtype=torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(layout.num_tokens)
    shapes = [(layout.num_tokens, heads, 8) for heads in (4, kv_heads, kv_heads, 4)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def output_and_gradients(attend, layout: PackedLayout, kv_heads: int, dtype) -> list[torch.Tensor]:
    query, key, value, toward = inputs(layout, kv_heads, dtype)
    leaves = [x.requires_grad_() for x in (query, key, value)]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad((out * toward).sum(), leaves)]


def check(layout: PackedLayout, layer: LayerAttention, kv_heads: int, backend: str) -> None:
    plan = PackedAttention(layout, backend)
    found = output_and_gradients(lambda q, k, v: plan.attend(q, k, v, layer), layout, kv_heads, torch.float32)
    expected = output_and_gradients(
        lambda q, k, v: written_out(q, k, v, layout, layer), layout, kv_heads, torch.float64
    )
    for name, ours, theirs in zip(("output", "query", "key", "value"), found, expected, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.double(), theirs, atol=1e-5, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layer", LAYERS, ids=["plain", "window", "softcap", "window+softcap"])
@pytest.mark.parametrize("families", FAMILIES, ids=str)
def test_output_and_gradients_are_those_of_each_sequence_alone(families, layer, backend):
    check(PackedLayout(families), layer, 2, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_any_number_of_key_heads(kv_heads, backend):
    check(PackedLayout((Family(3, (2, 1)), Family(4, (3,)))), LAYERS[1], kv_heads, backend)


@settings(max_examples=25, deadline=None)
@given(families=families.filter(lambda f: sum(x.num_tokens for x in f) > 0), layer=st.sampled_from(LAYERS))
def test_any_layout(families, layer):
    for backend in ("batched", "sdpa"):
        check(PackedLayout(families), layer, 2, backend)


@pytest.mark.parametrize(("tokens", "scores"), [(1, 1), (2, 12), (3, 40), (256, 12), (2, 1 << 22)])
@pytest.mark.parametrize("layer", LAYERS, ids=["plain", "window", "softcap", "window+softcap"])
@pytest.mark.parametrize("families", FAMILIES[:7], ids=str)
def test_blocks_computed_in_parts(families, layer, tokens, scores, monkeypatch):
    """However few tokens look at a time, and however few scores are computed together."""
    monkeypatch.setattr(block_attention, "CAUSAL_TOKENS", tokens)
    monkeypatch.setattr(block_attention, "CACHED_SCORES", scores)
    check(PackedLayout(families), layer, 2, "batched")


@pytest.mark.parametrize("backend", ["batched", "sdpa"])
def test_a_row_without_tokens(backend):
    layout = PackedLayout((Family(0, ()),))
    query = torch.zeros(0, 4, 8)
    assert PackedAttention(layout, backend).attend(query, query, query, LAYERS[0]).shape == (0, 4, 8)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layer", LAYERS, ids=["plain", "window", "softcap", "window+softcap"])
def test_no_gradient_reaches_what_may_not_be_seen(layer, backend):
    layout = PackedLayout((Family(3, (2, 4)), Family(0, (3,)), Family(4, ())))
    query, key, value, toward = inputs(layout, 2)
    leaves = [key.requires_grad_(), value.requires_grad_()]
    out = PackedAttention(layout, backend).attend(query, *leaves, layer)
    window = layer.sliding_window or layout.num_tokens
    for seen, own in rows_of(layout):
        for row in own:
            for grad in torch.autograd.grad((out[row] * toward[row]).sum(), leaves, retain_graph=True):
                touched = torch.nonzero(grad.flatten(1).abs().sum(1)).squeeze(1).tolist()
                visible = seen[: seen.index(row) + 1][-window:]
                if grad.shape == value.shape and len(visible) > 1:
                    assert touched == visible
                assert set(touched) <= set(visible)
