"""Corrections, penalties and masks of the objective, through the trainer: what they change and what they leave alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from treadle.catalog import KL_ESTIMATORS, POLICY_LOSSES
from treadle.config import AlgorithmSection
from treadle.training.batch import batch_of
from treadle.training.objective import build_objective
from treadle.types import Status


def flat(groups):
    return [s for g in groups for s in g.samples]


def test_a_correction_of_equal_logprobs_changes_nothing(make_trainer, make_groups) -> None:
    plain, corrected = make_trainer(), make_trainer(rollout_correction="tis")
    groups = make_groups()
    batch = batch_of(flat(groups))
    own = plain.logprobs(batch, plain.model)
    parts = torch.split(own, batch.lengths.tolist())
    samples = iter(parts)
    groups = [
        replace(g, samples=tuple(replace(s, rollout_logprobs=next(samples).numpy()) for s in g.samples)) for g in groups
    ]
    plain.train(groups)
    metrics = {m.name: m.value for m in corrected.train(groups)}
    assert metrics["train/correction_mean"] == pytest.approx(1.0, abs=1e-5)
    for name, weight in plain.model.named_parameters():
        torch.testing.assert_close(corrected.model.get_parameter(name), weight, atol=1e-6, rtol=1e-5)


def test_correction_weights_by_hand(make_groups) -> None:
    """w = exp(old - rollout): tis clips it to [0, 2], icepop drops what is outside its bounds, a veto drops the sample."""
    batch = batch_of(flat(make_groups((2,), rewards=[[0.0, 1.0]])))
    trained = batch.loss_mask
    drift = torch.where(trained, torch.linspace(-2, 1, len(trained)), 0.0)
    batch = replace(batch, old_logprobs=batch.rollout_logprobs + drift)
    w = torch.where(trained, drift.exp(), 0.0)

    def weights(**fields):
        return build_objective(AlgorithmSection(**fields), 64).correction(batch)

    torch.testing.assert_close(weights(rollout_correction="tis"), w.clamp(max=2.0), atol=1e-5, rtol=1e-5)
    inside = (w >= 0.9) & (w <= 1.5)
    found = weights(rollout_correction="icepop", correction_low=0.9, correction_high=1.5)
    torch.testing.assert_close(found, torch.where(inside, w, 0.0), atol=1e-5, rtol=1e-5)
    lowest = [w[trained & (batch.sample_index == i)].min() for i in (0, 1)]
    threshold = float(sum(lowest) / 2)
    found = weights(rollout_correction="tis", correction_veto=threshold)
    for i in (0, 1):
        own = trained & (batch.sample_index == i)
        assert bool((found[own] == 0).all()) == bool(lowest[i] < threshold)
    assert weights() is None


def test_the_overlong_penalty_is_taken_off_the_reward_before_advantages(make_groups) -> None:
    """A buffer of 4 before a limit of 8: lengths 4, 6, 8, 9 cost 0, 0.25, 0.5, 0.5 at factor 0.5."""
    groups = make_groups((4,), response_lengths=(4, 4), rewards=[[1.0] * 4])
    longer = make_groups((4,), response_lengths=(9, 9), rewards=[[1.0] * 4])[0]
    samples = []
    for sample, length in zip(longer.samples, (4, 6, 8, 9), strict=True):
        end = len(sample.token_ids) - 9 + length
        cut = {k: getattr(sample, k)[:end] for k in ("token_ids", "loss_mask", "rollout_logprobs", "weight_versions")}
        samples.append(replace(sample, **cut))
    batch = batch_of(samples)
    objective = build_objective(AlgorithmSection(overlong_buffer_len=4, overlong_penalty_factor=0.5), 8)
    assert objective.rewards(batch).tolist() == [1.0, 0.75, 0.5, 0.5]
    assert objective.advantages(batch).shaped[0] > 0 > objective.advantages(batch).shaped[3]
    assert build_objective(AlgorithmSection(), 8).rewards(batch) is batch.rewards
    assert len(groups) == 1


def test_masked_truncated_samples_count_in_their_group_and_not_in_the_loss(make_trainer, make_groups) -> None:
    """The same update as with the truncated sample's loss set to zero by hand: other samples keep their advantages."""
    groups = make_groups((3, 3), rewards=[[1.0, 0.0, 0.5], [0.0, 1.0, 0.0]])
    cut = [replace(g, samples=(replace(g.samples[0], status=Status.TRUNCATED), *g.samples[1:])) for g in groups]
    masked = make_trainer(mask_truncated=True)
    metrics = masked.train(cut)
    assert sum(m.value for m in metrics if m.name == "rollout/dropped/truncated") == 2
    counts = {m.name: m.value for m in metrics}
    assert counts["train/num_samples"] == 4
    assert counts["train/num_tokens"] == sum(s.response_length for g in groups for s in g.samples[1:])
    whole = make_trainer()
    batch = batch_of(flat(groups))
    batch = replace(batch, advantages=whole.objective.advantages(batch).advantages)
    part = batch.select([1, 2, 4, 5])
    part = replace(part, loss_weights=whole.objective.loss_weights(part, whole.arithmetic.global_batch_size))
    whole._step(part, whole.micro_batches.split(part, range(len(part))))
    for name, weight in whole.model.named_parameters():
        torch.testing.assert_close(masked.model.get_parameter(name), weight, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("loss", POLICY_LOSSES)
def test_every_policy_loss_takes_a_step_and_starts_at_ratio_one(make_trainer, make_groups, loss) -> None:
    trainer = make_trainer(policy_loss=loss)
    before = {n: p.clone() for n, p in trainer.model.named_parameters()}
    metrics = {m.name: m.value for m in trainer.train(make_groups(rewards=[[1, 0, 0], [0, 1], [1, 0, 1, 0]]))}
    assert metrics["train/ratio_max"] == pytest.approx(1.0, abs=1e-5)
    # dppo_tv compares with the engine, whose logprobs here are those of another policy: it drops tokens in the only step
    assert (metrics["train/clip_fraction"] > 0.2) == (loss == "dppo_tv")
    assert loss == "dppo_tv" or metrics["train/clip_fraction"] == 0
    assert any((before[n] != p).any() for n, p in trainer.model.named_parameters())


def test_drifted_samples_with_a_negative_advantage_are_dropped(make_trainer, make_groups) -> None:
    """opsm with a tiny threshold, in the second step of a rollout: only what drifted down with A < 0 loses its loss."""
    objective = make_trainer(opsm_delta=0.1).objective
    now = torch.tensor([-1.0, -1.0, -1.0, -1.0])
    old = torch.tensor([-0.5, -0.5, -0.5, -0.5])  # drifted by 0.5 nats a token
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0])
    found = objective.policy_loss(now, old, advantages, torch.tensor([0, 0, 1, 1]), 2).loss
    assert (found[:2] != 0).all()
    assert (found[2:] == 0).all()
    near = objective.policy_loss(now, now + 0.05, advantages, torch.tensor([0, 0, 1, 1]), 2).loss
    assert (near != 0).all()


