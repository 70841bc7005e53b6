"""The compiled functions of a decode step against torch's operations, and what happens where they can't be made."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from treadle.models.attention import LayerAttention
from treadle.models.cpu import library as cpu_library
from treadle.models.cpu.decode_kernels import cpu_kernels, load_kernels
from treadle.models.cpu.fused_layers import rotate
from treadle.models.cpu.inference import FusedInference
from treadle.models.cpu.norm import rms_norm
from treadle.models.load import load_model
from treadle.rollout.engines.torch_engine import attention
from treadle.rollout.engines.torch_engine.attention import DecodeAttention
from treadle.rollout.engines.torch_engine.kv_store import KVShape, KVStore

HAS_KERNELS = load_kernels(torch.float32, 1, 32) is not None
NEEDS_COMPILER = pytest.mark.skipif(not HAS_KERNELS, reason="no GCC here, or torch.compile is turned off")
BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
ROWS = pytest.mark.parametrize("rows", [1, 5, 300])


def numbers(*shape, dtype, seed=0, scale=1.0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def assert_rounded_once(found, exact):
    """Within half of the last place of `found`'s dtype, and a little for the float32 inside."""
    eps = torch.finfo(found.dtype).eps if found.dtype != torch.float32 else 8 * torch.finfo(torch.float32).eps
    torch.testing.assert_close(found.double(), exact.double(), rtol=0.51 * eps, atol=2e-6)


@NEEDS_COMPILER
@BOTH
@ROWS
def test_norm_gate_and_positions(dtype, rows):
    kernels = load_kernels(dtype, 3, 64)
    x = numbers(rows, 5 * 64, dtype=dtype)[:, 64 : 4 * 64]  # rows that are apart
    weight = numbers(192, dtype=torch.float32, seed=1)
    assert_rounded_once(kernels.rms_norm(x, weight, 1e-3), rms_norm(x.double(), weight.double(), 1e-3)[0])

    both = numbers(rows, 2 * 192, dtype=dtype, scale=20.0)
    gate, up = both.double().chunk(2, dim=-1)
    assert_rounded_once(kernels.silu_times(both), F.silu(gate) * up)

    heads = numbers(rows, 5, 64, dtype=dtype)[:, :4]
    angle = numbers(rows, 1, 64, dtype=torch.float32, seed=2)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    exact = rotate(heads.double(), cos.double(), sin.double())
    assert_rounded_once(kernels.rotate(heads, cos, sin), exact)


def test_numbers_out_of_range():
    kernels = load_kernels(torch.bfloat16, 1, 32)
    if kernels is None:
        pytest.skip("no C++ compiler here, or torch.compile is turned off")
    gate = torch.tensor([0.0, -1e30, 1e30, -100.0, 100.0, float("nan"), float("inf"), float("-inf")] * 2)
    found = kernels.silu_times(torch.cat([gate, torch.ones(16)]).to(torch.bfloat16)[None])[0, :8].float()
    assert found[:2].tolist() == [0.0, 0.0]
    assert found[2:5].tolist() == pytest.approx([1e30, 0.0, 100.0], rel=4e-3)
    assert found[5].isnan()
    assert found[6] == float("inf")


@NEEDS_COMPILER
@BOTH
@pytest.mark.parametrize("by_matmul", [False, True], ids=["prompts in the kernel", "prompts by a matmul"])
@pytest.mark.parametrize("window", [None, 1, 20, 50])
@pytest.mark.parametrize(("kv_heads", "repeat", "size"), [(3, 3, 64), (1, 7, 32), (2, 1, 96), (1, 8, 128)])
def test_decode_attention(dtype, by_matmul, window, kv_heads, repeat, size, monkeypatch):
    """Rows in any order at places of their own, prompts of several lengths: as the operations in float64 would have it."""
    if by_matmul:
        monkeypatch.setattr(attention, "READ_BY_ROW", 0)
    shape = KVShape(1, kv_heads, size, 3, 7, 48, 48, dtype)
    store, other = KVStore(shape, torch.device("cpu")), KVStore(shape, torch.device("cpu"))
    lengths, slots = torch.tensor([33, 1, 48]), torch.tensor([2, 0, 0, 1, 2, 0])
    places = torch.tensor([0, 17, 40, 5, 31, 16])
    layer = LayerAttention(size**-0.5, window)
    prompts, rows = (numbers(2, n, kv_heads, 48, size, dtype=dtype, seed=n, scale=1.5) for n in (3, 7))
    for one in (store, other):
        one.fit_rows(41)
        one.prefixes.layers[0][:] = prompts
        one.rows.layers[0][:] = rows[..., : one.rows.span, :]
    qkv = numbers(6, kv_heads * (repeat + 2), size, dtype=dtype, seed=9, scale=1.5)
    new = qkv.split([kv_heads * repeat, kv_heads, kv_heads], dim=1)

    found = DecodeAttention(store, slots, places, lengths, load_kernels(dtype, repeat, size)).attend(*new, layer)
    plain = DecodeAttention(other, slots, places, lengths).attend(*new, layer)
    assert torch.equal(store.rows.layers[0], other.rows.layers[0])
    for i in range(6):
        slot, place = int(slots[i]), int(places[i])
        keys, values = (
            torch.cat([prompts[j, slot, :, : lengths[slot]], other.rows.layers[0][j, i, :, : place + 1]], 1).double()
            for j in range(2)
        )
        keys, values = (x[:, -(window or 1000) :].repeat_interleave(repeat, 0) for x in (keys, values))
        shares = torch.softmax(keys @ new[0][i].double()[..., None] * layer.scaling, dim=1)
        exact = (shares * values).sum(1)
        gap, of_plain = ((part[i].double() - exact).abs().mean() for part in (found, plain))
        assert gap <= max(1e-6, 1.1 * float(of_plain))


