"""Settings of generation, of engines that are servers, and of rewards."""

from __future__ import annotations

from typing import Any

from treadle.catalog import ENGINES, REWARDS, SERVERS, reward_names
from treadle.config.conditions import absent, choice, compared, given, when
from treadle.config.section import Section, seconds, setting, with_fields

EngineValue = str | bool | int | float | tuple[str, ...]

_FILTER = given("group_filter")
_ENVIRONMENT = given("custom_env_path", warn=True)
_STARTED = absent("rollout_external_engine_addrs", "those servers run already", warn=True, together=True)
_SERVER = choice("rollout_engine", *SERVERS, together=True)
# fmt: off
_ALL_OF_A_BATCH = compared(">=", "rollout_batch_size",
                           "is less than rollout_batch_size = {rollout_batch_size}, the number to keep; raise it")
_WITHIN_A_BATCH = compared("<=", "rollout_batch_size",
                           "does nothing: a rollout has {rollout_batch_size} prompts; drop it", warn=True)
_BELOW_HIGH = compared("<", "reward_clip_high", "must be below reward_clip_high = {reward_clip_high}", part="train")
_HAS_REGEX = when(lambda c: c.uses_reward("regex"),
                  "does nothing without the regex reward; add it to rm_type, or drop it", together=True)
# fmt: on


class RolloutSection(Section):
    """How samples are generated."""

    rollout_batch_size: int = setting(16, ge=1)
    """Prompts in a rollout."""
    n_samples_per_prompt: int = setting(8, ge=1)
    """Samples of each prompt: the size of a group."""
    rollout_temperature: float = setting(1.0, ge=0)
    """Sampling temperature."""
    rollout_top_p: float = setting(1.0, gt=0, le=1)
    """Nucleus sampling: keep the most likely tokens up to this mass."""
    rollout_top_k: int = setting(0, ge=0)
    """Keep the k most likely tokens; 0 keeps all."""
    rollout_min_p: float = setting(0.0, ge=0, lt=1)
    """Keep tokens at least this share as likely as the most likely one."""
    rollout_max_response_len: int = setting(256, ge=1)
    """Maximum number of new tokens in a sample."""
    rollout_stop: tuple[str, ...] = ()
    """Strings that end a sample."""
    rollout_stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a sample, beside the model's own."""
    rollout_seed: int = setting(42, ge=0)
    """Seed of the prompt order and of every sample."""
    rollout_engine: str = setting("torch", names=ENGINES)
    """What generates: `torch` is the embedded engine, on the trainer's own weights; `vllm` and `sglang` are servers."""
    group_filter: str | None = setting(None, path=True)
    """Drop groups and draw others instead: zero_signal (dynamic sampling), any_failed, or the path of your own."""
    over_sampling_batch_size: int | None = setting(None, _FILTER, _ALL_OF_A_BATCH, ge=1)
    """Prompts drawn at a time with a group filter. Default: rollout_batch_size."""
    max_filter_rounds: int = setting(4, _FILTER, ge=1)
    """Rounds of drawing for a rollout with a group filter. After them, dropped groups fill the missing places."""
    max_running_requests: int = setting(256, ge=1)
    """Maximum number of samples that the engine decodes at once."""
    kv_cache_gib: float = setting(2.0, gt=0)
    """Memory for keys and values (GiB); bounds how many samples run at once."""
    max_concurrent_prompts: int | None = setting(None, _WITHIN_A_BATCH, ge=1)
    """Maximum number of prompts in flight. Default: all of a rollout."""
    custom_env_path: str | None = setting(None, path=True)
    """Your own environment, which answers the model between its turns: `file.py:object` or `package.module:object`."""
    env_max_turns: int = setting(8, _ENVIRONMENT, ge=1)
    """Maximum number of the model's turns in a sample with an environment."""
    env_timeout_seconds: float = seconds(60.0, _ENVIRONMENT)
    """A sample whose environment takes longer than this (seconds) is marked failed."""
    max_failed_fraction: float = setting(0.5, ge=0, le=1)
    """End the run if a larger share of a rollout's samples failed; 1 turns this off."""
    rollout_timeout_seconds: float = seconds(3600.0)
    """Deadline of one rollout's generation and scoring (seconds)."""


def _arguments(name: str, title: str) -> Any:
    """Declare the table of arguments for a server, `[engine.NAME]`."""
    text = f"Arguments of {title}'s server by their own names; as flags `--{name}-NAME VALUE`, `--{name}-NAME`."
    return setting(dict, choice("rollout_engine", name, together=True), _STARTED, help=text)


@with_fields({name: (dict[str, EngineValue], _arguments(name, record.title)) for name, record in SERVERS.items()})
class EngineSection(Section):
    """The server that generates, if rollout_engine is not torch."""

    engine_python: str | None = setting(None, _SERVER, _STARTED, path=True)
    """Python interpreter that has the engine, for example `venv/bin/python`. Default: Treadle's own."""
    rollout_external_engine_addrs: tuple[str, ...] = setting((), _SERVER)
    """Addresses of running servers, `host:port` each, to use instead of starting any."""
    engine_start_timeout_seconds: float = seconds(600.0)
    """Deadline of starting an engine's server, or of reaching a running one (seconds)."""
    max_logprob_diff: float = setting(0.1, gt=0)
    """Warn if the mean gap between the trainer's and the engine's logprobs is above this (nats). bfloat16 alone makes up
    to 0.05."""

    def arguments(self, kind: str) -> dict[str, EngineValue]:
        """Return the arguments for a server of this kind; none for the torch engine."""
        return dict(self).get(kind, {})


class RewardSection(Section):
    """How samples are scored."""

    rm_type: tuple[str, ...] = setting((), names=REWARDS, path=True)
    """Rewards by name or as `package.module:function`; several are added with their rm_weights."""
    rm_weights: tuple[float, ...] = ()
    """Weight of each reward. Default: all 1."""
    custom_rm_path: str | None = setting(None, path=True)
    """Your own reward: `file.py:function` or `package.module:function`."""
    rm_regex: str | None = setting(None, _HAS_REGEX)
    """Pattern of the `regex` reward: 1 if it matches somewhere in the response."""
    rm_timeout_seconds: float = seconds(30.0)
    """A sample whose reward takes longer than this (seconds) is marked failed."""
    rm_num_workers: int = setting(1, ge=1)
    """Processes that run rewards."""
    reward_scale: float = setting(1.0, gt=0)
    """Factor on the reward that is trained on; logs keep the raw one."""
    reward_bias: float = 0.0
    """Added to the scaled reward."""
    reward_clip_low: float | None = setting(None, _BELOW_HIGH)
    """Lower bound of the scaled reward."""
    reward_clip_high: float | None = None
    """Upper bound of the scaled reward."""
    normalize_rewards_running: bool = False
    """After scale, bias and clip, subtract the mean of the run's rewards so far and divide by their standard
    deviation."""

    @property
    def targets(self) -> tuple[str, ...]:
        """Every reward given: rm_type, then custom_rm_path."""
        return self.rm_type + ((self.custom_rm_path,) if self.custom_rm_path else ())

    @property
    def num_targets(self) -> int:
        return len(self.targets)

    @property
    def part_weights(self) -> dict[str, float]:
        """Weight of each reward by the name of its part; all weigh 1 unless there is a weight for each."""
        names = reward_names(self.targets)
        weights = self.rm_weights if len(self.rm_weights) == len(names) else (1.0,) * len(names)
        return dict(zip(names, weights, strict=True))