def test_an_unbiased_kl_is_the_plain_one_times_the_ratio() -> None:
    logprobs, ref, old = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0]), torch.tensor([-1.2, -2.5])
    fields = {"use_kl_loss": True, "kl_loss_coef": 1.0, "kl_loss_type": "k3"}
    plain = build_objective(AlgorithmSection(**fields), 64).kl(logprobs, ref, old)
    unbiased = build_objective(AlgorithmSection(**fields, use_unbiased_kl=True), 64).kl(logprobs, ref, old)
    torch.testing.assert_close(unbiased, plain * (logprobs - old).exp())


def test_only_the_undecided_tokens_are_trained(make_trainer, make_groups) -> None:
    """Half of the tokens get factor 0, the same ones whatever the micro-batches; the denominator stays."""
    groups = make_groups((4, 3))
    fields = {"top_entropy_fraction": 0.5, "skip_zero_advantage": False}
    trainers = [make_trainer(**fields), make_trainer(**fields, use_dynamic_batch_size=False, micro_batch_size=2)]
    metrics = [{m.name: m.value for m in trainer.train(groups)} for trainer in trainers]
    for name, weight in trainers[0].model.named_parameters():
        torch.testing.assert_close(trainers[1].model.get_parameter(name), weight, atol=1e-6, rtol=1e-5)
    tokens = sum(s.response_length for s in flat(groups))
    assert metrics[0]["train/correction_mean"] == pytest.approx(round(0.5 * tokens) / tokens)
    plain = make_trainer(skip_zero_advantage=False)
    plain.train(groups)
    assert any((plain.model.get_parameter(n) != w).any() for n, w in trainers[0].model.named_parameters())


