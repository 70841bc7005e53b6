"""Rules about data, sampling, rewards and evaluation; each is one function and says one thing."""

from __future__ import annotations

import re
from collections.abc import Iterator

from treadle.catalog import REWARDS
from treadle.config.eval_sets import eval_set_faults, parse_eval_sets
from treadle.config.fields import did_you_mean
from treadle.config.findings import Finding, Rule, fault, warning
from treadle.config.sections import Config
from treadle.config.values import written

_ESCAPE = re.compile(r"\\[nt]")


def model_is_given(config: Config) -> Iterator[Finding]:
    if not config.model.hf_checkpoint:
        yield fault("hf_checkpoint is not given: name a model folder, a hub id, or the bundled smollm2-135m-instruct")


def prompts_are_given(config: Config) -> Iterator[Finding]:
    if not config.data.prompt_data:
        yield fault("prompt_data is not given: name a .jsonl or .parquet file, a data set, or reasoning_gym:chain_sum")


def data_weights_fit(config: Config) -> Iterator[Finding]:
    weights, sources = config.data.prompt_data_weights, config.data.prompt_data
    if weights and len(weights) != len(sources):
        yield fault(
            f"prompt_data_weights has {len(weights)} numbers for {len(sources)} sources in prompt_data; give one each"
        )
    if any(weight <= 0 for weight in weights):
        yield fault(f"prompt_data_weights = {list(weights)} must all be above 0; leave a source out instead")


def template_settings_are_rendered(config: Config) -> Iterator[Finding]:
    data = config.data
    given = [
        name
        for name, value in (
            ("system_prompt", data.system_prompt is not None),
            ("tools_key", data.tools_key is not None),
            ("chat_template_kwargs", data.chat_template_kwargs),
            ("continue_final_message", data.continue_final_message),
        )
        if value
    ]
    if given and not data.apply_chat_template:
        yield warning(
            f"{', '.join(given)} without apply_chat_template reaches only prompts that are lists of messages; "
            "plain text prompts go without it"
        )


def training_samples_vary(config: Config) -> Iterator[Finding]:
    if config.rollout.rollout_temperature == 0:
        yield fault(
            "rollout_temperature = 0 is greedy: the samples of a group would all be the same, and the logprobs are not "
            "those of a policy; training needs more than 0 (debug_rollout_only may use it)"
        )


def greedy_samples_repeat(config: Config) -> Iterator[Finding]:
    n = config.rollout.n_samples_per_prompt
    if config.debug.debug_rollout_only and config.rollout.rollout_temperature == 0 and n > 1:
        yield warning(
            f"rollout_temperature = 0 is greedy: the n_samples_per_prompt = {n} samples of a prompt are all the same"
        )


def training_sees_the_whole_distribution(config: Config) -> Iterator[Finding]:
    rollout = config.rollout
    cuts = [
        text
        for text, on in (
            (f"rollout_top_p = {rollout.rollout_top_p}", rollout.rollout_top_p < 1),
            (f"rollout_top_k = {rollout.rollout_top_k}", rollout.rollout_top_k > 0),
            (f"rollout_min_p = {rollout.rollout_min_p}", rollout.rollout_min_p > 0),
        )
        if on
    ]
    if cuts:
        yield warning(
            f"{', '.join(cuts)}: the engine's logprobs are of the cut distribution, the trainer's of the full softmax, "
            "so train/rollout_logprob_abs_diff includes the mass that was cut"
        )


def stop_strings_mean_what_they_say(config: Config) -> Iterator[Finding]:
    for text in config.rollout.rollout_stop:
        if text == "":
            yield fault("rollout_stop holds an empty string, which would end every sample at once; drop it")
        elif _ESCAPE.search(text):
            yield warning(
                f"rollout_stop {text} holds a backslash and a letter, no line break or tab; in a shell write $'\\n', "
                'in a recipe "\\n"'
            )


