"""The compiled head against the tiles of torch's operations in float64, and who computes what it can't."""

import pytest
import torch

from treadle.algorithms import logprobs_and_entropy
from treadle.models.cpu.head import CpuHead, head_library

KERNEL = CpuHead()
NEEDS_KERNEL = pytest.mark.skipif(head_library() is None, reason="no GCC here, or no AMX tiles")
SIZES = [(1, 32, 7), (33, 80, 515), (300, 576, 1000)]  # rows, hidden size, vocabulary


def inputs(rows, size, vocab, scale=0.3):
    generator = torch.Generator().manual_seed(rows)
    hidden, weight = (torch.randn(n, size, generator=generator).mul(scale).bfloat16() for n in (rows, vocab))
    targets = torch.randint(vocab, (rows,), generator=generator)
    targets[0] = vocab - 1
    temperature = torch.rand(rows, generator=generator) + 0.5
    return (hidden, weight), targets, temperature


def outputs_and_gradients(leaves, targets, temperature, **options):
    leaves = [x.detach().requires_grad_() for x in leaves]
    outputs = [x for x in logprobs_and_entropy(*leaves, targets, temperature, **options) if x is not None]
    toward = [torch.linspace(-1, 1, len(x), dtype=x.dtype) + i for i, x in enumerate(outputs)]
    total = sum((x * y).sum() for x, y in zip(outputs, toward, strict=True) if x.requires_grad)
    return [x.detach() for x in outputs], torch.autograd.grad(total, leaves)


@NEEDS_KERNEL
@pytest.mark.parametrize("entropy_grad", [True, False])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_values_and_gradients_are_those_of_the_tiles(sizes, entropy_grad):
    leaves, *rest = inputs(*sizes)
    options = {"logit_scale": 1.3, "entropy_grad": entropy_grad}
    found, gradients = outputs_and_gradients(leaves, *rest, **options, kernel=KERNEL)
    exact, exact_gradients = outputs_and_gradients([x.double() for x in leaves], *rest, **options)
    for ours, theirs in zip(found, exact, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.double(), theirs, atol=5e-6, rtol=2e-6)  # the scores are not rounded
    for ours, theirs in zip(gradients, exact_gradients, strict=True):
        assert ours.dtype == torch.bfloat16
        assert (ours.double() - theirs).norm() <= 4e-3 * theirs.norm()


@NEEDS_KERNEL
def test_only_what_is_asked_for():
    (hidden, weight), *rest = inputs(33, 80, 515)
    alone, _ = logprobs_and_entropy(hidden, weight, *rest, kernel=KERNEL)
    _, (of_hidden, of_weight) = outputs_and_gradients((hidden, weight), *rest, kernel=KERNEL, entropy_grad=False)
    toward = torch.linspace(-1, 1, 33)
    for leaf, wanted in ((hidden, of_hidden), (weight, of_weight)):
        asked = leaf.detach().requires_grad_()
        pair = (asked, weight) if leaf is hidden else (hidden, asked)
        logprobs, _ = logprobs_and_entropy(*pair, *rest, kernel=KERNEL)
        assert torch.equal(logprobs, alone)
        assert torch.equal(torch.autograd.grad((logprobs * toward).sum(), asked)[0], wanted)


@NEEDS_KERNEL
def test_sure_rows_and_rows_that_are_not_finite():
    (hidden, weight), targets, _ = inputs(40, 64, 600, scale=6.0)
    found = logprobs_and_entropy(hidden, weight, targets, kernel=KERNEL)
    exact = logprobs_and_entropy(hidden.double(), weight.double(), targets)
    assert float(exact[0].min()) < -1000
    for ours, theirs in zip(found, exact, strict=True):
        torch.testing.assert_close(ours.double(), theirs, atol=1e-3, rtol=1e-6)
    for number in (float("nan"), float("inf")):
        damaged = hidden.clone()
        damaged[5, 3] = number
        logprobs, entropy = logprobs_and_entropy(damaged, weight, targets, kernel=KERNEL)
        assert not logprobs[5].isfinite()
        assert not entropy[5].isfinite()
        others = [i for i in range(40) if i != 5]
        assert torch.equal(logprobs[others], found[0][others])


@NEEDS_KERNEL
def test_the_same_in_every_run_and_close_with_more_threads():
    leaves, *rest = inputs(100, 64, 5000)
    found = []
    for threads in (1, 3, 3):
        torch.set_num_threads(threads)
        try:
            found.append(outputs_and_gradients(leaves, *rest, kernel=KERNEL))
        finally:
            torch.set_num_threads(1)
    for (one, of_one), (other, of_other) in zip(found[1:], found[:2], strict=True):
        for x, y in zip((*one, *of_one), (*other, *of_other), strict=True):
            torch.testing.assert_close(x, y, atol=1e-5, rtol=8e-3)
    assert all(torch.equal(*pair) for pair in zip(found[1][1], found[2][1], strict=True))
    assert all(torch.equal(*pair) for pair in zip(found[1][0], found[2][0], strict=True))


@NEEDS_KERNEL
def test_tensors_that_lie_otherwise():
    leaves, *rest = inputs(33, 80, 515)
    wanted = outputs_and_gradients(leaves, *rest, kernel=KERNEL)
    found = outputs_and_gradients([x.T.contiguous().T for x in leaves], *rest, kernel=KERNEL)
    for one, other in zip(found, wanted, strict=True):
        assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))


class Refuses:
    """A kernel that may not be called."""

    def fits(self, hidden, weight):
        return KERNEL.fits(hidden, weight)


@pytest.mark.parametrize("change", ["float32", "bias", "softcap", "no rows"])
def test_what_does_not_fit_goes_the_plain_way(change):
    leaves, targets, temperature = inputs(5, 32, 50)
    options = {"bias": torch.zeros(50).bfloat16()} if change == "bias" else {}
    options |= {"logit_softcap": 3.0} if change == "softcap" else {}
    if change == "float32":
        leaves = [x.float() for x in leaves]
    if change == "no rows":
        leaves, targets, temperature = (leaves[0][:0], leaves[1]), targets[:0], temperature[:0]
    found = logprobs_and_entropy(*leaves, targets, temperature, kernel=Refuses(), **options)
    wanted = logprobs_and_entropy(*leaves, targets, temperature, **options)
    assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))
