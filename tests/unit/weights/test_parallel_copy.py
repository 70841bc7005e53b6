import threading

import pytest
import torch

from treadle.weights.parallel_copy import PIECE_BYTES, copy_and_digest, copy_pairs, digest, spread


@pytest.fixture(params=[1, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_results_come_in_order_from_as_many_threads_as_torch_uses(threads):
    gate = threading.Barrier(threads)
    seen = set()

    def square(x):
        if x < threads:
            gate.wait(10)  # so that each of them gets one
        seen.add(threading.get_ident())
        return x * x

    assert spread(square, iter(range(100))) == [x * x for x in range(100)]
    assert len(seen) == threads
    assert spread(square, []) == []


def test_what_one_thread_raises_is_raised(threads):
    def fail(x):
        if x == 37:
            raise KeyError(x)

    with pytest.raises(KeyError, match="37"):
        spread(fail, range(100))


def test_copies_of_any_size_and_dtype_and_the_digest_of_what_was_copied(threads):
    sizes = (0, 1, 7, PIECE_BYTES // 2, PIECE_BYTES // 2 + 1, 3 * PIECE_BYTES + 5)
    sources = [torch.randn(size) for size in sizes] + [torch.randn(50, 70).t(), torch.arange(5), torch.tensor(3.0)]
    dtypes = (torch.float32, torch.bfloat16)
    for dtype in dtypes:
        targets = [torch.zeros(s.shape, dtype=dtype if s.is_floating_point() else s.dtype) for s in sources]
        found = copy_and_digest(zip(targets, sources, strict=True))
        assert all(torch.equal(t, s.to(t.dtype)) for t, s in zip(targets, sources, strict=True))
        again = [torch.zeros_like(t) for t in targets]
        copy_pairs(zip(again, sources, strict=True))
        assert all(torch.equal(t, a) for t, a in zip(targets, again, strict=True))
        assert digest(targets) == digest(again) == found
        again[3][-1] += 1
        assert digest(again) != found


def test_a_target_with_strides_is_written_as_well(threads):
    target, source = torch.zeros(30, 40).t(), torch.randn(40, 30)
    copy_pairs([(target, source)])
    assert torch.equal(target, source)
