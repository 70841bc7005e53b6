"""Checks that every policy loss and every advantage estimator must pass; run them on your own before you train.

    from treadle.algorithms.contract import check_advantage, check_policy_loss
    check_policy_loss(my_loss)
    check_advantage(my_estimator)

Each raises `AssertionError` with one line that says what is wrong; each takes well under a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import torch
from torch import Tensor

from treadle.algorithms.advantages import (
    AdvantageInputs,
    Advantages,
    AdvantageSettings,
    Estimator,
    compute_advantages,
)
from treadle.algorithms.losses import PolicyLoss, PolicyLossFn, PolicyLossInputs
from treadle.algorithms.reduce import Denominators, token_weights, trained_tokens, weighted_sum

_LENGTHS = (3, 1, 5, 2, 4)


def check_policy_loss(loss: PolicyLossFn) -> None:
    """Everything the trainer relies on of a policy loss.

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
    """Everything the trainer relies on of an advantage estimator.

    Shapes and types; inputs left alone; nothing on untrained tokens; the order of samples and the numbers of groups
    do not matter; groups do not touch each other before whitening; finite for groups of one, equal rewards, samples
    without a trained token, and no samples at all.
    """
    for dtype in (torch.float32, torch.float64):
        for case in (_advantage_inputs(dtype), replace(_advantage_inputs(dtype), mask=None)):
            _check_advantage_shapes(estimator, case)
            _check_advantage_order(estimator, case)
            _check_advantage_groups(estimator, case)
        _check_advantage_finite(estimator, dtype)


def _close(left: Tensor, right: Tensor, what: str) -> None:
    tolerance = 1e-4 if left.dtype == torch.float32 else 1e-9
    assert left.shape == right.shape, f"{what}: shapes {tuple(left.shape)} and {tuple(right.shape)} differ"
    if left.numel():
        gap = float((left - right).abs().max())
        assert gap <= tolerance, f"{what}: off by {gap:.3g}"


def _snapshot(record: object) -> dict[str, Tensor]:
    names = [f.name for f in fields(record)]  # type: ignore[arg-type]
    values = {name: getattr(record, name) for name in names}
    return {name: value.detach().clone() for name, value in values.items() if isinstance(value, Tensor)}


def _check_unchanged(record: object, before: dict[str, Tensor]) -> None:
    for name, value in _snapshot(record).items():
        assert torch.equal(value, before[name]), f"the input {name!r} was changed in place"


# Policy losses


def _policy_inputs(dtype: torch.dtype, spread: float) -> PolicyLossInputs:
    generator = torch.Generator().manual_seed(0)
    index = torch.repeat_interleave(torch.arange(len(_LENGTHS)), torch.tensor(_LENGTHS))
    old = -torch.rand(index.numel(), generator=generator, dtype=torch.float64) * 3
    new = old + torch.randn(index.numel(), generator=generator, dtype=torch.float64) * spread
    advantages = torch.tensor([1.0, -2.0, 0.5, -0.7, 0.0], dtype=dtype)[index]
    mask = torch.rand(index.numel(), generator=generator) > 0.3
    mask[index == 3] = False
    engine = old - spread * torch.rand(index.numel(), generator=generator, dtype=torch.float64)
    logprobs = new.to(dtype).requires_grad_()
    return PolicyLossInputs(
        logprobs, old.to(dtype), advantages, index, mask, eps_clip_c=3.0, rollout_logprobs=engine.to(dtype)
    )


def _loss_and_gradient(loss: PolicyLossFn, inputs: PolicyLossInputs) -> tuple[PolicyLoss, Tensor, Tensor]:
    """The loss, its per-sample mean, and the gradient of that."""
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
    none = torch.zeros(0, dtype=dtype)
    index = torch.zeros(0, dtype=torch.int64)
    empty = PolicyLossInputs(none, none, none, index, mask=index.bool(), rollout_logprobs=none)
    assert loss(empty).loss.shape == (0,), "no tokens must give a loss of shape [0]"


def _check_loss_ignores_untrained(loss: PolicyLossFn, inputs: PolicyLossInputs) -> None:
    assert inputs.mask is not None
    assert inputs.rollout_logprobs is not None
    result, total, gradient = _loss_and_gradient(loss, inputs)
    untrained = ~inputs.mask
    assert not result.loss[untrained].any(), "untrained tokens must have loss 0"
    assert not result.clipped[untrained].any(), "untrained tokens must not be marked as clipped"
    assert not gradient[untrained].any(), "untrained tokens must get no gradient"
    spoiled = replace(
        inputs,
        logprobs=torch.where(inputs.mask, inputs.logprobs.detach(), torch.nan),
        old_logprobs=torch.where(inputs.mask, inputs.old_logprobs, -7.0),
        rollout_logprobs=torch.where(inputs.mask, inputs.rollout_logprobs, -7.0),
    )
    _, other_total, other_gradient = _loss_and_gradient(loss, spoiled)
    _close(total, other_total, "the loss reads untrained tokens")
    _close(gradient, other_gradient, "the gradient reads untrained tokens")


