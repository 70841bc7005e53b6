"""The compiled attention of a packed row against block attention in float64, and who computes what it can't."""

import ctypes

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.models.attention import LayerAttention, PackedAttention
from treadle.models.cpu import library as cpu_library
from treadle.models.cpu import packed_attention as cpu_attention
from treadle.models.cpu.packed_attention import RowAttention, attention_library
from treadle.models.layout import Family, PackedLayout

HAS_ATTENTION = attention_library(1, 32) is not None
NEEDS_ATTENTION = pytest.mark.skipif(not HAS_ATTENTION, reason="no GCC here, or no AVX-512 for bfloat16")
LAYOUTS = [
    (Family(40, (33, 1, 64)), Family(0, (5, 70)), Family(7, ())),
    (Family(3, (0, 2, 1)), Family(0, ()), Family(7, (6,)), Family(0, (0, 4))),
    (Family(600, (3, 530)), Family(1, (1,))),  # more than what is computed together, of rows and of columns
]
SHAPES = [(1, 1, 32), (3, 2, 64), (8, 1, 96), (2, 3, 128)]  # heads per key head, key heads, head size


@pytest.fixture(params=["tiles", "dot products"])
def instructions(request, monkeypatch):
    """With AMX tiles where they are, and without."""
    if request.param == "dot products":
        monkeypatch.setattr(cpu_library, "FLAGS", (*cpu_library.FLAGS, "-DWITHOUT_TILES"))
    attention_library.cache_clear()
    yield request.param
    attention_library.cache_clear()


def outputs_and_gradients(plan, leaves, toward, layer):
    leaves = [x.detach().requires_grad_() for x in leaves]
    out = plan.attend(*leaves, layer)
    return [out.detach(), *torch.autograd.grad(out, leaves, toward)]


def numbers(layout, repeat, kv_heads, size, seed=0):
    """Query, key and value as parts of one matmul's output, and a gradient."""
    generator = torch.Generator().manual_seed(seed)
    heads = torch.randn(layout.num_tokens, (repeat + 2) * kv_heads, size, generator=generator).bfloat16()
    toward = torch.randn(layout.num_tokens, repeat * kv_heads, size, generator=generator).bfloat16()
    return heads.split([repeat * kv_heads, kv_heads, kv_heads], dim=1), toward


def check(layout, shape, window):
    leaves, toward = numbers(layout, *shape)
    layer = LayerAttention(scaling=shape[2] ** -0.5, sliding_window=window)
    assert RowAttention(layout).attend(*leaves, layer.scaling, window) is not None
    found = outputs_and_gradients(PackedAttention(layout), leaves, toward, layer)
    exact = outputs_and_gradients(
        PackedAttention(layout, "batched"), [x.double() for x in leaves], toward.double(), layer
    )
    for name, ours, theirs in zip(("output", "query", "key", "value"), found, exact, strict=True):
        assert ours.dtype == torch.bfloat16
        assert ours.shape == theirs.shape
        # The output is kept in bfloat16, so what it adds to a gradient of scores is known to 2^-9 only.
        assert (ours.double() - theirs).norm() <= 4e-3 * theirs.norm() + 1e-3 * toward.double().norm(), name
        atol = 0.02 * theirs.abs().max().item() + 5e-3
        torch.testing.assert_close(ours.double(), theirs, atol=atol, rtol=0.02, msg=lambda m, n=name: f"{n}: {m}")


@NEEDS_ATTENTION
@pytest.mark.parametrize("window", [None, 1, 50])
@pytest.mark.parametrize("families", LAYOUTS, ids=["some", "small", "long"])
@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_output_and_gradients_are_those_of_block_attention(families, shape, window, instructions):
    check(PackedLayout(families), shape, window)


@NEEDS_ATTENTION
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_shape_of_heads(shape):
    check(PackedLayout(LAYOUTS[0]), shape, None)


families = st.builds(Family, st.integers(0, 70), st.lists(st.integers(0, 70), max_size=3).map(tuple))


@NEEDS_ATTENTION
@settings(max_examples=25, deadline=None)
@given(
    st.lists(families, min_size=1, max_size=4).map(tuple).filter(lambda given: any(f.num_tokens for f in given)),
    st.sampled_from([None, 1, 7, 33, 100]),
)
def test_any_layout(families, window):
    check(PackedLayout(families), (3, 2, 64), window)