def prompts_in_flight_fit(config: Config) -> Iterator[Finding]:
    most, prompts = config.rollout.max_concurrent_prompts, config.rollout.rollout_batch_size
    if most is not None and most > prompts:
        yield warning(
            f"max_concurrent_prompts = {most} does nothing: a rollout has {prompts} prompts (rollout_batch_size)"
        )


def group_filter_is_used(config: Config) -> Iterator[Finding]:
    rollout = config.rollout
    default = type(rollout).model_fields["max_filter_rounds"].default
    if rollout.group_filter is None:
        if rollout.over_sampling_batch_size is not None:
            yield fault(
                f"over_sampling_batch_size = {rollout.over_sampling_batch_size} does nothing without group_filter"
            )
        if rollout.max_filter_rounds != default:
            yield fault(f"max_filter_rounds = {rollout.max_filter_rounds} does nothing without group_filter")
    elif (rollout.over_sampling_batch_size or rollout.rollout_batch_size) < rollout.rollout_batch_size:
        yield fault(
            f"over_sampling_batch_size = {rollout.over_sampling_batch_size} is less than rollout_batch_size = "
            f"{rollout.rollout_batch_size}; it is how many prompts are drawn at a time to keep that many"
        )


def something_is_rewarded(config: Config) -> Iterator[Finding]:
    if config.algorithm.opd_kl_coef == 0:  # a teacher is signal enough
        yield from _reward_is_given(config)
    elif config.eval.eval_interval is not None:
        yield from evaluation_is_rewarded(config)


def _reward_is_given(config: Config) -> Iterator[Finding]:
    if not config.reward.targets:
        yield fault(f"no reward is given: set rm_type ({', '.join(REWARDS)}) or custom_rm_path (my_reward.py:score)")


def rewards_are_known(config: Config) -> Iterator[Finding]:
    used = {("rm_type", name) for name in config.reward.rm_type}
    used |= {
        (f"rm_type of {key}", name) for key, item in config.eval.eval_overrides.items() for name in item.rm_type or ()
    }
    for where, name in sorted(used):
        if ":" not in name and name not in REWARDS:
            yield fault(
                f"{where} {name!r} is unknown{did_you_mean(name, list(REWARDS))} (your own is package.module:function)"
            )
    path = config.reward.custom_rm_path
    if path is not None and not all(path.rpartition(":")[::2]):
        yield fault(f"custom_rm_path {path!r} must be file.py:function or package.module:function")


def reward_weights_fit(config: Config) -> Iterator[Finding]:
    reward = config.reward
    count = len(reward.targets)
    if reward.rm_weights and len(reward.rm_weights) != count:
        yield fault(
            f"rm_weights has {len(reward.rm_weights)} numbers for {count} rewards; give one for each of rm_type, "
            "then one for custom_rm_path"
        )


def rewards_are_named_once(config: Config) -> Iterator[Finding]:
    names = config.reward.rm_type
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield fault(f"rm_type names {name} twice; give it once, with a larger weight in rm_weights")


def regex_has_its_pattern(config: Config) -> Iterator[Finding]:
    pattern = config.reward.rm_regex
    used = "regex" in config.reward.rm_type or any(
        "regex" in (o.rm_type or ()) for o in config.eval.eval_overrides.values()
    )
    if used and pattern is None:
        yield fault("the regex reward needs a pattern; set rm_regex")
    if pattern is not None and not used:
        yield fault("rm_regex does nothing without the regex reward; add it to rm_type")
    if pattern is not None:
        try:
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            yield fault(f"rm_regex {written(repr(pattern))} is no valid pattern: {error}")


def labels_are_there(config: Config) -> Iterator[Finding]:
    compared = sorted({name for name in config.reward.rm_type if name in REWARDS and REWARDS[name].compares_label})
    if compared and config.data.label_key is None:
        gym = any(source.startswith("reasoning_gym:") for source in config.data.prompt_data)
        yield fault(
            f"the {', '.join(compared)} reward compares with a label: name its column with label_key"
            + (" (reasoning_gym has it in answer)" if gym else "")
        )