def _take_samples(inputs: PolicyLossInputs, samples: Sequence[int]) -> tuple[PolicyLossInputs, Tensor]:
    """These samples in this order, and where their tokens were."""
    where = torch.cat([(inputs.sample_index == s).nonzero().squeeze(1) for s in samples])
    counts = torch.tensor([int((inputs.sample_index == s).sum()) for s in samples])
    assert inputs.mask is not None
    assert inputs.rollout_logprobs is not None
    part = replace(
        inputs,
        logprobs=inputs.logprobs.detach()[where],
        old_logprobs=inputs.old_logprobs[where],
        rollout_logprobs=inputs.rollout_logprobs[where],
        advantages=inputs.advantages[where],
        sample_index=torch.repeat_interleave(torch.arange(len(samples)), counts),
        mask=inputs.mask[where],
    )
    return part, where


def _check_loss_split(loss: PolicyLossFn, inputs: PolicyLossInputs) -> None:
    _, total, gradient = _loss_and_gradient(loss, inputs)
    for split in (((4, 2), (0,), (3, 1)), ((3,), (1, 0, 4, 2)), ((0,), (1,), (2,), (3,), (4,))):
        sum_total, sum_gradient = torch.zeros_like(total), torch.zeros_like(gradient)
        for samples in split:
            part, where = _take_samples(inputs, samples)
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


_GROUP_IDS = (7, 3, 7, 7, 5)  # a group of three, two of one
_REWARDS = (1.0, 0.5, 0.0, 0.25, 2.0)


def _advantage_inputs(dtype: torch.dtype) -> AdvantageInputs:
    generator = torch.Generator().manual_seed(1)
    index = torch.repeat_interleave(torch.arange(len(_LENGTHS)), torch.tensor(_LENGTHS))
    count = index.numel()
    numbers = torch.randn(5, count, generator=generator, dtype=torch.float64).to(dtype)
    mask = torch.rand(count, generator=generator) > 0.3
    mask[index == 3] = False
    return AdvantageInputs(
        rewards=torch.tensor(_REWARDS, dtype=dtype),
        group_ids=torch.tensor(_GROUP_IDS),
        sample_index=index,
        mask=mask,
        reward_parts=torch.randn(len(_LENGTHS), 2, generator=generator, dtype=torch.float64).to(dtype),
        part_weights=torch.tensor([1.0, 0.5], dtype=dtype),
        kl=numbers[0],
        values=numbers[1],
        student_logprobs=numbers[2],
        teacher_logprobs=numbers[3],
    )


def _settings(estimator: Estimator, whiten: bool | None = None) -> AdvantageSettings:
    kl_coef = 0.1 if estimator.per_token_reward else 0.0
    return AdvantageSettings(kl_coef=kl_coef, gamma=0.9, lambd=0.8, opd_kl_coef=0.3, whiten=whiten)


def _run(estimator: Estimator, inputs: AdvantageInputs, whiten: bool | None = None) -> Advantages:
    return compute_advantages(estimator, inputs, _settings(estimator, whiten))


def _take(inputs: AdvantageInputs, samples: Sequence[int]) -> tuple[AdvantageInputs, Tensor]:
    """These samples in this order, and where their tokens were."""
    chosen = torch.tensor(samples, dtype=torch.int64)
    places = [(inputs.sample_index == s).nonzero().squeeze(1) for s in samples]
    where = torch.cat(places) if places else chosen
    counts = torch.tensor([p.numel() for p in places], dtype=torch.int64)
    changes: dict[str, Tensor] = {"sample_index": torch.repeat_interleave(torch.arange(len(samples)), counts)}
    per_sample = ("rewards", "group_ids", "trajectory_ids", "reward_parts")
    per_token = ("mask", "kl", "values", "student_logprobs", "teacher_logprobs")
    for names, order in ((per_sample, chosen), (per_token, where)):
        present = {name: value for name in names if (value := getattr(inputs, name)) is not None}
        changes |= {name: value[order] for name, value in present.items()}
    return replace(inputs, **changes), where


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


def _check_advantage_finite(estimator: Estimator, dtype: torch.dtype) -> None:
    inputs = _advantage_inputs(dtype)
    assert inputs.reward_parts is not None
    assert inputs.mask is not None
    equal = replace(
        inputs, rewards=torch.full_like(inputs.rewards, 0.1), reward_parts=torch.full_like(inputs.reward_parts, 0.1)
    )
    untrained = replace(inputs, mask=torch.zeros_like(inputs.mask))
    for name, case in (("equal rewards", equal), ("no trained token", untrained), ("no samples", _take(inputs, ())[0])):
        result = _run(estimator, case)
        finite = torch.isfinite(result.advantages).all() and torch.isfinite(result.returns).all()
        assert bool(finite), f"advantages are not finite with {name}"
