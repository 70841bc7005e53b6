"""Rules about data, sampling, rewards and evaluation."""

from __future__ import annotations

import re
from collections.abc import Iterator

from treadle.catalog import REWARDS
from treadle.config.conditions import Finding, fault, refuse, rule, warn_of, warning
from treadle.config.data_section import EvalOverride, parse_eval_sets
from treadle.config.sections import Config
from treadle.config.values import written
from treadle.errors import ConfigError
from treadle.registry import suggestion

_ESCAPE = re.compile(r"\\[nt]")


def _is_greedy(config: Config) -> bool:
    return config.rollout.rollout_temperature == 0


def _lacks_reward(config: Config) -> bool:
    """True if samples need a reward and have none; a teacher or an environment is signal enough to train on."""
    if config.reward.targets:
        return False
    if config.algorithm.opd_kl_coef == 0 and config.rollout.custom_env_path is None:
        return True
    return config.eval.eval_interval is not None and _evaluation_lacks_reward(config)


def _evaluation_lacks_reward(config: Config) -> bool:
    overrides, sets = config.eval.eval_overrides, _known_sets(config)
    own = bool(sets) and all(name in overrides and overrides[name].rm_type for name in sets)
    return not config.reward.targets and not own


def _known_sets(config: Config) -> list[str]:
    try:
        return list(parse_eval_sets(config.eval.eval_prompt_data))
    except ConfigError:
        return []


# fmt: off
_NO_REWARD = f"no reward is given: set rm_type ({', '.join(REWARDS)}) or custom_rm_path (my_reward.py:score)"
refuse("all", lambda c: not c.model.hf_checkpoint,
       "hf_checkpoint is not given: name a model folder, a hub id, or the bundled smollm2-135m-instruct")
refuse("generate", lambda c: not c.data.prompt_data,
       "prompt_data is not given: name a .jsonl or .parquet file, a data set, or reasoning_gym:chain_sum")
refuse("generate", lambda c: _is_greedy(c) and not c.debug.debug_rollout_only,
       "rollout_temperature = 0 is greedy: the samples of a group would all be the same, and the logprobs are not "
       "those of a policy; training needs more than 0 (debug_rollout_only may use it)")
warn_of("generate", lambda c: _is_greedy(c) and c.debug.debug_rollout_only and c.rollout.n_samples_per_prompt > 1,
        "rollout_temperature = 0 is greedy: the {n_samples_per_prompt} samples of a prompt are all the same; set "
        "n_samples_per_prompt = 1, or a higher temperature")
refuse("generate", _lacks_reward, _NO_REWARD)
refuse("eval", _evaluation_lacks_reward, _NO_REWARD)
refuse("eval", lambda c: not c.eval.eval_prompt_data,
       "eval_prompt_data is not given: name at least one evaluation set as name=source")
refuse("score", lambda c: c.reward.rm_regex is None and c.uses_reward("regex"),
       "the regex reward needs a pattern; set rm_regex")
# fmt: on


@rule("generate")
def data_weights_fit(config: Config) -> Iterator[Finding]:
    weights, sources = config.data.prompt_data_weights, config.data.prompt_data
    if weights and len(weights) != len(sources):
        yield fault(
            f"prompt_data_weights has {len(weights)} numbers for {len(sources)} sources in prompt_data; give one each"
        )
    if any(weight <= 0 for weight in weights):
        yield fault(f"prompt_data_weights = {list(weights)} must all be above 0; leave a source out instead")


@rule("generate")
def training_sees_the_whole_distribution(config: Config) -> Iterator[Finding]:
    uncut = {"rollout_top_p": 1, "rollout_top_k": 0, "rollout_min_p": 0}
    cuts = [f"{name} = {config.value(name)}" for name, value in uncut.items() if config.value(name) != value]
    if cuts:
        yield warning(
            f"{', '.join(cuts)}: the engine's logprobs are of the cut distribution, the trainer's of the full softmax, "
            "so train/rollout_logprob_abs_diff includes the mass that was cut"
        )


