"""Checks that every policy loss and every advantage estimator must pass; run them on your own before you train.

    from treadle.algorithms.contract import check_advantage, check_policy_loss
    check_policy_loss(my_loss)
    check_advantage(my_estimator)

Each raises `AssertionError` with one line that says what is wrong; each takes well under a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from treadle.algorithms.advantages import AdvantageInputs, Advantages, AdvantageSettings, Estimator, compute_advantages
from treadle.algorithms.losses import PolicyLoss, PolicyLossFn, PolicyLossInputs
from treadle.algorithms.reduce import Denominators, token_weights, trained_tokens, weighted_sum

Inputs = TypeVar("Inputs", PolicyLossInputs, AdvantageInputs)

_LENGTHS = (3, 1, 5, 2, 4)
_GROUP_IDS = (7, 3, 7, 7, 5)  # a group of three, two of one
_REWARDS = (1.0, 0.5, 0.0, 0.25, 2.0)


def check_policy_loss(loss: PolicyLossFn) -> None:
    """Check everything that the trainer relies on of a policy loss.

    Shapes and types; inputs left alone; untrained tokens ignored; at ratio 1 the gradient is the plain policy
    gradient; the same loss and gradient however whole samples are put into micro-batches; finite far off-policy.
    """
    for dtype in (torch.float32, torch.float64):
        inputs = _policy_inputs(dtype, spread=0.3)
        _check_loss_shapes(loss, inputs)
        _check_loss_ignores_untrained(loss, inputs)
        _check_loss_split(loss, inputs)
        _check_loss_finite(loss, dtype)
    _check_on_policy_gradient(loss)


def check_advantage(estimator: Estimator) -> None:
    """Check everything that the trainer relies on of an advantage estimator.

    Shapes and types; inputs left alone; nothing on untrained tokens; the order of samples and the numbers of groups
    do not matter; groups do not affect each other before whitening; finite for groups of one, equal rewards, samples
    without a trained token, and no samples at all.
    """
    for dtype in (torch.float32, torch.float64):
        inputs = _advantage_inputs(dtype)
        for case in (inputs, replace(inputs, mask=None)):
            _check_advantage_shapes(estimator, case)
            _check_advantage_order(estimator, case)
            _check_advantage_groups(estimator, case)
        _check_advantage_finite(estimator, inputs)


def _close(left: Tensor, right: Tensor, what: str) -> None:
    tolerance = 1e-4 if left.dtype == torch.float32 else 1e-9
    assert left.shape == right.shape, f"{what}: shapes {tuple(left.shape)} and {tuple(right.shape)} differ"
    if left.numel():
        gap = float((left - right).abs().max())
        assert gap <= tolerance, f"{what}: off by {gap:.3g}"


def _tensors(record: Any) -> dict[str, Tensor]:
    values = {f.name: getattr(record, f.name) for f in fields(record)}
    return {name: value.detach() for name, value in values.items() if isinstance(value, Tensor)}


def _snapshot(record: Any) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in _tensors(record).items()}


def _check_unchanged(record: Any, before: dict[str, Tensor]) -> None:
    for name, value in _tensors(record).items():
        assert torch.equal(value, before[name]), f"the input {name!r} was changed in place"


def _sample_index(lengths: Sequence[int]) -> Tensor:
    counts = torch.tensor(lengths, dtype=torch.int64)
    return torch.repeat_interleave(torch.arange(len(counts)), counts)


def _take(inputs: Inputs, samples: Sequence[int]) -> tuple[Inputs, Tensor]:
    """Return these samples in this order, and where their tokens were.

    What has an entry per token of `_LENGTHS`, or per sample, is known by its size.
    """
    places = [(inputs.sample_index == s).nonzero().squeeze(1) for s in samples]
    chosen = torch.tensor(samples, dtype=torch.int64)
    where = torch.cat(places) if places else chosen
    order = {sum(_LENGTHS): where, len(_LENGTHS): chosen}
    taken: dict[str, Any] = {n: v[order[len(v)]] for n, v in _tensors(inputs).items() if len(v) in order}
    return replace(inputs, **taken | {"sample_index": _sample_index([len(place) for place in places])}), where


def _mask(generator: torch.Generator) -> Tensor:
    """Return a mask of about 70 % of the tokens, and of none of sample 3."""
    mask = torch.rand(sum(_LENGTHS), generator=generator) > 0.3
    mask[_sample_index(_LENGTHS) == 3] = False
    return mask


# Policy losses


def _policy_inputs(dtype: torch.dtype, spread: float) -> PolicyLossInputs:
    generator = torch.Generator().manual_seed(0)
    index = _sample_index(_LENGTHS)
    old = -torch.rand(index.numel(), generator=generator, dtype=torch.float64) * 3
    new = old + torch.randn(index.numel(), generator=generator, dtype=torch.float64) * spread
    advantages = torch.tensor([1.0, -2.0, 0.5, -0.7, 0.0], dtype=dtype)[index]
    mask = _mask(generator)
    engine = old - spread * torch.rand(index.numel(), generator=generator, dtype=torch.float64)
    logprobs = new.to(dtype).requires_grad_()
    return PolicyLossInputs(
        logprobs, old.to(dtype), advantages, index, mask, eps_clip_c=3.0, rollout_logprobs=engine.to(dtype)
    )


def _loss_and_gradient(loss: PolicyLossFn, inputs: PolicyLossInputs) -> tuple[PolicyLoss, Tensor, Tensor]:
    """Return the loss, its per-sample mean, and the gradient of that."""
    logprobs = inputs.logprobs.detach().clone().requires_grad_()
    result = loss(replace(inputs, logprobs=logprobs))
    lengths = trained_tokens(inputs.sample_index, inputs.samples, inputs.mask)
    denominators = Denominators(batch_size=len(_LENGTHS))
    weights = token_weights(inputs.sample_index, lengths, denominators, inputs.mask, logprobs.dtype)
    total = weighted_sum(result.loss, weights)
    (gradient,) = torch.autograd.grad(total, logprobs, allow_unused=True)
    return result, total.detach(), torch.zeros_like(logprobs) if gradient is None else gradient


def _check_loss_shapes(loss: PolicyLossFn, inputs: PolicyLossInputs) -> None:
    before = _snapshot(inputs)
    result, _, _ = _loss_and_gradient(loss, inputs)
    shape, dtype = inputs.logprobs.shape, inputs.logprobs.dtype
    loss(inputs)
    _check_unchanged(inputs, before)
    assert result.loss.shape == shape, f"the loss has shape {tuple(result.loss.shape)}, not one number per token"
    assert result.loss.dtype == dtype, f"the loss has dtype {result.loss.dtype} for logprobs of {dtype}"
    assert result.clipped.shape == shape, "`clipped` must be one per token"
    assert result.clipped.dtype == torch.bool, f"`clipped` must be bool, not {result.clipped.dtype}"
    assert result.ratio.shape == shape, "`ratio` must be one number per token"
    assert not result.ratio.requires_grad, "`ratio` is for the log: detach it"
    assert loss(_take(inputs, ())[0]).loss.shape == (0,), "no tokens must give a loss of shape [0]"


def _check_loss_ignores_untrained(loss: PolicyLossFn, inputs: PolicyLossInputs) -> None:
    mask, engine = inputs.mask, inputs.rollout_logprobs
    assert mask is not None
    assert engine is not None
    result, total, gradient = _loss_and_gradient(loss, inputs)
    assert not result.loss[~mask].any(), "untrained tokens must have loss 0"
    assert not result.clipped[~mask].any(), "untrained tokens must not be marked as clipped"
    assert not gradient[~mask].any(), "untrained tokens must get no gradient"
    spoiled = replace(
        inputs,
        logprobs=torch.where(mask, inputs.logprobs.detach(), torch.nan),
        old_logprobs=torch.where(mask, inputs.old_logprobs, -7.0),
        rollout_logprobs=torch.where(mask, engine, -7.0),
    )
    _, other_total, other_gradient = _loss_and_gradient(loss, spoiled)
    _close(total, other_total, "the loss reads untrained tokens")
    _close(gradient, other_gradient, "the gradient reads untrained tokens")


def _check_loss_split(loss: PolicyLossFn, inputs: PolicyLossInputs) -> None:
    _, total, gradient = _loss_and_gradient(loss, inputs)
    for split in (((4, 2), (0,), (3, 1)), ((3,), (1, 0, 4, 2)), ((0,), (1,), (2,), (3,), (4,))):
        sum_total, sum_gradient = torch.zeros_like(total), torch.zeros_like(gradient)
        for samples in split:
            part, where = _take(inputs, samples)
            _, part_total, part_gradient = _loss_and_gradient(loss, part)
            sum_total += part_total
            sum_gradient[where] += part_gradient
        _close(total, sum_total, "the loss depends on the micro-batches")
        _close(gradient, sum_gradient, "the gradient depends on the micro-batches")


def _check_loss_finite(loss: PolicyLossFn, dtype: torch.dtype) -> None:
    for spread in (0.0, 30.0, 1000.0):
        result, _, gradient = _loss_and_gradient(loss, _policy_inputs(dtype, spread))
        assert bool(torch.isfinite(result.loss).all()), f"the loss is not finite for log ratios around {spread}"
        assert bool(torch.isfinite(gradient).all()), f"the gradient is not finite for log ratios around {spread}"


def _check_on_policy_gradient(loss: PolicyLossFn) -> None:
    inputs = _policy_inputs(torch.float64, spread=0.0)
    assert inputs.mask is not None
    result, _, gradient = _loss_and_gradient(loss, inputs)
    lengths = trained_tokens(inputs.sample_index, len(_LENGTHS), inputs.mask).clamp(min=1)[inputs.sample_index]
    expected = torch.where(inputs.mask, -inputs.advantages / (lengths * len(_LENGTHS)), 0.0)
    _close(gradient, expected, "at ratio 1 the gradient is not the policy gradient")
    assert not result.clipped.any(), "at ratio 1 no token may be clipped"


# Advantage estimators


def _advantage_inputs(dtype: torch.dtype) -> AdvantageInputs:
    generator = torch.Generator().manual_seed(1)
    index = _sample_index(_LENGTHS)
    numbers = torch.randn(5, index.numel(), generator=generator, dtype=torch.float64).to(dtype)
    return AdvantageInputs(
        rewards=torch.tensor(_REWARDS, dtype=dtype),
        group_ids=torch.tensor(_GROUP_IDS),
        sample_index=index,
        mask=_mask(generator),
        reward_parts=torch.randn(len(_LENGTHS), 2, generator=generator, dtype=torch.float64).to(dtype),
        part_weights=torch.tensor([1.0, 0.5], dtype=dtype),
        kl=numbers[0],
        values=numbers[1],
        student_logprobs=numbers[2],
        teacher_logprobs=numbers[3],
    )


def _run(estimator: Estimator, inputs: AdvantageInputs, whiten: bool | None = None) -> Advantages:
    kl_coef = 0.1 if estimator.per_token_reward else 0.0
    settings = AdvantageSettings(kl_coef=kl_coef, gamma=0.9, lambd=0.8, opd_kl_coef=0.3, whiten=whiten)
    return compute_advantages(estimator, inputs, settings)


def _check_advantage_shapes(estimator: Estimator, inputs: AdvantageInputs) -> None:
    before = _snapshot(inputs)
    result = _run(estimator, inputs)
    _check_unchanged(inputs, before)
    shape, dtype = inputs.sample_index.shape, inputs.rewards.dtype
    for name, value in (("advantages", result.advantages), ("returns", result.returns)):
        assert value.shape == shape, f"{name} have shape {tuple(value.shape)}, not one number per token"
        assert value.dtype == dtype, f"{name} have dtype {value.dtype} for rewards of {dtype}"
        assert bool(torch.isfinite(value).all()), f"{name} are not finite"
        if inputs.mask is not None:
            assert not value[~inputs.mask].any(), f"{name} are not 0 on untrained tokens"
    assert result.shaped.shape == inputs.rewards.shape, "shaped rewards must be one number per sample"


def _check_advantage_order(estimator: Estimator, inputs: AdvantageInputs) -> None:
    expected = _run(estimator, inputs)
    for order in ((4, 3, 2, 1, 0), (2, 0, 4, 1, 3)):
        moved, where = _take(inputs, order)
        result = _run(estimator, moved)
        _close(expected.advantages[where], result.advantages, "advantages depend on the order of the samples")
        _close(expected.returns[where], result.returns, "returns depend on the order of the samples")
    renamed = replace(inputs, group_ids=100 - inputs.group_ids)
    _close(expected.advantages, _run(estimator, renamed).advantages, "advantages depend on the numbers of the groups")


def _check_advantage_groups(estimator: Estimator, inputs: AdvantageInputs) -> None:
    expected = _run(estimator, inputs, whiten=False)
    for samples in ((0, 2, 3), (1,), (4,), (1, 4)):
        part, where = _take(inputs, samples)
        result = _run(estimator, part, whiten=False)
        _close(expected.advantages[where], result.advantages, "a group's advantages depend on other groups")


def _check_advantage_finite(estimator: Estimator, inputs: AdvantageInputs) -> None:
    assert inputs.reward_parts is not None
    assert inputs.mask is not None
    equal = {"rewards": inputs.rewards * 0 + 0.1, "reward_parts": inputs.reward_parts * 0 + 0.1}
    untrained = replace(inputs, mask=torch.zeros_like(inputs.mask))
    cases = {
        "equal rewards": replace(inputs, **equal),
        "no trained token": untrained,
        "no samples": _take(inputs, ())[0],
    }
    for name, case in cases.items():
        result = _run(estimator, case)
        finite = torch.isfinite(result.advantages).all() and torch.isfinite(result.returns).all()
        assert bool(finite), f"advantages are not finite with {name}"