@NEEDS_COMPILER
def test_a_row_comes_out_the_same_whatever_else_runs():
    """Bit by bit: a sample does not depend on its neighbours."""
    kernels = load_kernels(torch.bfloat16, 3, 64)
    shape = KVShape(1, 3, 64, 1, 40, 48, 16, torch.bfloat16)
    query, key, value = (numbers(40, n, 64, dtype=torch.bfloat16, seed=n) for n in (9, 3, 4))
    outs = []
    for count in (40, 1):
        store = KVStore(shape, torch.device("cpu"))
        store.prefixes.layers[0][:] = numbers(2, 1, 3, 48, 64, dtype=torch.bfloat16)
        zeros = torch.zeros(count, dtype=torch.int64)
        decode = DecodeAttention(store, zeros, zeros, torch.tensor([48]), kernels)
        outs.append(decode.attend(query[:count], key[:count], value[:count, :3], LayerAttention(0.125))[0])
    assert torch.equal(*outs)


def test_sizes_that_do_not_fit_go_the_plain_way():
    fits = {
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "hidden_size": 64,
        "intermediate_size": 96,
    }
    for change in ({}, {"head_dim": 48}, {"hidden_size": 60}, {"intermediate_size": 100}, {"num_attention_heads": 5}):
        found = cpu_kernels(SimpleNamespace(**{**fits, **change}), torch.float32)
        assert (found is not None) == (not change and HAS_KERNELS)
    assert cpu_kernels(SimpleNamespace(**fits), torch.float16) is None


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path / "cache"))
    load_kernels.cache_clear()
    yield tmp_path / "cache" / "kernels"
    load_kernels.cache_clear()


