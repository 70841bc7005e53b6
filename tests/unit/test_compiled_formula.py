"""Formulas in one loop give what they give tile by tile, and when they are compiled at all."""

import getpass
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from treadle import compiled_formula as one_pass
from treadle.algorithms.logprobs import logprobs_and_entropy
from treadle.compiled_formula import CACHE_BYTES, OnePass, compiles, tiles
from treadle.models.attention import PackedAttention
from treadle.models.forward import head_of, hidden_states
from treadle.models.layout import Family, PackedLayout
from treadle.models.load import load_model
from treadle.storage.private_folder import compile_cache

CPU = torch.device("cpu")
ROW = PackedLayout((Family(40, (30, 70)), Family(0, (60,)), Family(90, ())))
NEEDS_COMPILER = pytest.mark.skipif(not compiles("cpu"), reason="no C++ compiler here, or torch.compile is turned off")


@OnePass
def running_total(out, x, scale, total):
    out.copy_(x * scale)
    total.add_(x.sum(0))


def loss_and_gradients(folder, dtype):
    """Of a whole model: every formula there is takes part."""
    model = load_model(str(folder), dtype, CPU, fused=True)
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 90, (ROW.num_tokens,), generator=draw)
    hidden = hidden_states(model, tokens, ROW.position_ids, PackedAttention(ROW))
    temperature = torch.rand(len(hidden), generator=draw) + 0.5
    logprobs, entropy = logprobs_and_entropy(hidden, head_of(model).weight, tokens.roll(-1), temperature)
    (logprobs * torch.randn(len(hidden), generator=draw) + 0.3 * entropy).sum().backward()
    return logprobs.detach(), {name: p.grad.float() for name, p in model.named_parameters()}


@NEEDS_COMPILER
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.long)])
def test_a_model_trains_alike_compiled_and_in_tiles(tiny_model_dir, dtype, monkeypatch):
    folder = tiny_model_dir
    monkeypatch.setattr(one_pass, "compiles", lambda device_type: False)
    wanted = loss_and_gradients(folder, dtype)
    exact = wanted if dtype == torch.float32 else loss_and_gradients(folder, torch.float32)
    monkeypatch.setattr(one_pass, "compiles", lambda device_type: True)
    monkeypatch.setattr(one_pass, "COMPILED_FROM", 1)
    found = loss_and_gradients(folder, dtype)
    if dtype == torch.float32:
        torch.testing.assert_close(found[0], wanted[0], atol=1e-5, rtol=1e-5)
    for key, gradient in exact[1].items():
        gaps = [float((part[1][key] - gradient).norm() / gradient.norm()) for part in (found, wanted)]
        assert gaps[0] <= max(1e-5, 1.5 * gaps[1]), f"{key}: {gaps}"


@NEEDS_COMPILER
def test_what_pays_is_compiled_and_the_engine_compiles_nothing(monkeypatch):
    monkeypatch.setattr(one_pass, "COMPILED_FROM", 64)
    formula = OnePass(running_total.formula)
    x, total = torch.arange(80.0).view(20, 4), torch.zeros(4)
    out = torch.empty_like(x)
    formula(out[:10], x[:10], whole=(2.0, total))
    with torch.inference_mode():
        formula(out, x, whole=(2.0, total.clone()))
    assert formula.is_compiled is False
    total.zero_()
    formula(out, x, whole=(2.0, total))
    assert formula.is_compiled is True
    assert_compiled_code_is_private()
    assert torch.equal(out, 2 * x)
    assert torch.equal(total, x.sum(0))


def assert_compiled_code_is_private():
    from torch._inductor import codecache
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    headers = Path(codecache._HEADER_DIR)
    assert headers.parent == compile_cache() == Path(codecache.default_cache_dir())
    assert any(headers.glob("*.gch"))  # torch still makes them, and there
    assert Path(cache_dir()) == Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    found = compile_cache().stat()
    assert (found.st_uid, found.st_mode & 0o777) == (os.geteuid(), 0o700)


@NEEDS_COMPILER
@pytest.mark.long  # torch's headers are compiled anew: half a minute
def test_a_folder_that_others_made_first_is_not_touched(tmp_path):
    """Torch's own place for compiled code, under the name that everybody can work out, is taken."""
    temporary = tmp_path / "everybodys"
    taken = temporary / f"torchinductor_{getpass.getuser()}"
    taken.mkdir(parents=True)
    taken.chmod(0o777)
    program = (
        "import torch; from treadle.compiled_formula import OnePass\n"
        "formula = OnePass(lambda out, x: out.copy_(x.exp() + x))\n"
        "x = torch.randn(1024, 1024); formula(torch.empty_like(x), x); assert formula.is_compiled\n"
    )
    names = {"TMPDIR": str(temporary), "TREADLE_CACHE": str(tmp_path / "own")}
    given = {name: value for name, value in os.environ.items() if not name.startswith("TORCHINDUCTOR")}
    subprocess.run([sys.executable, "-c", program], env={**given, **names}, check=True, timeout=250)
    assert list(taken.iterdir()) == []
    assert (tmp_path / "own" / "inductor" / "precompiled_headers").is_dir()


def test_tile_by_tile(monkeypatch):
    monkeypatch.setattr(one_pass, "CACHE_BYTES", 96)  # 3 rows
    x, total = torch.arange(40.0).view(10, 4), torch.zeros(4)
    out, rows = torch.empty_like(x), []
    formula = OnePass(lambda out, x, scale, total: (rows.append(len(x)), running_total.formula(out, x, scale, total)))
    formula(out, x, whole=(3.0, total))
    assert rows == [3, 3, 3, 1]
    assert torch.equal(out, 3 * x)
    assert torch.equal(total, x.sum(0))


@NEEDS_COMPILER
def test_a_formula_that_can_not_be_compiled_is_computed_all_the_same(monkeypatch):
    monkeypatch.setattr(one_pass, "COMPILED_FROM", 1)

    def formula(out, x):
        out.copy_(x * 2 if x.sum().item() > 0 else x)  # asks for a number: no loop can be made of it

    odd, x = OnePass(formula), torch.ones(4, 2)
    out = torch.empty_like(x)
    with pytest.warns(UserWarning, match=r"torch\.compile failed"):
        odd(out, x)
    assert torch.equal(out, 2 * x)
    odd(out.zero_(), x)  # says so once
    assert torch.equal(out, 2 * x)


def test_tiles_cover_every_row_once():
    other = torch.device("meta")
    assert list(tiles(10, CACHE_BYTES // 4, CPU)) == [slice(0, 4), slice(4, 8), slice(8, 10)]
    assert list(tiles(2, 3 * CACHE_BYTES, CPU)) == [slice(0, 1), slice(1, 2)]
    assert list(tiles(10**6, 10**6, other)) == [slice(0, 10**6)]
    assert list(tiles(0, 100, CPU)) == list(tiles(0, 100, other)) == []
