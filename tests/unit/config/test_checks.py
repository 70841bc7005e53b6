"""Each rule fires on its own mistake, with the value and the remedy, and never on a sound configuration."""

import pytest

from treadle.catalog import ESTIMATORS
from treadle.config import Config, check_config, load_config, parse_eval_sets
from treadle.config.conditions import filled
from treadle.config.fields import config_fields
from treadle.errors import ConfigError

SOUND = [
    *["--hf-checkpoint", "model", "--prompt-data", "data.jsonl", "--num-rollout", "4"],
    *["--rm-type", "math", "--label-key", "answer"],
]


def findings(*argv: str, evaluation_only: bool = False) -> list[str]:
    return check_config(load_config(None, [*SOUND, *argv]), evaluation_only=evaluation_only)


def faults(*argv: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        findings(*argv)
    lines = str(caught.value).splitlines()
    return lines if len(lines) == 1 else [line.strip() for line in lines[1:]]


def test_sound_configuration_has_no_findings():
    assert findings() == []


@pytest.mark.parametrize("name", list(ESTIMATORS))
def test_every_estimator_is_accepted(name):
    rewards = ["--rm-type", "math", "exact"] if ESTIMATORS[name].needs_parts else []
    assert findings("--advantage-estimator", name, *rewards) == []


def test_all_faults_are_reported_together_one_line_each():
    with pytest.raises(ConfigError) as caught:
        check_config(Config())
    head, *lines = str(caught.value).splitlines()
    assert head == "the configuration has 4 faults:"
    assert [line.split()[0] for line in lines] == ["hf_checkpoint", "prompt_data", "no", "how"]


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        ("--hf-checkpoint=", ["hf_checkpoint is not given"]),
        ("--prompt-data", ["prompt_data is not given"]),
        ("--rm-type", ["no reward is given", "custom_rm_path"]),
        ("--num-rollout None", ["num_rollout", "num_epoch"]),
        ("--num-epoch 3", ["num_rollout = 4 and num_epoch = 3"]),
        ("--global-batch-size 100", ["16 × 8 = 128", "global_batch_size = 100"]),
        ("--rollout-temperature 0", ["rollout_temperature = 0", "more than 0"]),
        ("--n-samples-per-prompt 1", ["n_samples_per_prompt = 1", "grpo", "reinforce_plus_plus"]),
        ("--advantage-estimator rloo --n-samples-per-prompt 1", ["rloo"]),
        ("--advantage-estimator grop", ["'grop' is unknown", "did you mean 'grpo'"]),
        ("--kl-coef 0.1", ["kl_coef = 0.1", "grpo", "use_kl_loss"]),
        ("--advantage-estimator cispo --kl-coef 0.1", ["cispo"]),
        (
            "--advantage-estimator reinforce_plus_plus --kl-coef 0.1 --use-kl-loss --kl-loss-coef 0.1",
            ["kl_coef = 0.1 and use_kl_loss", "keep one"],
        ),
        ("--kl-loss-coef 0.1", ["kl_loss_coef = 0.1", "without use_kl_loss"]),
        ("--use-kl-loss --kl-loss-coef 1 --kl-loss-type low_var", ["'low_var' is unknown", "low_var_kl"]),
        ("--eps-clip-high 0.1", ["eps_clip_high = 0.1", "eps_clip = 0.2"]),
        ("--eps-clip 1", ["eps_clip = 1 leaves the ratio without a lower bound"]),
        ("--gamma 0.9", ["gamma = 0.9", "grpo"]),
        ("--advantage-estimator reinforce_plus_plus_baseline --gamma 0.9", ["gamma = 0.9"]),
        ("--advantage-estimator reinforce_plus_plus --lambd 0.9", ["lambd = 0.9", "critic"]),
        ("--calculate-per-token-loss --loss-length-divisor 9", ["loss_length_divisor = 9", "denominators"]),
        ("--micro-batch-size 3", ["micro_batch_size = 3", "--no-use-dynamic-batch-size"]),
        ("--no-use-dynamic-batch-size", ["needs micro_batch_size"]),
        ("--start-rollout-id 4", ["start_rollout_id = 4", "num_rollout = 4"]),
        ("--lr-decay-steps 3", ["lr_decay_steps = 3", "constant"]),
        ("--lr-decay-style linear --lr-decay-steps 3 --lr-warmup-steps 3", ["lr_decay_steps = 3", "lr_warmup_steps"]),
        ("--min-lr 0.1", ["min_lr = 0.1", "above lr = 1e-06"]),
        ("--rm-type maths", ["'maths' is unknown", "did you mean 'math'"]),
        ("--rm-type math math", ["math twice"]),
        ("--rm-weights 1 2", ["rm_weights has 2 numbers for 1 rewards"]),
        ("--custom-rm-path mine.py", ["custom_rm_path 'mine.py'", "file.py:function"]),
        ("--rm-type regex", ["set rm_regex"]),
        ("--rm-regex a", ["rm_regex does nothing", "rm_type"]),
        ("--rm-type regex --rm-regex (", ["rm_regex '('", "no valid pattern"]),
        ("--label-key None", ["math reward", "label_key"]),
        ("--prompt-data-weights 1 2", ["prompt_data_weights has 2 numbers for 1 sources"]),
        ("--prompt-data-weights 0", ["above 0"]),
        ("--eval-interval 2", ["eval_interval = 2 needs eval_prompt_data"]),
        ("--eval-prompt-data a.jsonl", ["'a.jsonl' must be name=source"]),
        ("--eval-prompt-data a/b=c", ["'a/b=c' must be name=source"]),
        ("--eval-prompt-data reasoning_gym:chain_sum?size=3", ["must be name=source"]),
        ("--eval-prompt-data a=x a=y", ["'a' twice"]),
        ("--keep-checkpoints 2", ["keep_checkpoints = 2", "save_interval"]),
        ("--debug-rollout-only --debug-train-only --load-debug-rollout-data x", ["keep one of them"]),
        ("--debug-train-only", ["load_debug_rollout_data"]),
        ("--load-debug-rollout-data x", ["debug_train_only"]),
        (
            "--debug-train-only --load-debug-rollout-data x --save-debug-rollout-data y",
            ["save_debug_rollout_data = y has nothing to save"],
        ),
        (
            "--debug-train-only --load-debug-rollout-data x --eval-interval 2 --eval-prompt-data a=b",
            ["eval_interval = 2", "debug_train_only"],
        ),
        ("--debug-train-only --load-debug-rollout-data x --num-rollout None --num-epoch 1", ["num_epoch = 1"]),
    ],
)
def test_fault(argv, parts):
    (message,) = faults(*argv.split())
    for part in parts:
        assert part in message


