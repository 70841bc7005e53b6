"""Drawing tokens: the right frequencies, the right cuts, and the logprobs of what was drawn from."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.errors import EngineError
from treadle.models.cpu.decode_kernels import load_kernels
from treadle.rollout.engines.torch_engine.sampler import (
    BLOCK,
    ROWS_AT_ONCE,
    SamplingTensors,
    sample,
    uniforms,
)
from treadle.rollout.engines.torch_engine.scheduler import row_seed
from treadle.types import SamplingParams

CPU = torch.device("cpu")
ALMOST_ONE = 1.0 - 2.0**-53  # the largest number `uniforms` gives
NEG_INF = float("-inf")
KERNELS = []


@pytest.fixture(params=["operations", "kernel"], autouse=True, scope="module")
def kernels(request):
    """Every test here holds for both ways of drawing."""
    if request.param == "kernel" and (found := load_kernels(torch.float32, 1, 32)) is None:
        pytest.skip("no GCC here, or torch.compile is turned off")
    KERNELS.append(found if request.param == "kernel" else None)
    yield KERNELS[-1]
    KERNELS.pop()


def draw(logits, params, uniform):
    """Tokens and logprobs as lists; `params` is one setting for all rows or one for each."""
    logits = torch.as_tensor(logits, dtype=torch.float32)
    each = [params] * len(logits) if isinstance(params, SamplingParams) else params
    tensors = SamplingTensors.of(each, CPU)
    tokens, logprobs = sample(logits, tensors, torch.as_tensor(uniform, dtype=torch.float64), KERNELS[-1])
    return tokens.tolist(), logprobs.tolist()


def params(**kwargs):
    return SamplingParams(max_new_tokens=1, **kwargs)


def logits_of(probs):
    return torch.tensor([[math.log(p) if p > 0 else NEG_INF for p in probs]])


def kept_by(probs, **cuts):
    """Every token that can be drawn under the cuts, with the logprob it is given."""
    grid = (np.arange(4000) + 0.5) / 4000
    tokens, logprobs = draw(logits_of(probs).expand(len(grid), -1), params(**cuts), grid)
    return dict(zip(tokens, logprobs, strict=True))


def chi_square(counts, expected):
    return float(((counts - expected) ** 2 / expected).sum())


# The uniform numbers


def test_uniforms_are_splitmix64_of_seed_and_position():
    # First outputs of splitmix64 started at 1234567, as published with the generator (and in its many ports).
    words = np.array([6457827717110365317, 3203168211198807973, 9817491932198370423], dtype=np.uint64)
    want = (words >> np.uint64(11)).astype(np.float64) * 2.0**-53
    assert uniforms(np.full(3, 1234567, dtype=np.uint64), np.arange(3)).tolist() == want.tolist()


def test_uniforms_depend_on_nothing_else_in_the_batch():
    seeds = np.array([row_seed(s, i) for s in (0, 1, 2**63) for i in range(4)], dtype=np.uint64)
    positions = np.arange(12) * 37
    together = uniforms(seeds, positions)
    alone = [uniforms(seeds[i : i + 1], positions[i : i + 1])[0] for i in range(12)]
    assert together.tolist() == alone
    assert len(set(alone)) == 12


def test_uniforms_are_uniform_over_positions_and_over_samples():
    over_positions = uniforms(np.full(20_000, row_seed(42, 0), dtype=np.uint64), np.arange(20_000))
    over_samples = uniforms(np.array([row_seed(42, i) for i in range(20_000)], dtype=np.uint64), np.zeros(20_000, int))
    over_seeds = uniforms(np.array([row_seed(s, 0) for s in range(20_000)], dtype=np.uint64), np.zeros(20_000, int))
    for numbers in (over_positions, over_samples, over_seeds):
        assert numbers.min() >= 0.0
        assert numbers.max() < 1.0
        counts = np.bincount((numbers * 50).astype(int), minlength=50)
        assert chi_square(counts, np.full(50, 400.0)) < 49 + 4 * math.sqrt(2 * 49)
        neighbours = np.corrcoef(numbers[:-1], numbers[1:])[0, 1]
        assert abs(neighbours) < 4 / math.sqrt(20_000)


def test_row_seeds_differ_and_fit_64_bits():
    seeds = {row_seed(s, i) for s in (0, 1, 2, 2**64 - 1) for i in range(500)}
    assert len(seeds) == 2000
    assert all(0 <= s < 2**64 for s in seeds)


# Frequencies


@pytest.mark.parametrize("vocab", [7, BLOCK, BLOCK + 1, 3 * BLOCK - 5])
def test_tokens_come_as_often_as_their_probability(vocab):
    rows = 20_000
    weights = torch.linspace(1.0, 3.0, vocab).roll(3)
    uniform = uniforms(np.full(rows, row_seed(7, 1), dtype=np.uint64), np.arange(rows))
    tokens, _ = draw(weights.log().expand(rows, -1), params(), uniform)
    counts = np.bincount(tokens, minlength=vocab)
    expected = (rows * weights / weights.sum()).numpy().astype(float)
    assert chi_square(counts, expected) < vocab - 1 + 4 * math.sqrt(2 * (vocab - 1))


def test_the_token_is_where_the_running_sum_passes_the_uniform_number():
    # probabilities 0.5, 0, 0.25, 0.25: running sums 0.5, 0.5, 0.75, 1
    uniform = [0.0, 0.49, 0.5, 0.74, 0.75, ALMOST_ONE]
    tokens, logprobs = draw(logits_of([0.5, 0.0, 0.25, 0.25]).expand(6, -1), params(), uniform)
    assert tokens == [0, 0, 2, 2, 3, 3]
    assert logprobs == pytest.approx([math.log(0.5)] * 2 + [math.log(0.25)] * 4)


def test_each_token_begins_at_its_running_sum_also_over_blocks():
    vocab = 2 * BLOCK  # a power of two: k / vocab has no rounding
    uniform = torch.arange(vocab, dtype=torch.float64) / vocab
    logits = torch.zeros(vocab, vocab)
    assert draw(logits, params(), uniform)[0] == list(range(vocab))
    before_the_next = uniform + (1 - 2.0**-20) / vocab
    assert draw(logits, params(), before_the_next)[0] == list(range(vocab))


@pytest.mark.parametrize("vocab", [1, 5, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 100])
@pytest.mark.parametrize("uniform", [0.0, 2.0**-53, 0.5, ALMOST_ONE])
def test_all_mass_in_one_token_always_draws_it(vocab, uniform):
    for place in {0, vocab // 2, vocab - 1}:
        logits = torch.full((1, vocab), NEG_INF)
        logits[0, place] = -3.0
        assert draw(logits, params(), [uniform]) == ([place], [0.0])


@pytest.mark.parametrize("uniform", [0.0, 2.0**-53, 0.3, 0.999999, ALMOST_ONE])
def test_never_a_token_of_probability_zero(uniform):
    vocab = 3 * BLOCK + 17
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(200, vocab, generator=generator) * 8
    zero = torch.rand(200, vocab, generator=generator) < 0.97
    zero[:, BLOCK : 2 * BLOCK] = True  # a whole block without mass
    zero[::2, -1] = True
    zero[torch.arange(200), torch.randint(0, BLOCK, (200,), generator=generator)] = False
    tokens, logprobs = draw(logits.masked_fill(zero, NEG_INF), params(), [uniform] * 200)
    assert not zero[torch.arange(200), torch.tensor(tokens)].any()
    assert all(math.isfinite(x) for x in logprobs)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.floats(-400.0, 50.0), min_size=1, max_size=700),
    uniform=st.one_of(st.sampled_from([0.0, 2.0**-53, ALMOST_ONE]), st.floats(0.0, ALMOST_ONE)),
)
def test_a_drawn_token_has_mass_and_its_logprob_is_right(sizes, uniform):
    """Logits over 450 nats: most probabilities are tiny or underflow to zero."""
    logits = torch.tensor([sizes], dtype=torch.float32)
    (token,), (logprob,) = draw(logits, params(), [uniform])
    want = torch.log_softmax(logits.double(), dim=-1)[0, token].item()
    assert want > -104  # float32 exp is 0 below, and has few bits below -87
    assert logprob == pytest.approx(want, abs=2e-5 if want > -87 else 0.7)


@pytest.mark.parametrize("uniform", [0.0, ALMOST_ONE])
def test_tiny_probabilities_at_the_ends(uniform):
    logits = torch.zeros(1, 2 * BLOCK)
    logits[0, 0] = logits[0, -1] = -80.0  # e⁻⁸⁰ of the others: above zero in float32
    (token,), (logprob,) = draw(logits, params(), [uniform])
    assert logprob == pytest.approx(-80.0 - math.log(510.0) if token in (0, 2 * BLOCK - 1) else -math.log(510.0))


# Temperature and greedy


def test_temperature_divides_the_logits():
    logits = torch.tensor([[0.0, math.log(4.0)]])
    # at temperature 2: weights 1 and 2, so token 1 has 2/3; at 0.5: 1 and 16
    tokens, logprobs = draw(
        logits.expand(4, -1),
        [params(temperature=2.0)] * 2 + [params(temperature=0.5)] * 2,
        [0.33, 0.34, 0.05, 0.06],
    )
    assert tokens == [0, 1, 0, 1]
    assert logprobs == pytest.approx([math.log(x) for x in (1 / 3, 2 / 3, 1 / 17, 16 / 17)])


@pytest.mark.parametrize("uniform", [0.0, 0.5, ALMOST_ONE])
def test_greedy_takes_the_best_and_reports_its_logprob_at_temperature_1(uniform):
    tokens, logprobs = draw(logits_of([0.3, 0.1, 0.4, 0.2]), params(temperature=0), [uniform])
    assert tokens == [2]
    assert logprobs == pytest.approx([math.log(0.4)])


def test_the_logits_are_left_alone():
    logits = torch.randn(3, 10, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    draw(logits, params(temperature=0.5, top_k=3), [0.1, 0.5, 0.9])
    assert torch.equal(logits, before)


def test_logits_in_bfloat16_are_summed_in_float32():
    logits = torch.zeros(1, 1000, dtype=torch.bfloat16)
    kernels = KERNELS[-1] and load_kernels(torch.bfloat16, 1, 32)
    half = torch.tensor([0.5], dtype=torch.float64)
    tokens, logprobs = sample(logits, SamplingTensors.of([params()], CPU), half, kernels)
    assert tokens.tolist() == [500]
    assert logprobs.item() == pytest.approx(-math.log(1000), abs=1e-6)


# Cuts: probabilities 0.4, 0.3, 0.2, 0.1 in shuffled places

PROBS = [0.2, 0.4, 0.1, 0.3]


@pytest.mark.parametrize(
    ("cuts", "want"),
    [
        ({}, {0: 0.2, 1: 0.4, 2: 0.1, 3: 0.3}),
        ({"top_k": 1}, {1: 1.0}),
        ({"top_k": 2}, {1: 4 / 7, 3: 3 / 7}),
        ({"top_k": 4}, {0: 0.2, 1: 0.4, 2: 0.1, 3: 0.3}),
        ({"top_k": 100}, {0: 0.2, 1: 0.4, 2: 0.1, 3: 0.3}),
        ({"top_p": 0.39}, {1: 1.0}),
        ({"top_p": 0.41}, {1: 4 / 7, 3: 3 / 7}),  # 0.4 is not yet 0.41: the token that passes it is kept
        ({"top_p": 0.69}, {1: 4 / 7, 3: 3 / 7}),
        ({"top_p": 0.71}, {0: 2 / 9, 1: 4 / 9, 3: 3 / 9}),
        ({"top_p": 1e-9}, {1: 1.0}),  # the best one always stays
        ({"min_p": 0.26}, {0: 2 / 9, 1: 4 / 9, 3: 3 / 9}),  # 0.26 · 0.4 = 0.104 > 0.1
        ({"min_p": 0.24}, {0: 0.2, 1: 0.4, 2: 0.1, 3: 0.3}),  # 0.096 < 0.1
        ({"min_p": 0.99}, {1: 1.0}),
        # Each cut works on what the one before kept: of (4, 3, 2)/9 the first two have 7/9 = 0.78
        ({"top_k": 3, "top_p": 0.77}, {1: 4 / 7, 3: 3 / 7}),
        ({"top_k": 3, "top_p": 0.79}, {0: 2 / 9, 1: 4 / 9, 3: 3 / 9}),
        ({"min_p": 0.26, "top_p": 0.77}, {1: 4 / 7, 3: 3 / 7}),
        ({"min_p": 0.26, "top_k": 2, "top_p": 0.99}, {1: 4 / 7, 3: 3 / 7}),
    ],
)
def test_cuts_keep_exactly_the_right_tokens(cuts, want):
    found = kept_by(PROBS, **cuts)
    assert {token: math.exp(logprob) for token, logprob in found.items()} == pytest.approx(want, abs=1e-6)


def test_temperature_comes_before_the_cuts():
    # at temperature 0.5 the weights are 0.04, 0.16, 0.01, 0.09 of 0.30: the best one alone has 0.53
    assert set(kept_by(PROBS, temperature=0.5, top_p=0.5)) == {1}
    assert set(kept_by(PROBS, temperature=1.0, top_p=0.5)) == {1, 3}


def test_ties_at_the_cut_keep_the_first_ones():
    assert set(kept_by([0.25, 0.25, 0.25, 0.25], top_k=2)) == {0, 1}
    assert set(kept_by([0.25, 0.25, 0.25, 0.25], min_p=0.9)) == {0, 1, 2, 3}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-6.0, 6.0), min_size=2, max_size=2 * BLOCK + 3),
    st.integers(0, 20),
    st.floats(0.05, 1.0),
    st.floats(0.0, ALMOST_ONE),
)
def test_a_cut_token_is_never_drawn_and_mass_is_renormalised(values, top_k, top_p, uniform):
    logits = torch.tensor([values], dtype=torch.float32)
    (token,), (logprob,) = draw(logits, params(top_k=top_k, top_p=top_p), [uniform])
    probs = torch.softmax(logits[0].double(), dim=-1)
    kept = probs.sort(descending=True).values[: top_k or None]
    before = (kept.cumsum(0) - kept) / kept.sum()
    # Near ties, in order and at the edge, are for float32 to decide.
    fewest, most = (max(1, int((before < top_p + slack).sum())) for slack in (-1e-5, 1e-5))
    assert int((probs > probs[token] * (1 + 1e-6)).sum()) < most
    low, high = (math.log(probs[token] / kept[:count].sum()) for count in (most, fewest))
    assert low - 1e-4 <= logprob <= high + 1e-4


# Mixed batches


def test_every_row_has_its_own_settings():
    each = [
        params(),
        params(temperature=0),
        params(temperature=2.0),
        params(top_k=1),
        params(top_p=0.41),
        params(temperature=0, top_k=3, top_p=0.1),
        params(min_p=0.99, temperature=0.7),
    ]
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(len(each), 700, generator=generator) * 3
    uniform = torch.rand(len(each), dtype=torch.float64, generator=generator).tolist()
    tokens, logprobs = draw(logits, each, uniform)
    for i, one in enumerate(each):
        (token,), (logprob,) = draw(logits[i : i + 1], one, uniform[i : i + 1])
        assert tokens[i] == token
        assert logprobs[i] == pytest.approx(logprob, abs=1e-6)
    best = logits.argmax(dim=-1).tolist()
    assert [tokens[i] for i in (1, 3, 5, 6)] == [best[i] for i in (1, 3, 5, 6)]
    assert logprobs[3] == logprobs[6] == 0.0  # nothing else was left
    assert logprobs[5] == pytest.approx(torch.log_softmax(logits[5], -1).max().item(), abs=1e-6)  # greedy cuts nothing


def test_numbers_that_are_not_finite_are_refused_in_one_sentence():
    logits = torch.zeros(2, 300)
    logits[1, 7] = float("nan")
    with pytest.raises(EngineError, match="logits of 1 of 2 samples are not finite"):
        draw(logits, params(), [0.5, 0.5])
    with pytest.raises(EngineError, match="not finite"):
        draw(torch.full((1, 300), float("inf")), params(), [0.5])


def test_many_rows_are_drawn_as_few_are():
    """More rows than are sampled at once: the same tokens and logprobs as in small parts."""
    rows = 2 * ROWS_AT_ONCE + 5
    generator = torch.Generator().manual_seed(3)
    logits, uniform = (
        torch.randn(rows, 500, generator=generator),
        torch.rand(rows, dtype=torch.float64, generator=generator),
    )
    params = [
        SamplingParams(max_new_tokens=1, temperature=(0.0, 0.7, 1.0)[i % 3], top_p=(1.0, 0.9)[i % 2], top_k=i % 5)
        for i in range(rows)
    ]
    tokens, logprobs = sample(logits, SamplingTensors.of(params, CPU), uniform, KERNELS[-1])
    for i in range(0, rows, 10):
        part = slice(i, i + 10)
        alone = sample(logits[part], SamplingTensors.of(params[part], CPU), uniform[part], KERNELS[-1])
        assert torch.equal(tokens[part], alone[0])
        assert torch.equal(logprobs[part], alone[1])


@settings(max_examples=30)
@given(seed=st.integers(0, 99), count=st.integers(1, 299))
def test_ids_without_a_token_are_never_drawn_and_count_in_logprobs(seed, count):
    """The third row cuts: its logprobs are of what is left, as without such ids; the last one is greedy."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(4, 300, generator=generator) * 3
    unused = torch.randperm(300, generator=generator)[:count].sort().values
    used = torch.ones(300, dtype=torch.bool).index_fill_(0, unused, False)
    each = [params(), params(temperature=0.6), params(top_p=0.9), params(temperature=0.0)]
    uniform = torch.tensor([0.0, 0.3, 0.6, ALMOST_ONE], dtype=torch.float64)
    given = logits.clone()
    tokens, logprobs = sample(given, SamplingTensors.of(each, CPU), uniform, KERNELS[-1], unused)
    assert used[tokens].all()
    table = torch.log_softmax(logits / torch.tensor([1.0, 0.6, 1.0, 1.0])[:, None], -1)
    expected = table.gather(1, tokens[:, None])[:, 0]
    for row in (0, 1, 3):
        assert logprobs[row].item() == pytest.approx(expected[row].item(), abs=1e-5)
    masked = logits.masked_fill(~used, NEG_INF)
    (token,), (logprob,) = draw(masked[2:3], each[2], uniform[2:3])
    assert (tokens[2].item(), logprobs[2].item()) == (token, pytest.approx(logprob, abs=1e-6))
    assert tokens[3] == masked[3].argmax()
