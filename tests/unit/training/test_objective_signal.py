"""What the policy learns from: parts of rewards, a teacher, conditioned rewards, and a weight of KL that is steered."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from treadle.algorithms import RunningMoments
from treadle.catalog import ESTIMATORS
from treadle.config import AlgorithmSection, RewardSection
from treadle.config.rules_training import ignores_bias, ignores_scale
from treadle.errors import ConfigError
from treadle.metrics import reduce_metrics
from treadle.training.batch import batch_of
from treadle.training.checkpoint import Checkpoint
from treadle.training.conditioning import condition_rewards
from treadle.training.objective import build_objective
from treadle.training.trainer_files import write_model

PARTS = {"math": 1.0, "short": 0.5}
TWO = {"advantage_estimator": "gdpo", "rm_type": ("math", "pkg:short"), "rm_weights": (1.0, 0.5)}
KL = {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_target": 0.01, "kl_horizon": 90, "reference_noise": 0.05}


def flat(groups):
    return [s for g in groups for s in g.samples]


def with_parts(groups, values):
    """The groups with these (math, short) parts, sample after sample, and their weighted sum as the reward."""
    rows = iter(values)

    def scored(sample):
        math_part, short = next(rows)
        return replace(sample, reward=math_part + 0.5 * short, reward_parts={"short": short, "math": math_part})

    return [replace(g, samples=tuple(scored(s) for s in g.samples)) for g in groups]


# Parts


def test_parts_are_columns_in_the_order_of_the_rewards(make_groups) -> None:
    groups = with_parts(make_groups((2,), rewards=[[0, 0]]), [(1.0, 0.0), (0.0, 4.0)])
    batch = batch_of(flat(groups), tuple(PARTS))
    assert batch.reward_parts.tolist() == [[1.0, 0.0], [0.0, 4.0]]
    assert batch.select([1]).reward_parts.tolist() == [[0.0, 4.0]]
    assert batch_of([], tuple(PARTS)).reward_parts.shape == (0, 2)


def test_gdpo_normalises_each_reward_of_a_group_by_itself(make_groups) -> None:
    """Parts (1, 0) and (0, 40): ±√½ each, so √½ - ½·√½ and its negative; then whitened over the tokens.

    GRPO on the sum (1, 20) would prefer the other sample.
    """
    values = [(1.0, 0.0), (0.0, 40.0), (1.0, 0.0), (1.0, 0.0)]
    groups = with_parts(make_groups((2, 2), rewards=[[0, 0], [0, 0]], response_lengths=(2, 2)), values)
    batch = batch_of(flat(groups), tuple(PARTS))
    objective = build_objective(AlgorithmSection(advantage_estimator="gdpo"), 64, PARTS)
    found = objective.advantages(batch)
    half = math.sqrt(0.5) / 2
    assert found.shaped.tolist() == pytest.approx([half, -half, 0.0, 0.0], abs=1e-5)
    spread = math.sqrt(4 * half**2 / 7)  # eight tokens with mean 0, two of each sample
    trained = found.advantages[batch.loss_mask].tolist()
    assert trained == pytest.approx([half / spread] * 2 + [-half / spread] * 2 + [0.0] * 4, abs=1e-4)
    grpo = build_objective(AlgorithmSection(), 64).advantages(batch).shaped
    assert grpo[0] < 0 < grpo[1]


def test_a_sample_without_one_of_the_rewards_is_dropped_counted_and_said(make_trainer, make_groups) -> None:
    warnings: list[str] = []
    trainer = make_trainer(warn=warnings.append, **TWO)
    groups = with_parts(make_groups((2, 2), rewards=[[0, 0], [0, 0]]), [(1, 0), (0, 1), (1, 1), (0, 0)])
    odd = replace(groups[0].samples[0], reward_parts={"math": 1.0})
    groups[0] = replace(groups[0], samples=(odd, groups[0].samples[1]))
    metrics = reduce_metrics(trainer.train(groups))
    assert metrics["rollout/dropped/missing_part"] == 1
    assert metrics["train/num_samples"] == 3
    assert warnings == ["1 samples lack a value of one of math, short and are not trained on"]


def test_parts_reach_an_estimator_of_the_users(tmp_path, make_trainer, make_groups) -> None:
    (tmp_path / "own.py").write_text(
        "from dataclasses import replace\nfrom treadle.algorithms import ESTIMATORS\n"
        'own = replace(ESTIMATORS["gdpo"], name="own", whitens=False)\n'
    )
    path = f"{tmp_path}/own.py:own"
    trainer = make_trainer(custom_advantage_path=path, rm_type=TWO["rm_type"])
    groups = with_parts(
        make_groups((2,), rewards=[[0, 0]], response_lengths=(3, 3)), [(1.0, 1.0), (0.0, 0.0)]
    )  # both parts of weight 1: √½ + √½ and its negative
    metrics = reduce_metrics(trainer.train(groups))
    assert metrics["train/advantage_abs_mean"] == pytest.approx(math.sqrt(2.0), abs=1e-5)
    with pytest.raises(ConfigError, match="'own' reads the rewards one by one; name them with rm_type"):
        build_objective(AlgorithmSection(custom_advantage_path=path), 64)


# A teacher


def test_distillation_takes_the_gap_to_the_teacher_off_each_token(make_groups) -> None:
    """One sample a prompt: the reward says nothing, so A_t = -½ (student - teacher)."""
    batch = batch_of(flat(make_groups((1,), rewards=[[1.0]], response_lengths=(3, 3))))
    student, teacher = torch.full((10,), -1.0), torch.full((10,), -1.0)
    teacher[7:] = torch.tensor([-3.0, -1.0, -0.5])
    batch = replace(batch, old_logprobs=student, teacher_logprobs=teacher)
    objective = build_objective(AlgorithmSection(opd_kl_coef=0.5), 64)
    assert objective.needs.prior_logprobs
    assert objective.needs.teacher_logprobs
    found = objective.advantages(batch).advantages
    assert found[7:].tolist() == pytest.approx([-1.0, 0.0, 0.25])
    assert not found[:7].any()


def test_the_trainer_scores_with_the_teacher(make_trainer, make_groups) -> None:
    groups = make_groups((1, 1), rewards=[[0.0], [1.0]])
    trainer = make_trainer(opd_kl_coef=1.0, teacher_noise=0.05)
    batch = batch_of(flat(groups))
    gap = trainer.logprobs(batch, trainer.model) - trainer.logprobs(batch, trainer.teacher)
    metrics = reduce_metrics(trainer.train(groups))
    assert metrics["train/teacher_kl"] == pytest.approx(float(gap[batch.loss_mask].mean()), abs=1e-6)
    assert metrics["train/advantage_abs_mean"] == pytest.approx(float(gap[batch.loss_mask].abs().mean()), abs=1e-6)
    assert metrics["train/advantage_abs_mean"] > 1e-3
    same = reduce_metrics(make_trainer(opd_kl_coef=1.0).train(groups))
    assert same["train/teacher_kl"] == pytest.approx(0.0, abs=1e-6)
    assert "train/teacher_kl" not in reduce_metrics(make_trainer().train(groups))


# A weight of KL that is steered


def test_the_weight_of_kl_follows_what_was_measured(make_trainer, make_groups) -> None:
    """9 samples, horizon 90: one tenth of the clipped relative error a rollout."""
    trainer = make_trainer(**KL)
    weight = 0.1
    for rollout in range(3):
        metrics = reduce_metrics(trainer.train(make_groups(seed=rollout), rollout))
        assert metrics["train/kl_coef"] == pytest.approx(weight)
        assert metrics["train/num_samples"] == 9
        weight *= 1 + 0.1 * min(max(metrics["train/kl"] / 0.01 - 1, -0.2), 0.2)
    assert trainer.objective.kl_loss_coef == pytest.approx(weight)
    assert weight != pytest.approx(0.1)
    assert "train/kl_coef" not in reduce_metrics(make_trainer(use_kl_loss=True, kl_loss_coef=0.1).train(make_groups()))


def test_the_weight_of_kl_in_the_reward_is_steered_too() -> None:
    fields = {"advantage_estimator": "reinforce_plus_plus", "kl_coef": 0.2, "kl_target": 1.0, "kl_horizon": 100}
    objective = build_objective(AlgorithmSection(**fields), 64)
    steered = objective.steered(measured_kl=0.9, num_samples=50)
    assert steered.kl_coef == pytest.approx(0.2 * (1 - 0.1 * 0.5))
    assert steered.kl_loss_coef == 0
    assert objective.kl_coef == 0.2


def test_a_rollout_that_measured_nothing_leaves_the_weight_alone(make_trainer) -> None:
    trainer = make_trainer(**KL)
    trainer.train([])
    assert trainer.objective.kl_weight == 0.1


def test_samples_of_one_trajectory_count_once_in_what_is_steered(make_trainer, make_groups) -> None:
    """The weight moves by the number of trajectories, the running mean is over them."""
    groups = make_groups((3,), rewards=[[1.0, 1.0, 0.0]])
    one = replace(groups[0].samples[1], trajectory_id=0)
    fanned = [replace(groups[0], samples=(groups[0].samples[0], one, groups[0].samples[2]))]
    trainer = make_trainer(**KL, advantage_estimator="rloo", normalize_rewards_running=True)
    metrics = reduce_metrics(trainer.train(fanned))
    error = min(max(metrics["train/kl"] / 0.01 - 1, -0.2), 0.2)
    assert trainer.objective.kl_weight == pytest.approx(0.1 * (1 + error * 2 / 90))
    assert (trainer.planner.reward_moments.count, trainer.planner.reward_moments.mean) == (2, 0.5)


# Conditioned rewards


@pytest.mark.parametrize("whitened", [False, True])
@pytest.mark.parametrize("name", [name for name, traits in ESTIMATORS.items() if not traits.needs_parts])
def test_what_the_rules_say_of_scale_and_bias_is_so(make_config, make_groups, name, whitened) -> None:
    """A flag is refused as idle exactly where advantages do not change by it."""
    batch = batch_of(flat(make_groups((4, 3, 4), seed=2)))
    batch = replace(batch, values=torch.linspace(0.0, 1.0, len(batch.token_ids)))
    traits = ESTIMATORS[name]
    for std in (True, False):
        for bias in (0.0, 0.5):
            fields = {"advantage_estimator": name, "normalize_advantages": whitened, "grpo_std_normalization": std}
            config = make_config(**fields, reward_bias=bias)
            objective = build_objective(config.algorithm, 64)

            def advantages(scale: float, more: float, objective=objective, bias=bias):
                found = objective.advantages(replace(batch, rewards=scale * batch.rewards + bias + more))
                return found.returns if traits.needs_values else found.advantages  # a critic learns what is fed

            plain = advantages(1.0, 0.0)
            same_scale = torch.allclose(advantages(3.0, 0.0), plain, atol=1e-4)
            same_bias = torch.allclose(advantages(1.0, 1.0), plain, atol=1e-4)
            assert same_scale == ignores_scale(config, traits), (name, std, bias)
            assert same_bias == ignores_bias(config, traits), (name, std, bias)


def test_maxrl_refuses_a_negative_reward(make_trainer, make_groups) -> None:
    trainer = make_trainer(advantage_estimator="maxrl")
    with pytest.raises(ConfigError, match=r"maxrl divides by the mean reward and can't take a negative one, got -0\.5"):
        trainer.train(make_groups((2,), rewards=[[1.0, -0.5]]))


def test_rewards_are_scaled_then_clipped_then_normalised() -> None:
    section = RewardSection(reward_scale=2.0, reward_bias=-1.0, reward_clip_low=-0.5, reward_clip_high=2.0)
    raw = torch.tensor([0.0, 1.0, 5.0])  # -1, 1, 9
    found, moments = condition_rewards(raw, section, RunningMoments())
    assert found.tolist() == [-0.5, 1.0, 2.0]
    assert moments == RunningMoments()
    running = section.model_copy(update={"normalize_rewards_running": True})
    _, moments = condition_rewards(raw, running, RunningMoments())
    second, moments = condition_rewards(torch.tensor([1.0]), running, moments)  # all: -0.5, 1, 2, 1
    mean = 3.5 / 4
    std = math.sqrt(sum((x - mean) ** 2 for x in (-0.5, 1.0, 2.0, 1.0)) / 3)
    assert second.tolist() == pytest.approx([(1 - mean) / std], abs=1e-5)
    assert moments.count == 4


def test_the_overlong_penalty_is_not_conditioned(make_trainer, make_groups) -> None:
    """Scale 2, no deviation: rewards 2 and 0, less a penalty of 0.5 for both, are ±1 around their mean."""
    fields = {"overlong_buffer_len": 4, "overlong_penalty_factor": 0.5, "rollout_max_response_len": 4}
    trainer = make_trainer(reward_scale=2.0, grpo_std_normalization=False, **fields)
    groups = make_groups((2,), rewards=[[1.0, 0.0]], response_lengths=(4, 4))
    metrics = reduce_metrics(trainer.train(groups))
    assert metrics["train/advantage_abs_mean"] == pytest.approx(1.0)


def test_what_moves_beside_the_weights_is_resumed(make_trainer, make_groups, tmp_path) -> None:
    fields = {**KL, "advantage_estimator": "rloo", "normalize_rewards_running": True}
    one, other = make_trainer(**fields), make_trainer(**fields)
    for rollout in range(2):
        one.train(make_groups(seed=rollout), rollout)
    state = one.state()
    assert state["reward_moments"][0] == 18
    write_model(one, tmp_path / "model")
    from safetensors.torch import save_file

    save_file(one.optimizer.state_tensors(), tmp_path / "optimizer.safetensors")
    other.load(Checkpoint(tmp_path, 2, state))
    assert other.planner.reward_moments == one.planner.reward_moments
    assert other.objective.kl_weight == one.objective.kl_weight != 0.1
    metrics = [reduce_metrics(trainer.train(make_groups(seed=2), 2)) for trainer in (one, other)]
    for name in ("train/kl_coef", "train/loss", "train/advantage_abs_mean"):
        assert metrics[0][name] == metrics[1][name]


# Factors on the loss


def test_named_corrections_take_the_numbers_given(make_groups) -> None:
    """w = 0.5, 1, 4 in one sample, 3 in the other, one token of two samples each before them."""
    groups = make_groups((2,), rewards=[[0.0, 1.0]], response_lengths=(3, 3), prompt_lengths=(2,))
    batch = batch_of(flat(groups))
    w = torch.tensor([1, 1, 0.5, 1, 4, 1, 1, 3, 3, 3])
    batch = replace(batch, old_logprobs=batch.rollout_logprobs + w.log())

    def factors(**fields) -> list[float]:
        found = build_objective(AlgorithmSection(**fields), 64).correction(batch)
        assert not found[~batch.loss_mask].any()
        return found[batch.loss_mask].tolist()

    def is_near(*numbers: float):
        return pytest.approx(list(numbers), rel=1e-4)

    assert factors(rollout_correction="decoupled") == is_near(0.5, 1, 4, 3, 3, 3)
    assert factors(rollout_correction="decoupled", correction_high=2) == is_near(0.5, 1, 2, 2, 2, 2)
    assert factors(rollout_correction="sequence") == is_near(2, 2, 2, 2, 2, 2)  # 2 and 27, cut at 2
    bounds = {"correction_low": 0.1, "correction_high": 5.0}
    assert factors(rollout_correction="sequence", correction_bound="mask", **bounds) == is_near(2, 2, 2, 0, 0, 0)
    reject = {"correction_reject_level": "geometric", "correction_reject_high": 2.0}  # ∛2 and 3
    assert factors(rollout_correction="decoupled", **reject) == is_near(0.5, 1, 4, 0, 0, 0)
    reject = {"correction_reject_level": "token", "correction_reject_low": 0.9}
    assert factors(rollout_correction="decoupled", **reject) == is_near(0, 1, 4, 3, 3, 3)
    mean = 14.5 / 6
    found = factors(rollout_correction="decoupled", correction_batch_mean_one=True)
    assert found == is_near(*(x / mean for x in (0.5, 1, 4, 3, 3, 3)))


def test_m2po_drops_the_tokens_with_the_largest_gap(make_groups) -> None:
    """Gaps 0.1, 0, 1 and 0.2 three times: without the 1 the mean square is 0.13 / 5 = 0.026."""
    groups = make_groups((2,), rewards=[[0.0, 1.0]], response_lengths=(3, 3), prompt_lengths=(2,))
    batch = batch_of(flat(groups))
    gap = torch.tensor([0, 0, 0.1, 0, 1, 0, 0, 0.2, -0.2, 0.2])
    batch = replace(batch, old_logprobs=batch.rollout_logprobs + gap)
    objective = build_objective(AlgorithmSection(m2po_threshold=0.04), 64)
    assert objective.needs.prior_logprobs
    assert objective.correction(batch)[batch.loss_mask].tolist() == [1, 1, 0, 1, 1, 1]
    both = build_objective(AlgorithmSection(m2po_threshold=0.04, rollout_correction="decoupled"), 64)
    expected = [math.exp(x) for x in (0.1, 0)] + [0.0] + [math.exp(x) for x in (0.2, -0.2, 0.2)]
    assert both.correction(batch)[batch.loss_mask].tolist() == pytest.approx(expected, rel=1e-4)


def test_bounds_that_cross_the_usual_ones_are_refused_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match=r"tis would have bounds 3 to 2, one of them its usual"):
        build_objective(AlgorithmSection(rollout_correction="tis", correction_low=3.0), 64)
    build_objective(AlgorithmSection(rollout_correction="icepop", correction_low=0.0, correction_high=0.2), 64)


def test_the_gates_of_sapo_are_as_steep_as_asked() -> None:
    """-(4/τ) sigmoid(τ (ρ - 1)) A with ρ = 2: τ = 2 where A = 1, τ = 4 where A = -1."""
    now, old = torch.full((2,), math.log(2.0)), torch.zeros(2)
    section = AlgorithmSection(policy_loss="sapo", sapo_tau_positive=2.0, sapo_tau_negative=4.0)
    found = build_objective(section, 64).policy_loss(now, old, torch.tensor([1.0, -1.0]), torch.tensor([0, 0]), 1)
    expected = [-2 / (1 + math.exp(-2)), 1 / (1 + math.exp(-4))]
    assert found.loss.tolist() == pytest.approx(expected, rel=1e-5)
