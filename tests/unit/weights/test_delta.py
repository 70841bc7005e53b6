from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.errors import EngineError
from treadle.weights import delta
from treadle.weights.delta import INTEGERS, apply, encode

DTYPES = (torch.bfloat16, torch.float32, torch.float64, torch.float16, torch.float8_e4m3fn, torch.int64, torch.uint8)


def random_bits(count, dtype, generator):
    size = dtype.itemsize
    return torch.randint(0, 256, (count * size,), dtype=torch.uint8, generator=generator).view(dtype)


@settings(deadline=None)
@given(st.sampled_from(DTYPES), st.integers(1, 3000), st.sampled_from([0.0, 0.001, 0.03, 0.3, 0.7, 1.0]), st.integers())
def test_old_plus_what_changed_is_new_bit_for_bit(dtype, count, fraction, seed):
    """Any bits: NaNs, infinities and minus zero are numbers like others."""
    generator = torch.Generator().manual_seed(seed % 2**32)
    old, other = random_bits(count, dtype, generator), random_bits(count, dtype, generator)
    integers = INTEGERS[dtype.itemsize]
    mask = torch.rand(count, generator=generator) < fraction
    new = torch.where(mask, other.view(integers), old.view(integers))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta, "BLOCK_ELEMENTS", 1000)  # several blocks, the last one short
        found = encode(old, new.view(dtype))
    held = old.view(integers).clone().view(dtype)
    for block, data in found:
        apply(block, data, held)
    assert torch.equal(held.view(integers), new)
    assert sum(block.num_changed for block, _ in found) == int((old.view(integers) != new).sum())


def test_nothing_is_stored_where_nothing_changed():
    old = torch.randn(5000, dtype=torch.bfloat16)
    assert encode(old, old.clone()) == []


def test_steps_of_one_unit_cost_less_than_a_byte_each():
    """A tenth of the weights moves by one unit in the last place: gaps of about 10 and a sign."""
    generator = torch.Generator().manual_seed(0)
    old = torch.randn(1 << 18, generator=generator).bfloat16()
    new = old.clone()
    moved = torch.rand(len(old), generator=generator) < 0.1
    step = torch.randint(0, 2, (int(moved.sum()),), generator=generator).short() * 2 - 1
    new.view(torch.int16)[moved] += step
    found = encode(old, new)
    assert sum(len(data) for _, data in found) < 0.9 * int(moved.sum())


@pytest.mark.parametrize("fraction", [0.1, 1.0])
def test_a_damaged_block_is_refused(fraction):
    generator = torch.Generator().manual_seed(0)
    old = torch.randn(1000, generator=generator)
    new = torch.where(torch.rand(1000, generator=generator) < fraction, old + 1, old)
    ((block, data),) = encode(old, new)
    held = old.clone()
    for broken, bytes_ in (
        (block, data[:-1]),
        (replace(block, start=500), data),
        (replace(block, planes=block.planes[1:]), data),
        (block, bytes(len(data))),
    ):
        with pytest.raises(EngineError):
            apply(broken, bytes_, held)
    with pytest.raises(EngineError):
        apply(block, data, held[:900])
    assert torch.equal(held, old)