@NEEDS_ATTENTION
def test_large_scores_and_what_is_not_finite(instructions):
    layout = PackedLayout((Family(3, (40, 2)), Family(5, ())))
    (query, key, value), toward = numbers(layout, 3, 1, 64)
    layer = LayerAttention(scaling=1.0)
    leaves = [query * 100, key * 100, value]
    found = outputs_and_gradients(PackedAttention(layout), leaves, toward, layer)
    exact = outputs_and_gradients(
        PackedAttention(layout, "batched"), [x.double() for x in leaves], toward.double(), layer
    )
    assert all(x.isfinite().all() for x in found)
    torch.testing.assert_close(found[0].double(), exact[0], atol=0.02, rtol=0.02)
    for number in (float("nan"), float("inf")):
        damaged = query.clone()
        damaged[4, 1, 0] = number
        out = PackedAttention(layout).attend(damaged, key, value, layer)
        assert not out[4, 1].isfinite().all()
        assert out[3].isfinite().all()
        assert out[5:].isfinite().all()


@NEEDS_ATTENTION
def test_threads_change_no_bit():
    layout = PackedLayout(tuple(Family(40, (33, 50)) for _ in range(5)))
    leaves, toward = numbers(layout, 3, 2, 64)
    found = {}
    for threads in (1, 3):
        torch.set_num_threads(threads)
        try:
            found[threads] = outputs_and_gradients(PackedAttention(layout), leaves, toward, LayerAttention(0.125))
        finally:
            torch.set_num_threads(1)
    assert all(torch.equal(*pair) for pair in zip(found[1], found[3], strict=True))


@NEEDS_ATTENTION
def test_tensors_that_lie_otherwise():
    layout = PackedLayout((Family(9, (20, 30)),))
    leaves, toward = numbers(layout, 3, 2, 64)
    layer = LayerAttention(0.125)
    wanted = outputs_and_gradients(PackedAttention(layout), leaves, toward, layer)
    turned = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in leaves]
    found = outputs_and_gradients(PackedAttention(layout), turned, toward.flip(2).contiguous().flip(2), layer)
    assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))


@NEEDS_ATTENTION
def test_a_matmul_of_torch_before_and_after():
    """It uses the same tiles, in a shape of its own."""
    layout = PackedLayout((Family(9, (20, 30)),))
    leaves, _ = numbers(layout, 3, 2, 64)
    x = torch.randn(200, 320, generator=torch.Generator().manual_seed(0)).bfloat16()
    wanted = x @ x.T
    PackedAttention(layout).attend(*leaves, LayerAttention(0.125))
    assert torch.equal(x @ x.T, wanted)


@pytest.mark.parametrize("change", ["float32", "head size", "value size", "no library"])
def test_what_does_not_fit_goes_the_plain_way(change, monkeypatch):
    layout = PackedLayout((Family(3, (2, 4)),))
    leaves, _ = numbers(layout, 2, 1, 24 if change == "head size" else 32)
    if change == "float32":
        leaves = tuple(x.float() for x in leaves)
    if change == "value size":
        leaves = (*leaves[:2], leaves[2][..., :16])
    if change == "no library":
        monkeypatch.setattr(cpu_attention, "attention_library", lambda *_: None)
    assert RowAttention(layout).attend(*leaves, 1.0, None) is None
    if change != "value size":
        assert PackedAttention(layout).attend(*leaves, LayerAttention(1.0)).shape == leaves[0].shape


def test_a_processor_without_such_instructions(monkeypatch):
    """The same file, compiled for any processor of this kind, says that it can do nothing."""
    flags = tuple(flag for flag in cpu_library.FLAGS if not flag.startswith("-march"))
    monkeypatch.setattr(cpu_library, "FLAGS", flags)
    library = cpu_library.load(cpu_attention.SOURCE, {"HEADS_PER_KV_HEAD": 1, "HEAD_SIZE": 32})
    if library is None:
        pytest.skip("no GCC here, or torch.compile is turned off")
    library.ready.restype = ctypes.c_bool
    assert not library.ready()
    attention_library.cache_clear()
    assert attention_library(1, 32) is None
    attention_library.cache_clear()