def test_empty_stop_string_is_a_fault():
    (message,) = faults("--rollout-stop", "")
    assert "empty string" in message


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        ("--use-kl-loss", ["kl_loss_coef = 0"]),
        ("--kl-loss-type k2", ["kl_loss_type = k2 does nothing"]),
        ("--ref-load other", ["ref_load = other is not loaded"]),
        ("--advantage-estimator rloo --no-grpo-std-normalization", ["does nothing with rloo"]),
        ("--advantage-estimator cispo --eps-clip-c 3", ["eps_clip_c = 3.0 does nothing with policy loss cispo"]),
        ("--advantage-estimator reinforce_plus_plus --normalize-advantages", ["whitens its advantages already"]),
        ("--entropy-coef -0.1", ["entropy_coef = -0.1"]),
        ("--no-use-dynamic-batch-size --micro-batch-size 4 --max-tokens-per-gpu 99", ["max_tokens_per_gpu = 99"]),
        ("--max-tokens-per-gpu 100", ["rollout_max_response_len = 256", "max_tokens_per_gpu = 100"]),
        ("--min-lr 1e-7", ["min_lr = 1e-07 does nothing"]),
        ("--lr-warmup-steps 4", ["lr_warmup_steps = 4", "4 optimizer steps"]),
        ("--system-prompt hi", ["apply_chat_template"]),
        ("--rollout-top-p 0.9", ["rollout_top_p = 0.9", "train/rollout_logprob_abs_diff"]),
        ("--rollout-top-k 5", ["rollout_top_k = 5"]),
        ("--rollout-min-p 0.1", ["rollout_min_p = 0.1"]),
        ("--rollout-stop \\n", ["backslash"]),
        ("--max-concurrent-prompts 17", ["max_concurrent_prompts = 17 does nothing", "16 prompts"]),
        ("--eval-prompt-data a=x", ["`treadle eval` only"]),
        (
            "--eval-prompt-data a=x --eval-interval 2 --n-samples-per-eval-prompt 4",
            ["evaluation set a", "4 samples", "same"],
        ),
        ("--eval-prompt-data a=x --eval-interval 2 --eval-top-k 4", ["evaluation set a", "greedy"]),
        ("--eval-prompt-data a=x --eval-interval 5", ["eval_interval = 5 is longer than the run"]),
        ("--save-interval 5", ["save_interval = 5 is longer than the run"]),
        ("--start-rollout-id 2 --load x", ["start_rollout_id = 2 does nothing"]),
        ("--env-max-turns 3", ["env_max_turns = 3 does nothing without custom_env_path", "set custom_env_path"]),
        (
            "--eval-top-k 3 --eval-temperature 1",
            ["eval_temperature, eval_top_k do nothing without eval_prompt_data", "eval_top_k = 3"],
        ),
        ("--debug-rollout-only --save x", ["nothing with debug_rollout_only"]),
        ("--debug-rollout-only --rollout-temperature 0", ["8 samples", "same"]),
    ],
)
def test_warning(argv, parts):
    (message,) = findings(*argv.split())
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    "argv",
    [
        "--n-samples-per-prompt 1 --advantage-estimator reinforce_plus_plus",
        "--kl-coef 0.1 --advantage-estimator reinforce_plus_plus_baseline --ref-load other",
        "--gamma 0.9 --advantage-estimator reinforce_plus_plus",
        "--use-kl-loss --kl-loss-coef 0.1 --kl-loss-type k3+",
        "--eps-clip-high 0.28 --eps-clip-c 3",
        "--custom-rm-path mine.py:score --rm-weights 1 0.5",
        "--rm-type regex my_package:score --rm-regex ^a --rm-weights 1 1",
        "--rm-type reasoning_gym --label-key None",
        "--save x --keep-checkpoints 1",
        "--lr-decay-style cosine --min-lr 1e-7 --lr-decay-steps 3 --lr-warmup-steps 2",
        "--eval-prompt-data a=x b.c-d=y?z=1 --eval-interval 2",
        "--debug-rollout-only --rollout-temperature 0 --n-samples-per-prompt 1",
        "--debug-rollout-only --kl-coef 0.1 --global-batch-size 100",
        "--debug-train-only --load-debug-rollout-data x --prompt-data --rm-type --rollout-temperature 0",
        "--no-use-dynamic-batch-size --micro-batch-size 4",
        "--debug-train-only --load-debug-rollout-data x --num-rollout None",
    ],
)
def test_sound_combination(argv):
    assert findings(*argv.split()) == []