@NEEDS_COMPILER
def test_threads_share_rows_and_change_no_bit(make_folder):
    model = load_model(str(make_folder("qwen2, heads of 64")), torch.bfloat16, torch.device("cpu"))
    fused = FusedInference(model)
    fused.refresh()
    kernels, found = fused.kernels, {}
    shape = KVShape(2, 1, 64, 2, 40, 48, 16, torch.bfloat16)
    slots, lengths = torch.arange(40) % 2, torch.tensor([48, 31])
    for threads in (1, 4):
        torch.set_num_threads(threads)
        try:
            for rows in (3, 8, 40):
                store = KVStore(shape, torch.device("cpu"))
                store.prefixes.layers[1][:] = numbers(2, 2, 1, 48, 64, dtype=torch.bfloat16)
                plan = DecodeAttention(store, slots[:rows], torch.zeros(rows, dtype=torch.int64), lengths, kernels)
                with torch.inference_mode():
                    hidden = fused.hidden_states(torch.arange(rows), lengths[slots[:rows]], plan)
                found[threads, rows] = [hidden]
            wide = numbers(300, 512, dtype=torch.bfloat16)
            uniform = torch.rand(300, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
            drawn = kernels.draw(wide, torch.ones(300), torch.zeros(300, dtype=torch.bool), uniform)
            angle = numbers(300, 1, 64, dtype=torch.bfloat16)
            found[threads, 300] = [*drawn[:2], kernels.silu_times(wide), kernels.rms_norm(wide, torch.ones(512), 1e-5)]
            found[threads, 300].append(kernels.rotate(wide.view(300, 8, 64), angle, angle))
        finally:
            torch.set_num_threads(1)
    for rows in (3, 8, 40, 300):
        assert all(torch.equal(*pair) for pair in zip(found[1, rows], found[4, rows], strict=True))


@NEEDS_COMPILER
def test_tokens_are_drawn_whatever_the_default_dtype_is():
    """transformers changes it, for all threads, while a model is made."""
    logits, uniform = numbers(4, 100, dtype=torch.float32), torch.full((4,), 0.5, dtype=torch.float64)
    given = logits, torch.ones(4), torch.zeros(4, dtype=torch.bool), uniform
    wanted = load_kernels(torch.float32, 1, 32).draw(*given)
    torch.set_default_dtype(torch.float64)
    try:
        found = load_kernels(torch.float32, 1, 32).draw(*given)
    finally:
        torch.set_default_dtype(torch.float32)
    assert found[1].dtype == torch.float32
    assert all(torch.equal(one, other) for one, other in zip(found[:2], wanted[:2], strict=True))


@NEEDS_COMPILER
@pytest.mark.parametrize("changed", ["places", "slots", "rows", "lengths"])
def test_nothing_outside_the_store_is_touched(changed):
    store = KVStore(KVShape(1, 1, 32, 2, 2, 16, 16, torch.float32), torch.device("cpu"))
    given = {"slots": [0, 1], "places": [0, 15], "lengths": [16, 3]}
    if changed == "rows":
        given |= {"slots": [0, 1, 0], "places": [0, 0, 0]}
    else:
        given[changed] = [0, {"places": 16, "slots": 2, "lengths": 17}[changed]]
    slots, places, lengths = (torch.tensor(given[name]) for name in ("slots", "places", "lengths"))
    with pytest.raises(AssertionError, match=r"store|prompt"):
        DecodeAttention(store, slots, places, lengths, load_kernels(torch.float32, 1, 32))


@NEEDS_COMPILER
def test_compiled_once_and_made_anew_where_damaged(empty_cache, tmp_path, monkeypatch):
    def library_in(cache):
        monkeypatch.setenv("TREADLE_CACHE", str(cache))
        load_kernels.cache_clear()
        assert load_kernels(torch.float32, 1, 32) is not None
        (library,) = (cache / "kernels").iterdir()
        return library, library.stat().st_ino

    library, made = library_in(empty_cache.parent)
    assert library_in(empty_cache.parent) == (library, made)
    damaged = tmp_path / "other" / "kernels" / library.name
    damaged.parent.mkdir(parents=True)
    damaged.touch()
    assert library_in(tmp_path / "other")[0] == damaged
    assert damaged.stat().st_size == library.stat().st_size


@NEEDS_COMPILER
def test_a_library_that_others_can_replace_is_not_loaded(empty_cache):
    empty_cache.mkdir(parents=True)
    empty_cache.chmod(0o777)
    with pytest.warns(UserWarning, match="can be written by other users"):
        assert load_kernels(torch.float32, 1, 32) is not None
    assert list(empty_cache.iterdir()) == []


@NEEDS_COMPILER
@pytest.mark.parametrize("place", ["/proc/treadle", None])
def test_without_a_place_to_keep_it(monkeypatch, place):
    """Nothing can be made in /proc; None is a user without a home."""
    for name in ("TREADLE_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    if place:
        monkeypatch.setenv("TREADLE_CACHE", place)
    else:
        monkeypatch.setattr("pathlib.Path.home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    load_kernels.cache_clear()
    try:
        assert load_kernels(torch.float32, 1, 32) is not None
    finally:
        load_kernels.cache_clear()


FAILS = ["echo no such flag >&2; exit 1", "exec sleep 5"]


@pytest.mark.parametrize("script", FAILS)
def test_a_compiler_that_fails_is_said_once_and_nothing_is_left(tmp_path, monkeypatch, empty_cache, script):
    compiler = tmp_path / "c++"
    compiler.write_text(f"#!/bin/sh\n[ $1 = --version ] && exec echo Free Software Foundation\n{script}\n")
    compiler.chmod(0o755)
    monkeypatch.setattr(cpu_library, "cpp_compiler", lambda: str(compiler))
    monkeypatch.setattr(cpu_library, "COMPILE_SECONDS", 1.0)
    with pytest.warns(
        UserWarning, match=r"could not compile decode_kernels.cpp.*(no such flag|did not end within 1 s)"
    ):
        assert load_kernels(torch.float32, 1, 32) is None
    assert load_kernels(torch.float32, 1, 32) is None  # said once
    assert list(empty_cache.iterdir()) == []


def test_another_compiler_is_left_alone(tmp_path, monkeypatch, empty_cache):
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho clang version 18.1.3\n")
    compiler.chmod(0o755)
    monkeypatch.setattr(cpu_library, "cpp_compiler", lambda: str(compiler))
    assert load_kernels(torch.float32, 1, 32) is None
