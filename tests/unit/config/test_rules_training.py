"""Rules about what a policy learns from and what weighs its tokens: each mistake is one line, sound ones pass."""

import pytest

from treadle.catalog import reward_names
from treadle.config import check_config, load_config
from treadle.config.sections import RewardSection
from treadle.errors import ConfigError

SOUND = "--hf-checkpoint model --prompt-data data.jsonl --num-rollout 4 --rm-type math --label-key answer".split()
TEACHER = "--opd-teacher-load teacher --opd-kl-coef 0.1"
RPP = "--advantage-estimator reinforce_plus_plus"


def findings(argv: str) -> list[str]:
    return check_config(load_config(None, [*SOUND, *argv.split()]))


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        ("--advantage-estimator gdpo", ["gdpo", "1 is given", "use grpo"]),
        (f"--advantage-estimator gdpo --rm-type {TEACHER}", ["gdpo", "0 is given"]),
        ("--opd-teacher-load teacher", ["opd_teacher_load = teacher does nothing without opd_kl_coef"]),
        ("--opd-kl-coef 0.1", ["opd_kl_coef = 0.1 needs opd_teacher_load"]),
        (f"{TEACHER} --rm-type --eval-prompt-data a=x --eval-interval 2", ["no reward is given"]),
        ("--use-kl-loss --kl-loss-coef 0.1 --kl-target 0.05", ["kl_target = 0.05 needs kl_horizon"]),
        ("--use-kl-loss --kl-loss-coef 0.1 --kl-horizon 10000", ["kl_horizon = 10000 needs kl_target"]),
        ("--kl-target 0.05 --kl-horizon 10000", ["no KL to steer", "use_kl_loss"]),
        (f"{RPP} --kl-coef 0.1 --kl-target 1 --kl-horizon 25", ["kl_horizon = 25", "128 samples", "more than 25"]),
        (
            f"{RPP} --kl-coef 0.1 --kl-target 1 --kl-horizon 8 --rollout-batch-size 5",
            ["kl_horizon = 8", "40 samples", "more than 8"],
        ),
        ("--reward-clip-low 1 --reward-clip-high 1", ["reward_clip_low = 1.0 must be below"]),
        ("--reward-clip-low 2 --reward-clip-high 1", ["reward_clip_low = 2.0", "reward_clip_high = 1.0"]),
        ("--reward-scale 2", ["reward_scale = 2.0 does nothing with grpo"]),
        ("--reward-scale 2 --advantage-estimator maxrl", ["does nothing with maxrl"]),
        ("--reward-scale 2 --advantage-estimator rloo --normalize-advantages", ["does nothing with rloo"]),
        (f"--reward-scale 2 {RPP}", ["reward_scale = 2.0 does nothing with reinforce_plus_plus"]),
        (f"--reward-bias 2 {RPP} --kl-coef 0.1", ["reward_bias = 2.0 does nothing"]),
        ("--reward-bias -1 --advantage-estimator rloo", ["reward_bias = -1.0 does nothing with rloo"]),
        ("--normalize-rewards-running", ["normalize_rewards_running = true does nothing with grpo"]),
        ("--normalize-rewards-running --advantage-estimator maxrl", ["negative", "maxrl divides by their mean"]),
        (
            "--advantage-estimator gdpo --rm-type math exact --reward-clip-high 1 --overlong-buffer-len 8",
            ["reward_clip_high = 1.0, overlong_buffer_len = 8 does nothing with gdpo"],
        ),
        (
            f"{TEACHER} --rm-type --advantage-estimator rloo --reward-scale 2",
            ["reward_scale = 2.0 does nothing without a reward"],
        ),
        ("--correction-bound mask", ["correction_bound = mask does nothing without rollout_correction"]),
        ("--correction-batch-mean-one", ["correction_batch_mean_one = true does nothing without"]),
        (
            "--correction-reject-level token --correction-reject-high 2",
            ["correction_reject_level = token does nothing without rollout_correction"],
        ),
        (
            "--rollout-correction tis --correction-reject-high 2",
            ["correction_reject_high = 2.0 does nothing without correction_reject_level"],
        ),
        ("--rollout-correction tis --correction-reject-level token", ["drops nothing without a bound"]),
        (
            "--rollout-correction tis --correction-reject-level token --correction-reject-low 3 --correction-reject-high 2",
            ["correction_reject_low = 3.0 is more than correction_reject_high = 2.0"],
        ),
        ("--rollout-correction tis --correction-low 3 --correction-high 2", ["correction_low = 3.0 is more than"]),
        (
            "--rollout-correction decoupled --correction-low 0.5",
            ["correction_low = 0.5 does nothing with", "decoupled"],
        ),
        ("--rollout-correction tis --correction-bound truncate --correction-low 0.5", ["cut from above only"]),
        (
            "--rollout-correction tis --correction-reject-level token --correction-reject-low 0",
            ["drops nothing without a bound"],
        ),
        (f"{TEACHER} --rm-type --group-filter zero_signal", ["drops every group of a run without a reward"]),
        ("--advantage-estimator maxrl --overlong-buffer-len 8", ["overlong_buffer_len = 8", "divides by their mean"]),
        ("--sapo-tau-positive 2", ["sapo_tau_positive = 2.0 does nothing with policy loss ppo"]),
        ("--policy-loss gspo --sapo-tau-negative 2", ["sapo_tau_negative = 2.0 does nothing with policy loss gspo"]),
    ],
)
def test_fault(argv, parts):
    with pytest.raises(ConfigError) as caught:
        findings(argv)
    (message,) = str(caught.value).splitlines()
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (f"{TEACHER} --group-filter zero_signal", "the teacher would still teach"),
        ("--advantage-estimator gdpo --rm-type math exact --group-filter zero_signal", "gdpo reads each of them"),
        *(
            (
                f"--use-kl-loss --kl-loss-coef 0.1 --use-unbiased-kl --kl-loss-type {name}",
                "it does with k1, k3, low_var_kl",
            )
            for name in ("k2", "abs", "k3+")
        ),
        ("--use-kl-loss --kl-loss-coef 0.1 --kl-loss-type k1", "its gradient is 0 on average; add use_unbiased_kl"),
    ],
)
def test_warning(argv, part):
    (message,) = findings(argv)
    assert part in message