def test_overrides_belong_to_a_set():
    base = load_config(None, [*SOUND, "--eval-prompt-data", "sums=x", "--eval-interval", "2"])

    def with_override(name: str, **values) -> Config:
        changed = base.model_dump()
        changed["eval"]["eval_overrides"] = {name: values}
        return Config.model_validate(changed)

    assert check_config(with_override("sums", eval_temperature=1, n_samples_per_eval_prompt=4)) == []
    with pytest.raises(ConfigError, match=r"eval_overrides.sum is for no set .* did you mean 'sums'"):
        check_config(with_override("sum", eval_temperature=1))
    with pytest.raises(ConfigError, match="rm_type of sums 'maths' is unknown"):
        check_config(with_override("sums", rm_type=("maths",)))
    (warning,) = check_config(with_override("sums", n_samples_per_eval_prompt=4))
    assert "4 samples" in warning


def test_evaluation_needs_sets_and_a_reward_but_no_training():
    argv = ["--hf-checkpoint", "m", "--eval-prompt-data", "a=x", "--rm-type", "math", "--kl-coef", "1"]
    assert check_config(load_config(None, argv), evaluation_only=True) == []
    with pytest.raises(ConfigError) as caught:
        check_config(Config(), evaluation_only=True)
    for part in ("3 faults", "hf_checkpoint", "eval_prompt_data", "no reward"):
        assert part in str(caught.value)


def test_parse_eval_sets_keeps_order_and_later_equals_signs():
    assert parse_eval_sets(["b=x?k=v", "a=y"]) == {"b": "x?k=v", "a": "y"}
    assert list(parse_eval_sets(["b=x", "a=y"])) == ["b", "a"]
    with pytest.raises(ConfigError, match="name=source"):
        parse_eval_sets(["=x"])


@pytest.mark.parametrize("pattern", ["(" * 5000 + ")" * 5000, "a{99999999999999999999}"])
def test_a_pattern_that_python_cannot_compile_is_a_fault(pattern, make_config):
    config = make_config(rm_type=("regex",), rm_regex=pattern)
    with pytest.raises(ConfigError, match="no valid pattern"):
        check_config(config)


def test_what_only_a_template_uses_is_noted_without_one():
    given = ["--tools-key", "t", "--continue-final-message", "--chat-template-kwargs", "x=1", "--system-prompt", "s"]
    (text,) = findings(*given)
    names = "system_prompt, tools_key, chat_template_kwargs, continue_final_message"
    assert text.startswith(f"{names} without apply_chat_template reaches only prompts that are lists")
    assert findings(*given, "--apply-chat-template") == []


def test_every_condition_has_its_message():
    """Values of fields stand in it in braces; a name that is no field would be an error in front of the user."""
    for field in config_fields().values():
        for condition in field.declared.only_with:
            assert filled(condition.otherwise, Config()).strip()
