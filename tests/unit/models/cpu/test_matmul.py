"""The compiled gradient of weights against the same product in float64."""

import pytest
import torch

from treadle.models.cpu import matmul as cpu_matmul
from treadle.models.cpu.matmul import matmul_library, weight_gradient

NEEDS_LIBRARY = pytest.mark.skipif(matmul_library() is None, reason="no GCC here, or no AMX tiles")


def numbers(*shape, seed=0, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture
def always(monkeypatch):
    """However small."""
    monkeypatch.setattr(cpu_matmul, "WORTH_A_CALL", 0)


SIZES = [(1, 1, 1), (5, 40, 7), (33, 50, 70), (300, 1000, 96), (700, 96, 1300), (577, 64, 64)]


@NEEDS_LIBRARY
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_sums_in_float32_rounded_once_with_any_number_of_threads(sizes, always):
    tokens, outputs, inputs = sizes
    grad, x = numbers(tokens, outputs), numbers(tokens, inputs, seed=1)
    found = weight_gradient(grad, x)
    exact = grad.double().T @ x.double()
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), exact, atol=1e-4, rtol=0.51 * torch.finfo(torch.bfloat16).eps)
    torch.set_num_threads(3)
    try:
        assert torch.equal(weight_gradient(grad, x), found)
    finally:
        torch.set_num_threads(1)


@NEEDS_LIBRARY
def test_rows_that_are_apart_and_tensors_that_lie_otherwise(always):
    grad, x = numbers(100, 3, 64)[:, 1], numbers(64, 100, seed=1).T
    wanted = weight_gradient(grad.contiguous(), x.contiguous())
    assert torch.equal(weight_gradient(grad, x.contiguous()), wanted)
    torch.testing.assert_close(weight_gradient(grad, x), wanted, rtol=0.01, atol=1e-3)


@NEEDS_LIBRARY
def test_what_is_not_finite_stays_where_it_is(always):
    grad, x = numbers(100, 80), numbers(100, 64, seed=1)
    wanted = weight_gradient(grad, x)
    grad[50, 33], x[7, 40] = float("nan"), float("inf")
    found = weight_gradient(grad, x)
    assert found[33].isnan().all()
    assert not found[:, 40].isfinite().any()
    rows, columns = [i for i in range(80) if i != 33], [i for i in range(64) if i != 40]
    assert torch.equal(found[rows][:, columns], wanted[rows][:, columns])


@pytest.mark.parametrize("change", ["float32", "small", "no library", "no tokens"])
def test_what_does_not_fit_is_a_matmul(change, monkeypatch):
    if change in ("float32", "no tokens"):
        monkeypatch.setattr(cpu_matmul, "WORTH_A_CALL", 0)
    if change == "no library":
        monkeypatch.setattr(cpu_matmul, "WORTH_A_CALL", 0)
        monkeypatch.setattr(cpu_matmul, "matmul_library", lambda: None)
    dtype = torch.float32 if change == "float32" else torch.bfloat16
    tokens = 0 if change == "no tokens" else 9
    grad, x = numbers(tokens, 40, dtype=dtype), numbers(tokens, 32, seed=1, dtype=dtype)
    assert torch.equal(weight_gradient(grad, x), grad.T @ x)