@pytest.mark.parametrize(
    "argv",
    [
        "--advantage-estimator gdpo --rm-type math exact --rm-weights 1 0.5 --no-grpo-std-normalization",
        "--advantage-estimator gdpo --rm-type math --custom-rm-path mine.py:score",
        f"{TEACHER} --n-samples-per-prompt 1",
        f"{TEACHER} --rm-type --n-samples-per-prompt 1",
        "--use-kl-loss --kl-loss-coef 0.1 --kl-target 0.05 --kl-horizon 10000",
        f"{RPP} --kl-coef 0.1 --kl-target 0.05 --kl-horizon 26",
        "--reward-clip-high 1 --reward-scale 2 --reward-bias -1",
        "--reward-scale 2 --overlong-buffer-len 8",
        "--reward-scale 2 --advantage-estimator rloo",
        f"--reward-scale 2 --advantage-estimator rloo --normalize-advantages {TEACHER}",
        f"--reward-scale 2 {RPP} --kl-coef 0.1",
        f"--reward-bias 2 {RPP} --gamma 0.9",
        "--reward-bias 1 --advantage-estimator maxrl",
        "--reward-scale 2 --reward-bias 1 --advantage-estimator maxrl",  # r and r + 1/2 are not the same to it
        *(
            f"--use-kl-loss --kl-loss-coef 0.1 --use-unbiased-kl --kl-loss-type {name}"
            for name in ("k1", "k3", "low_var_kl")
        ),
        "--reward-scale 2 --reward-bias 1 --normalize-rewards-running --advantage-estimator ppo",
        "--normalize-rewards-running --advantage-estimator rloo",
        "--rollout-correction decoupled --correction-high 2",
        "--rollout-correction sequence --correction-bound mask --correction-low 0.5 --correction-batch-mean-one",
        "--rollout-correction tis --correction-reject-level sequence --correction-reject-low 0.1",
        "--m2po-threshold 0.04",
        "--policy-loss sapo --sapo-tau-positive 2 --sapo-tau-negative 3",
        "--custom-loss-path mine.py:loss --sapo-tau-positive 2",
        "--policy-loss dppo_tv --eps-clip-c 5",
    ],
)
def test_sound_combination(argv):
    assert findings(argv) == []


def test_each_reward_has_a_name_and_a_weight():
    assert reward_names(("math", "a/b.py:score", "pkg:deep/score", "pkg:score")) == (
        "math",
        "score",
        "deep.score",
        "score_2",
    )
    assert reward_names(("a:f", "b:f", "c:f")) == ("f", "f_2", "f_3")
    section = RewardSection(rm_type=("math", "exact"), custom_rm_path="mine.py:score")
    assert section.part_weights == {"math": 1.0, "exact": 1.0, "score": 1.0}
    weighted = section.model_copy(update={"rm_weights": (1.0, 0.5, 2.0)})
    short = section.model_copy(update={"rm_weights": (1.0, 0.5)})  # a fault of its own, told by the rules
    assert short.part_weights == section.part_weights
    assert weighted.part_weights == {"math": 1.0, "exact": 0.5, "score": 2.0}