def test_masked_samples_do_not_count_in_whitening_or_in_what_is_chosen(make_trainer, make_groups) -> None:
    """The tokens that are trained have mean 0, and half of them are chosen by entropy, whatever the masked ones hold."""
    groups = make_groups((4, 4), rewards=[[1.0, 0.0, 1.0, 0.5], [0.0, 1.0, 0.0, 0.0]])
    cut = [replace(g, samples=(replace(g.samples[0], status=Status.TRUNCATED), *g.samples[1:])) for g in groups]
    fields = {"mask_truncated": True, "normalize_advantages": True, "top_entropy_fraction": 0.5}
    metrics = {
        m.name: m.value for m in make_trainer(**fields, micro_batch_size=8, use_dynamic_batch_size=False).train(cut)
    }
    assert metrics["train/advantage_mean"] == pytest.approx(0.0, abs=1e-6)
    tokens = sum(s.response_length for g in groups for s in g.samples[1:])
    assert metrics["train/correction_mean"] == pytest.approx(round(0.5 * tokens) / tokens)


def test_one_step_without_correction_recomputes_no_logprobs(make_trainer, make_groups) -> None:
    def passes(**fields) -> int:
        trainer = make_trainer(**fields)
        seen = []
        score = trainer._scored
        trainer._scored = lambda *given: (seen.append(given), score(*given))[1]
        trainer.train(make_groups())
        return len(seen)

    assert passes() == 0
    assert passes(opsm_delta=0.1, custom_loss_path=None) == 0
    assert passes(use_kl_loss=True, kl_loss_coef=0.1, use_unbiased_kl=True) == 1  # the reference's
    assert passes(rollout_correction="tis") == 1
    assert passes(num_steps_per_rollout=2, rollout_batch_size=2, n_samples_per_prompt=8) == 1
    assert passes(opd_kl_coef=0.1) == 2
    assert passes(advantage_estimator="reinforce_plus_plus", kl_coef=0.1) == 2


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_which_estimators_give_the_gradient_of_the_kl_once_times_the_ratio(name) -> None:
    """Over all tokens of a small vocabulary: Σ p_old · ∇(ρ · k) against ∇ Σ p (log p - log p_ref)."""
    generator = torch.Generator().manual_seed(0)
    logits, old, ref = (torch.randn(5, generator=generator, dtype=torch.float64) for _ in range(3))
    logits.requires_grad_()
    lp, lp_old, lp_ref = logits.log_softmax(0), old.log_softmax(0), ref.log_softmax(0)
    fields = {"use_kl_loss": True, "kl_loss_coef": 1.0, "kl_loss_type": name, "use_unbiased_kl": True}
    estimate = build_objective(AlgorithmSection(**fields), 64).kl(lp, lp_ref, lp_old)
    (found,) = torch.autograd.grad((lp_old.exp() * estimate).sum(), logits, retain_graph=True)
    (true,) = torch.autograd.grad((lp.exp() * (lp - lp_ref)).sum(), logits)
    assert torch.allclose(found, true) is KL_ESTIMATORS[name].unbiased_by_ratio
