import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from treadle.algorithms.logprobs import logprobs_and_entropy


def problem(rows=5, vocab=7, width=3, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    targets = torch.randint(0, vocab, (rows,), generator=generator)
    temperature = torch.rand(rows, generator=generator, dtype=torch.float64) + 0.5
    return draw(rows, width), draw(vocab, width), draw(vocab), targets, temperature


def naive(hidden, weight, targets, temperature=1.0, bias=None, logit_scale=1.0, logit_softcap=None):
    """The plain formula, with all N × V logits at once."""
    logits = torch.nn.functional.linear(hidden, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) * logit_scale
    if logit_softcap is not None:
        logits = logit_softcap * torch.tanh(logits / logit_softcap)
    temperature = torch.as_tensor(temperature, dtype=logits.dtype).expand(len(targets))
    log_probs = torch.log_softmax(logits / temperature[:, None], -1)
    return log_probs.gather(1, targets[:, None]).squeeze(1), -(log_probs.exp() * log_probs).sum(-1)


def gradients(outputs, inputs, seed=3):
    generator = torch.Generator().manual_seed(seed)
    total = 0
    for output in outputs:
        direction = torch.randn(output.shape, generator=generator, dtype=torch.float64)
        total = total + (output * direction.to(output.dtype)).sum()
    return torch.autograd.grad(total, inputs)


def test_by_hand():
    # Logits ln 1, ln 2, ln 5: probabilities 1/8, 2/8, 5/8; at temperature 1/2 they are 1/30, 4/30, 25/30.
    hidden = torch.ones(2, 1, dtype=torch.float64)
    weight = torch.tensor([[1.0], [2.0], [5.0]], dtype=torch.float64).log()
    logprobs, entropy = logprobs_and_entropy(hidden, weight, torch.tensor([2, 1]), torch.tensor([1.0, 0.5]))

    def entropy_of(*probs):
        return -sum(p * math.log(p) for p in probs)

    expected = torch.tensor([math.log(5 / 8), math.log(4 / 30)], dtype=torch.float64)
    torch.testing.assert_close(logprobs, expected)
    expected = torch.tensor([entropy_of(1 / 8, 2 / 8, 5 / 8), entropy_of(1 / 30, 4 / 30, 25 / 30)], dtype=torch.float64)
    torch.testing.assert_close(entropy, expected)


def test_gradient_by_hand():
    # d logprob / d logits = onehot - p: for token 2 of the same three, times the weights ln 1, ln 2, ln 5.
    hidden = torch.ones(1, 1, dtype=torch.float64, requires_grad=True)
    weight = torch.tensor([[1.0], [2.0], [5.0]], dtype=torch.float64).log().requires_grad_()
    logprobs, _ = logprobs_and_entropy(hidden, weight, torch.tensor([2]))
    logprobs.sum().backward()
    expected = torch.tensor([[-1 / 8], [-2 / 8], [3 / 8]], dtype=torch.float64)
    torch.testing.assert_close(weight.grad, expected)
    torch.testing.assert_close(hidden.grad.item(), (-2 * math.log(2) + 3 * math.log(5)) / 8)


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_gradcheck(softcap, with_bias, with_entropy):
    hidden, weight, bias, targets, temperature = problem(rows=3, vocab=5, width=2)

    def run(hidden, weight, bias):
        result = logprobs_and_entropy(
            hidden,
            weight,
            targets,
            temperature,
            bias=bias if with_bias else None,
            logit_scale=0.7,
            logit_softcap=softcap,
            chunk_rows=2,
            chunk_vocab=3,
        )
        return result if with_entropy else result[0]

    inputs = (hidden, weight, bias if with_bias else None)
    assert torch.autograd.gradcheck(run, inputs)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 9),
    vocab=st.integers(1, 9),
    chunk_rows=st.integers(1, 10),
    chunk_vocab=st.integers(1, 10),
    softcap=st.sampled_from([None, 2.0]),
    seed=st.integers(0, 50),
)
def test_any_tiling_equals_the_plain_formula(rows, vocab, chunk_rows, chunk_vocab, softcap, seed):
    hidden, weight, bias, targets, temperature = problem(rows, vocab, 3, seed=seed)
    options = {"bias": bias, "logit_scale": 1.3, "logit_softcap": softcap}
    expected = naive(hidden, weight, targets, temperature, **options)
    result = logprobs_and_entropy(
        hidden, weight, targets, temperature, **options, chunk_rows=chunk_rows, chunk_vocab=chunk_vocab
    )
    inputs = (hidden, weight, bias)
    torch.testing.assert_close(result, expected, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(gradients(result, inputs), gradients(expected, inputs), atol=1e-11, rtol=1e-11)


def test_float32_with_the_default_tiles_equals_the_plain_formula():
    hidden, weight, _, targets, _ = problem(1100, 1500, 8, torch.float32)
    result = logprobs_and_entropy(hidden, weight, targets, 0.8)
    expected = naive(hidden, weight, targets, 0.8)
    torch.testing.assert_close(result, expected, atol=2e-5, rtol=1e-5)
    ours, theirs = gradients(result, (hidden, weight)), gradients(expected, (hidden, weight))
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
def test_bfloat16_gives_float32_results_and_gradients_near_the_exact_ones(weight_dtype):
    hidden, weight, _, targets, _ = problem(1024, 200, 32, torch.bfloat16)
    hidden = (hidden.detach() / 32**0.5).requires_grad_()  # logits of a real size: standard deviation 1
    weight = weight.detach().to(weight_dtype).requires_grad_()
    exact = (hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_())
    expected = naive(*exact, targets)
    result = logprobs_and_entropy(hidden, weight, targets, chunk_rows=16, chunk_vocab=64)
    assert [x.dtype for x in result] == [torch.float32, torch.float32]
    for one, other in zip(result, expected, strict=True):
        errors = one.double() - other
        assert errors.abs().max() < 0.02, "a bfloat16 logit of 4 is rounded by up to 0.008"
        assert errors.mean().abs() < 0.001, "a bias of 0.01 nats would show in every importance ratio"
    ours, theirs = gradients(result, (hidden, weight)), gradients(expected, exact)
    assert [x.dtype for x in ours] == [torch.bfloat16, weight_dtype]
    for one, other in zip(ours, theirs, strict=True):
        assert (one.double() - other).norm() < 0.02 * other.norm()


def test_entropy_may_be_a_number_without_gradient():
    hidden, weight, _, targets, temperature = problem()
    full, entropy = logprobs_and_entropy(hidden, weight, targets, temperature)
    same, number = logprobs_and_entropy(hidden, weight, targets, temperature, entropy_grad=False)
    assert not number.requires_grad
    assert torch.equal(number, entropy.detach())
    torch.testing.assert_close(gradients([same], (hidden, weight)), gradients([full], (hidden, weight)))


def test_only_the_gradients_asked_for():
    hidden, weight, bias, targets, _ = problem()
    expected = gradients(logprobs_and_entropy(hidden, weight, targets, bias=bias), (hidden, weight, bias))
    for wanted in ((0,), (1,), (2,), (0, 2)):
        inputs = [x.detach().requires_grad_(i in wanted) for i, x in enumerate((hidden, weight, bias))]
        outputs = logprobs_and_entropy(inputs[0], inputs[1], targets, bias=inputs[2])
        got = gradients(outputs, [inputs[i] for i in wanted])
        torch.testing.assert_close(got, tuple(expected[i] for i in wanted))


def test_only_the_entropy_is_used():
    hidden, weight, _, targets, temperature = problem()
    _, entropy = logprobs_and_entropy(hidden, weight, targets, temperature)
    _, expected = naive(hidden, weight, targets, temperature)
    torch.testing.assert_close(gradients([entropy], (hidden, weight)), gradients([expected], (hidden, weight)))


def test_no_rows():
    hidden, weight, _, targets, _ = problem(rows=0)
    logprobs, entropy = logprobs_and_entropy(hidden, weight, targets)
    assert logprobs.shape == entropy.shape == (0,)
    (logprobs.sum() + entropy.sum()).backward()
    assert not weight.grad.any()


def test_huge_logits_stay_finite():
    hidden = torch.tensor([[1e4], [-1e4]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0], [0.5]], requires_grad=True)
    logprobs, entropy = logprobs_and_entropy(hidden, weight, torch.tensor([0, 0]), chunk_vocab=2)
    assert logprobs.tolist() == [0.0, -20000.0]
    assert entropy.tolist() == [0.0, 0.0]
    (logprobs.sum() + entropy.sum()).backward()
    assert torch.isfinite(hidden.grad).all()
    assert torch.isfinite(weight.grad).all()