@rule("score")
def stop_strings_mean_what_they_say(config: Config) -> Iterator[Finding]:
    for text in config.rollout.rollout_stop:
        if text == "":
            yield fault("rollout_stop holds an empty string, which would end every sample at once; drop it")
        elif _ESCAPE.search(text):
            yield warning(
                f"rollout_stop {text} holds a backslash and a letter, no line break or tab; in a shell write $'\\n', "
                'in a recipe "\\n"'
            )


@rule("score")
def rewards_are_known(config: Config) -> Iterator[Finding]:
    used = {("rm_type", name) for name in config.reward.rm_type}
    used |= {(f"rm_type of {key}", name) for key, o in config.eval.eval_overrides.items() for name in o.rm_type or ()}
    for where, name in sorted(used):
        if ":" not in name and name not in REWARDS:
            hint = suggestion(name, REWARDS, most_listed=12)
            yield fault(f"{where} {name!r} is unknown{hint} (your own is package.module:function)")
    path = config.reward.custom_rm_path
    if path is not None and not all(path.rpartition(":")[::2]):
        yield fault(f"custom_rm_path {path!r} must be file.py:function or package.module:function")


@rule("score")
def rewards_are_weighted_and_named_once(config: Config) -> Iterator[Finding]:
    weights, names, count = config.reward.rm_weights, config.reward.rm_type, len(config.reward.targets)
    if weights and len(weights) != count:
        yield fault(
            f"rm_weights has {len(weights)} numbers for {count} rewards; give one for each of rm_type, "
            "then one for custom_rm_path"
        )
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield fault(f"rm_type names {name} twice; give it once, with a larger weight in rm_weights")


@rule("score")
def patterns_compile(config: Config) -> Iterator[Finding]:
    try:
        re.compile(config.reward.rm_regex or "")
    except (re.error, RecursionError, OverflowError) as error:
        yield fault(f"rm_regex {written(repr(config.reward.rm_regex))} is no valid pattern: {error}")


@rule("generate")
def labels_are_there(config: Config) -> Iterator[Finding]:
    compared = sorted({name for name in config.reward.rm_type if name in REWARDS and REWARDS[name].compares_label})
    if compared and config.data.label_key is None:
        gym = any(source.startswith("reasoning_gym:") for source in config.data.prompt_data)
        yield fault(
            f"the {', '.join(compared)} reward compares with a label: name its column with label_key"
            + (" (reasoning_gym has it in answer)" if gym else "")
        )


@rule("score")
def eval_sets_are_named(config: Config) -> Iterator[Finding]:
    try:
        names = list(parse_eval_sets(config.eval.eval_prompt_data))
    except ConfigError as error:
        yield fault(str(error))
        return
    for name in (name for name in config.eval.eval_overrides if name not in names):
        yield fault(f"eval_overrides.{name} is for no set in eval_prompt_data{suggestion(name, names, most_listed=12)}")


@rule("score")
def greedy_evaluation_takes_one_sample(config: Config) -> Iterator[Finding]:
    for name in _known_sets(config):
        override = config.eval.eval_overrides.get(name, EvalOverride())
        settings = config.eval.model_dump() | override.model_dump(exclude_none=True)
        if settings["eval_temperature"] > 0:
            continue
        if (n := settings["n_samples_per_eval_prompt"]) > 1:
            yield warning(
                f"evaluation set {name}: eval_temperature = 0 is greedy, so its {n} samples of a prompt are all the "
                "same; set n_samples_per_eval_prompt = 1, or a higher temperature"
            )
        if settings["eval_top_p"] < 1 or settings["eval_top_k"] > 0:
            yield warning(
                f"evaluation set {name}: eval_top_p and eval_top_k do nothing with eval_temperature = 0, which is "
                "greedy; drop them, or set a higher temperature"
            )
