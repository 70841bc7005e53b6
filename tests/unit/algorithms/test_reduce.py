import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.algorithms.reduce import (
    Denominators,
    Mode,
    sample_means,
    token_weights,
    trained_tokens,
    trajectory_tokens,
    weighted_sum,
)

# Three samples of 2, 1 and 3 tokens; the second has no trained token.
INDEX = torch.tensor([0, 0, 1, 2, 2, 2])
MASK = torch.tensor([True, False, False, True, True, True])


def test_lengths_count_trained_tokens_and_trajectories_add_up():
    lengths = trained_tokens(INDEX, 3, MASK)
    assert lengths.tolist() == [1, 0, 3]
    assert trained_tokens(INDEX, 4).tolist() == [2, 1, 3, 0]
    assert trajectory_tokens(lengths).tolist() == [1, 0, 3]
    assert trajectory_tokens(lengths, torch.tensor([40, 9, 40])).tolist() == [4, 0, 4]


def test_per_sample_weights_by_hand():
    weights = token_weights(INDEX, torch.tensor([1, 0, 3]), Denominators(batch_size=4), MASK, torch.float64)
    torch.testing.assert_close(weights, torch.tensor([1 / 4, 0, 0, 1 / 12, 1 / 12, 1 / 12], dtype=torch.float64))


def test_fan_out_shares_one_denominator_and_counts_once():
    # Samples 0 and 2 are one trajectory of 4 trained tokens; two trajectories in the batch.
    lengths = trajectory_tokens(torch.tensor([1, 0, 3]), torch.tensor([5, 6, 5]))
    weights = token_weights(INDEX, lengths, Denominators(batch_size=2), MASK)
    assert weights.tolist() == [1 / 8, 0, 0, 1 / 8, 1 / 8, 1 / 8]
    assert weights.sum() == 1 / 2


def test_per_token_and_constant_weights_by_hand():
    lengths = torch.tensor([1, 0, 3])
    per_token = token_weights(INDEX, lengths, Denominators(Mode.PER_TOKEN, total_tokens=8), MASK)
    assert per_token.tolist() == [1 / 8, 0, 0, 1 / 8, 1 / 8, 1 / 8]
    constant = token_weights(INDEX, lengths, Denominators(Mode.CONSTANT, batch_size=4, max_length=16), MASK)
    assert constant.tolist() == [1 / 64, 0, 0, 1 / 64, 1 / 64, 1 / 64]


def test_zero_denominators_give_zero_weights():
    for mode in Mode:
        weights = token_weights(INDEX, torch.zeros(3, dtype=torch.int64), Denominators(mode), MASK)
        assert weights.tolist() == [0.0] * 6


def test_weighted_sum_does_not_look_where_the_weight_is_zero():
    values = torch.tensor([2.0, float("nan"), float("inf"), 3.0], requires_grad=True)
    total = weighted_sum(values, torch.tensor([0.5, 0.0, 0.0, 2.0]))
    assert total.item() == 7.0
    total.backward()
    assert values.grad.tolist() == [0.5, 0.0, 0.0, 2.0]


def test_sample_means_by_hand():
    values = torch.tensor([2.0, 50.0, 60.0, 1.0, 2.0, 6.0])
    assert sample_means(values, INDEX, 3, MASK).tolist() == [2.0, 0.0, 3.0]
    assert sample_means(values, INDEX, 3).tolist() == [26.0, 60.0, 3.0]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_split_and_order_gives_the_same_loss_and_gradient(data):
    num = data.draw(st.integers(1, 7))
    lengths = data.draw(st.lists(st.integers(0, 4), min_size=num, max_size=num))
    index = torch.repeat_interleave(torch.arange(num), torch.tensor(lengths))
    count = index.numel()
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=count, max_size=count)), dtype=torch.bool)
    trajectories = torch.tensor(data.draw(st.lists(st.integers(0, 3), min_size=num, max_size=num)))
    mode = data.draw(st.sampled_from(list(Mode)))
    torch.manual_seed(data.draw(st.integers(0, 100)))
    values = torch.randn(count, dtype=torch.float64)

    sample_tokens = trajectory_tokens(trained_tokens(index, num, mask), trajectories)
    denominators = Denominators(mode, float(len(set(trajectories.tolist()))), float(mask.sum()), 7.0)
    whole = token_weights(index, sample_tokens, denominators, mask, torch.float64)
    expected = weighted_sum(values, whole)

    order = data.draw(st.permutations(range(num)))
    cuts = sorted(data.draw(st.lists(st.integers(0, num), max_size=3)))
    total, gradient = 0.0, torch.zeros(count, dtype=torch.float64)
    for start, stop in zip([0, *cuts], [*cuts, num], strict=True):
        samples = order[start:stop]
        places = [(index == s).nonzero().squeeze(1) for s in samples]
        where = torch.cat([torch.zeros(0, dtype=torch.int64), *places])
        part_index = torch.repeat_interleave(
            torch.arange(len(samples)), torch.tensor([p.numel() for p in places], dtype=torch.int64)
        )
        part = values[where].requires_grad_()
        part_tokens = sample_tokens[torch.tensor(samples, dtype=torch.int64)]
        weights = token_weights(part_index, part_tokens, denominators, mask[where], torch.float64)
        loss = weighted_sum(part, weights)
        loss.backward()
        total += loss.item()
        gradient[where] += part.grad
    assert abs(total - expected.item()) < 1e-12
    torch.testing.assert_close(gradient, whole, atol=1e-12, rtol=0)
    if mode == Mode.PER_SAMPLE:
        trained = {
            t for t, n in zip(trajectories.tolist(), trained_tokens(index, num, mask).tolist(), strict=True) if n
        }
        assert abs(whole.sum().item() - len(trained) / denominators.batch_size) < 1e-12