def test_inputs_are_not_changed():
    tensors = problem()
    before = [x.detach().clone() for x in tensors]
    hidden, weight, bias, targets, temperature = tensors
    outputs = logprobs_and_entropy(hidden, weight, targets, temperature, bias=bias, logit_softcap=2.0)
    sum(x.sum() for x in outputs).backward()
    assert all(torch.equal(x, y) for x, y in zip(tensors, before, strict=True))


def test_wrong_targets_and_options_are_refused():
    hidden, weight, _, _, _ = problem()
    with pytest.raises(AssertionError, match=r"\[0, 7\].*7 tokens"):
        logprobs_and_entropy(hidden, weight, torch.tensor([0, 1, 2, 3, 7]))
    with pytest.raises(TypeError, match="softcap"):
        logprobs_and_entropy(hidden, weight, torch.zeros(5, dtype=torch.int64), softcap=3.0)


class LargestTensor(TorchDispatchMode):
    """Remembers the most numbers any operation wrote into one tensor's storage."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, torch.Tensor):
                self.numel = max(self.numel, value.untyped_storage().nbytes() // value.element_size())
        return result


def test_never_holds_rows_times_vocabulary():
    hidden, weight, _, targets, _ = problem(rows=96, vocab=512, width=4, dtype=torch.float32)
    with LargestTensor() as largest:
        outputs = logprobs_and_entropy(hidden, weight, targets, chunk_rows=16, chunk_vocab=64)
        sum(x.sum() for x in outputs).backward()
    assert largest.numel == 512 * 4  # the gradient of the weight; N × V would be 49152
    with LargestTensor() as largest:
        naive(hidden, weight, targets)
    assert largest.numel == 96 * 512
