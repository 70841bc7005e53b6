"""Every registered policy loss passes the checks, and a broken one does not."""

from dataclasses import replace

import pytest
import torch

from treadle.algorithms import POLICY_LOSSES
from treadle.algorithms.contract import check_policy_loss
from treadle.algorithms.losses import PolicyLoss, ppo


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_policy_loss(name):
    check_policy_loss(POLICY_LOSSES[name])


def wrong_sign(inputs):
    result = ppo(inputs)
    return replace(result, loss=-result.loss)


def ignores_mask(inputs):
    return ppo(replace(inputs, mask=None))


def batch_mean_ratio(inputs):
    ratio = (inputs.logprobs - inputs.old_logprobs).exp()
    loss = -ratio.mean() * inputs.advantages
    mask = inputs.mask
    return PolicyLoss(torch.where(mask, loss, 0.0), torch.zeros_like(mask), ratio.detach())


def overflows(inputs):
    ratio = torch.where(inputs.mask, inputs.logprobs - inputs.old_logprobs, 0.0).exp()
    return PolicyLoss(-ratio * inputs.advantages * inputs.mask, torch.zeros_like(inputs.mask), ratio.detach())


def one_number(inputs):
    result = ppo(inputs)
    return replace(result, loss=result.loss.mean())


def ratio_with_gradient(inputs):
    return replace(ppo(inputs), ratio=(inputs.logprobs - inputs.old_logprobs).exp())


@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize(
    ("loss", "complaint"),
    [
        (wrong_sign, "not the policy gradient"),
        (ignores_mask, "untrained tokens"),
        (batch_mean_ratio, "untrained tokens|reads untrained|micro-batches"),
        (overflows, "not finite"),
        (one_number, "one number per token"),
        (ratio_with_gradient, "detach"),
    ],
)
def test_a_broken_loss_is_caught(loss, complaint):
    with pytest.raises(AssertionError, match=complaint):
        check_policy_loss(loss)