def evaluation_has_sets(config: Config) -> Iterator[Finding]:
    if config.eval.eval_interval is not None and not config.eval.eval_prompt_data:
        yield fault(
            f"eval_interval = {config.eval.eval_interval} needs eval_prompt_data: name=source for each evaluation set"
        )


def evaluation_sets_are_used(config: Config) -> Iterator[Finding]:
    if config.eval.eval_prompt_data and config.eval.eval_interval is None:
        yield warning("eval_prompt_data without eval_interval is used by `treadle eval` only, never while training")


def eval_sets_are_given(config: Config) -> Iterator[Finding]:
    if not config.eval.eval_prompt_data:
        yield fault("eval_prompt_data is not given: name at least one evaluation set as name=source")


def evaluation_is_rewarded(config: Config) -> Iterator[Finding]:
    sets = parse_eval_sets(config.eval.eval_prompt_data) if not eval_set_faults(config.eval.eval_prompt_data) else {}
    overrides = config.eval.eval_overrides
    if not sets or not all(name in overrides and overrides[name].rm_type for name in sets):
        yield from _reward_is_given(config)


def eval_sets_are_named(config: Config) -> Iterator[Finding]:
    for text in eval_set_faults(config.eval.eval_prompt_data):
        yield fault(text)


def overrides_have_a_set(config: Config) -> Iterator[Finding]:
    if eval_set_faults(config.eval.eval_prompt_data):
        return
    names = list(parse_eval_sets(config.eval.eval_prompt_data))
    for name in config.eval.eval_overrides:
        if name not in names:
            yield fault(f"eval_overrides.{name} is for no set in eval_prompt_data{did_you_mean(name, names)}")


def greedy_evaluation_takes_one_sample(config: Config) -> Iterator[Finding]:
    if config.eval.eval_prompt_data and not eval_set_faults(config.eval.eval_prompt_data):
        yield from (
            text for name in parse_eval_sets(config.eval.eval_prompt_data) for text in _greedy_set(config, name)
        )


def _greedy_set(config: Config, name: str) -> Iterator[Finding]:
    override = config.eval.eval_overrides.get(name)
    given = {} if override is None else override.model_dump(exclude_none=True)
    settings = config.eval.model_dump(exclude={"eval_overrides"}) | given
    if settings["eval_temperature"] > 0:
        return
    n = settings["n_samples_per_eval_prompt"]
    if n > 1:
        yield warning(
            f"evaluation set {name}: eval_temperature = 0 is greedy, so its {n} samples of a prompt are all the same"
        )
    if settings["eval_top_p"] < 1 or settings["eval_top_k"] > 0:
        yield warning(
            f"evaluation set {name}: eval_top_p and eval_top_k do nothing with eval_temperature = 0, which is greedy"
        )


MODEL_RULES: tuple[Rule, ...] = (model_is_given,)

GENERATION_RULES: tuple[Rule, ...] = (
    prompts_are_given,
    data_weights_fit,
    template_settings_are_rendered,
    training_sees_the_whole_distribution,
    greedy_samples_repeat,
    prompts_in_flight_fit,
    group_filter_is_used,
    something_is_rewarded,
    labels_are_there,
    evaluation_has_sets,
    evaluation_sets_are_used,
)
"""Rules of a run that generates rollouts."""

SCORING_RULES: tuple[Rule, ...] = (
    stop_strings_mean_what_they_say,
    rewards_are_known,
    reward_weights_fit,
    rewards_are_named_once,
    regex_has_its_pattern,
    eval_sets_are_named,
    overrides_have_a_set,
    greedy_evaluation_takes_one_sample,
)
"""Rules of anything that samples and scores, evaluation included."""

SAMPLED_TRAINING_RULES: tuple[Rule, ...] = (training_samples_vary,)
EVALUATION_RULES: tuple[Rule, ...] = (eval_sets_are_given, evaluation_is_rewarded)
"""Rules of `treadle eval`."""
