"""One record for each named algorithm and reward: what it reads, its own parameters, and the path of its function.

The configuration, the tables in `treadle.algorithms`, the built-in rewards and a docs page are made from these records.
To add an algorithm, write its function and add one record; its parameters become fields of `[algorithm]`, and so flags.
Nothing here imports torch.
"""

from __future__ import annotations

import functools
import math
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, TypeVar

from treadle.errors import ConfigError


@dataclass(frozen=True)
class Parameter:
    """A number that one algorithm reads: a field of `[algorithm]` and a keyword argument of its function."""

    name: str
    default: float
    help: str
    bounds: Mapping[str, float] = field(default_factory=dict)  # `gt`, `ge`, `lt`, `le`, as in pydantic


@dataclass(frozen=True)
class Record:
    """Describes a registered name without importing its function.

    `function` is the path of the function inside `MODULE`. If it is empty, it is the record's name.
    """

    MODULE: ClassVar[str]

    name: str
    help: str
    source: str = ""
    function: str = ""
    parameters: tuple[Parameter, ...] = ()
    reads: tuple[str, ...] = ()  # fields of `[algorithm]` beside its own parameters

    @property
    def all_read(self) -> tuple[str, ...]:
        """The fields of `[algorithm]` that have an effect with this record."""
        return self.reads + tuple(parameter.name for parameter in self.parameters)

    def load(self, settings: Mapping[str, Any] | None = None) -> Any:
        """Import the function and return it with its parameters bound to `settings`, or else to their defaults."""
        found = pkgutil.resolve_name(f"{self.MODULE}:{self.function or self.name}")
        values = {p.name: (settings or {}).get(p.name, p.default) for p in self.parameters}
        return functools.partial(found, **values) if values else found


R = TypeVar("R", bound=Record)


def _table(*records: R) -> Mapping[str, R]:
    return {record.name: record for record in records}


def find(field_name: str, name: str, table: Mapping[str, R]) -> R:
    """Return the record of a name, which is the value of `field_name`. Raises `ConfigError` if there is none."""
    if name not in table:
        raise ConfigError(f"{field_name} {name!r} is unknown; choose one of {', '.join(table)}")
    return table[name]


# Advantage estimators


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What an advantage estimator reads and how it treats rewards."""

    needs_group: bool = False  # compares the samples of a group, so a group has more than one
    divides_by_std: bool = False  # reads grpo_std_normalization
    divides_by_mean: bool = False  # divides by the group's mean reward, so rewards must not be negative
    per_token_reward: bool = False  # reads the KL of each token and kl_coef
    uses_gamma: bool = False
    needs_values: bool = False  # has a critic and reads lambd
    needs_parts: bool = False  # reads the rewards one by one, never their sum
    whitens: bool = False  # normalises its advantages over the whole rollout
    policy_loss: str = "ppo"  # the loss it is used with unless another is set


@dataclass(frozen=True)
class EstimatorRecord(Record, Traits):
    """An advantage estimator: `function` shapes the rewards of whole groups, `spread` lays them over the tokens.

    The parameters of `function` name what it reads: fields of `AdvantageInputs` and `AdvantageSettings`, and `lengths`,
    the number of trained tokens of each sample.
    """

    MODULE = "treadle.algorithms.shaping"

    spread: str = "broadcast"

    def load_spread(self) -> Any:
        """Import and return the function that lays shaped rewards over the tokens."""
        return pkgutil.resolve_name(f"treadle.algorithms.advantages:{self.spread}")


# fmt: off
ESTIMATORS = _table(
    EstimatorRecord("grpo", "(r − mean) / std of the group", "DeepSeekMath 2024, section 4.1.2, arXiv 2402.03300",
                    "grpo_rewards", needs_group=True, divides_by_std=True),
    EstimatorRecord("gspo", "as grpo", "Zheng et al. 2025, arXiv 2507.18071",
                    "grpo_rewards", needs_group=True, divides_by_std=True, policy_loss="gspo"),
    EstimatorRecord("cispo", "as grpo", "MiniMax-M1 2025, arXiv 2506.13585",
                    "grpo_rewards", needs_group=True, divides_by_std=True, policy_loss="cispo"),
    EstimatorRecord("rloo", "r − mean of the others in the group", "Ahmadian et al. 2024, arXiv 2402.14740",
                    "rloo_rewards", needs_group=True),
    EstimatorRecord("reinforce_plus_plus", "reward to go, whitened", "Hu 2025, REINFORCE++, arXiv 2501.03262",
                    "unshaped_rewards", spread="returns_to_go", per_token_reward=True, uses_gamma=True, whitens=True),
    EstimatorRecord("reinforce_plus_plus_baseline", "r − mean of the group, whitened", "Hu 2025, REINFORCE++, arXiv 2501.03262",
                    "centred_rewards", spread="broadcast_minus_kl", needs_group=True, per_token_reward=True, whitens=True),
    EstimatorRecord("maxrl", "(r − mean) / mean of the group", "Tajwar et al. 2026, arXiv 2602.02710",
                    "maxrl_rewards", needs_group=True, divides_by_mean=True),
    EstimatorRecord("opo", "r − mean of the group, weighted by length", "Hao et al. 2025, arXiv 2505.23585",
                    "opo_rewards", needs_group=True),
    EstimatorRecord("gdpo", "each reward as in grpo, added, whitened", "GDPO 2026, arXiv 2601.05242",
                    "gdpo_rewards", needs_group=True, divides_by_std=True, needs_parts=True, whitens=True),
    EstimatorRecord("passk", "best − second best of the group, for the best sample", "Tang et al. 2025, arXiv 2503.19595",
                    "passk_rewards", needs_group=True, divides_by_std=True),
    EstimatorRecord("ppo", "generalised advantages (GAE) from a critic", "Schulman et al. 2015, arXiv 1506.02438",
                    "unshaped_rewards", spread="critic_advantages", per_token_reward=True, uses_gamma=True, needs_values=True),
)
"""Values of `advantage_estimator`."""
# fmt: on


# Policy losses


@dataclass(frozen=True)
class PolicyLossRecord(Record):
    """A policy loss; `reads` are the clip settings that have an effect with it."""

    MODULE = "treadle.algorithms.losses"

    reads: tuple[str, ...] = ("eps_clip", "eps_clip_high")


_DUAL_CLIP = ("eps_clip", "eps_clip_high", "eps_clip_c")
_SAPO = (
    Parameter("sapo_tau_positive", 1.0, "sapo: steepness of its gate if the advantage is positive.", {"gt": 0}),
    Parameter("sapo_tau_negative", 1.05, "sapo: steepness of its gate if the advantage is not positive.", {"gt": 0}),
)

# fmt: off
POLICY_LOSSES = _table(
    PolicyLossRecord("ppo", "clip of each token's ratio", "Schulman et al. 2017, arXiv 1707.06347", reads=_DUAL_CLIP),
    PolicyLossRecord("gspo", "clip of one ratio for the sequence", "Zheng et al. 2025, arXiv 2507.18071", reads=_DUAL_CLIP),
    PolicyLossRecord("gmpo", "geometric mean of clipped ratios", "Zhao et al. 2025, arXiv 2507.20673"),
    PolicyLossRecord("cispo", "−sg(clip(ρ))·A·lp", "MiniMax-M1 2025, arXiv 2506.13585"),
    PolicyLossRecord("sapo", "a soft gate of the ratio", "Gao et al. 2025, arXiv 2511.20347", reads=(), parameters=_SAPO),
    PolicyLossRecord("dppo_tv", "clip of the change in probability", "DPPO 2026, arXiv 2602.04879", reads=_DUAL_CLIP),
)
"""Values of `policy_loss`."""
# fmt: on


PARAMETERS = {
    p.name: p for table in (ESTIMATORS, POLICY_LOSSES) for record in table.values() for p in record.parameters
}
"""The parameters of all algorithms by name."""

# KL to a reference


@dataclass(frozen=True)
class KLRecord(Record):
    """A KL estimator; `unbiased_by_ratio` if its gradient times the probability ratio is that of KL(policy ‖ reference)."""

    MODULE = "treadle.algorithms.kl"

    source: str = "Schulman 2020, Approximating KL Divergence"
    unbiased_by_ratio: bool = False


KL_ESTIMATORS = _table(
    KLRecord("k1", "d = lp − lp_ref", unbiased_by_ratio=True),
    KLRecord("k2", "d² / 2"),
    KLRecord("k3", "exp(−d) − 1 + d", unbiased_by_ratio=True),
    KLRecord("low_var_kl", "k3, clamped to ±10", unbiased_by_ratio=True),  # inside the clamp
    KLRecord("abs", "|d|", function="absolute"),
    KLRecord("k3+", "the value of k3 with the gradient of k2", function="k3_plus"),
)
"""Values of `kl_loss_type`."""


# Corrections of the gap between engine and trainer


class Level(StrEnum):
    """The unit to which one correction weight applies."""

    TOKEN = "token"  # w of the token
    SEQUENCE = "sequence"  # exp Σ log w over the sample's trained tokens
    GEOMETRIC = "geometric"  # exp mean log w over them


class Bound(StrEnum):
    """What happens to a weight outside its bounds."""

    TRUNCATE = "truncate"  # min(w, high)
    CLIP = "clip"  # clip(w, low, high)
    MASK = "mask"  # 0 outside [low, high]


@dataclass(frozen=True, slots=True)
class CorrectionSettings:
    """How tokens are weighted, and which are dropped.

    `reject_level` drops what lies outside [reject_low, reject_high] at that level; `veto_below` drops a whole sample if
    any of its trained tokens has w below it. `batch_mean_one` divides the weights by their mean over the given trained
    tokens before anything is rejected.
    """

    level: Level = Level.TOKEN
    bound: Bound = Bound.CLIP
    low: float = 0.0
    high: float = 2.0
    reject_level: Level | None = None
    reject_low: float = 0.0
    reject_high: float = math.inf
    veto_below: float | None = None
    batch_mean_one: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.high or not 0 <= self.reject_low <= self.reject_high:
            raise ConfigError(
                f"correction bounds must be 0 <= low <= high, got [{self.low}, {self.high}] "
                f"and rejection [{self.reject_low}, {self.reject_high}]; correct the bound that is out of order"
            )


@dataclass(frozen=True)
class CorrectionRecord(Record):
    """A correction: `correct` with these settings, unless the configuration gives others."""

    MODULE = "treadle.algorithms.corrections"

    function: str = "correct"
    settings: CorrectionSettings = CorrectionSettings()


# fmt: off
CORRECTIONS = _table(
    CorrectionRecord("tis", "w of each token",
                     "Yao et al. 2025, Your Efficient RL Framework Secretly Brings You Off-Policy RL Training",
                     settings=CorrectionSettings(Level.TOKEN, Bound.CLIP, 0.0, 2.0)),
    CorrectionRecord("icepop", "w of each token", "Ling team 2025, Every Step Evolves, arXiv 2510.18855",
                     settings=CorrectionSettings(Level.TOKEN, Bound.MASK, 0.5, 5.0)),
    CorrectionRecord("sequence", "exp Σ log w over a sample", "Liu et al. 2025, When Speed Kills Stability",
                     settings=CorrectionSettings(Level.SEQUENCE, Bound.TRUNCATE, 0.0, 2.0)),
    CorrectionRecord("geometric", "exp mean log w over a sample", "Liu et al. 2025, When Speed Kills Stability",
                     settings=CorrectionSettings(Level.GEOMETRIC, Bound.TRUNCATE, 0.0, 2.0)),
    CorrectionRecord("decoupled", "w of each token",
                     "Hilton et al. 2021, eq. 3, arXiv 2110.00641, as in AReaL 2025, eq. 5, arXiv 2505.24298",
                     settings=CorrectionSettings(Level.TOKEN, Bound.TRUNCATE, 0.0, math.inf)),
)
"""Values of `rollout_correction` with the default settings of each; w = exp(lp_old − lp_roll)."""
# fmt: on


# Rewards


@dataclass(frozen=True)
class RewardRecord(Record):
    """A built-in reward: `function` makes it from the settings of `[reward]`, once in each process that runs it."""

    MODULE = "treadle.rollout.rewards.builtin"

    compares_label: bool = False
    inline: bool = False  # so quick and safe that it needs no worker process


# fmt: off
REWARDS = _table(
    RewardRecord("math", "1 if the answer equals the label as mathematics", function="make_math", compares_label=True),
    RewardRecord("last_number", "1 if the last number of the response equals the label's", function="make_last_number",
                 compares_label=True, inline=True),
    RewardRecord("exact", "1 if the response is the label", function="make_exact", compares_label=True, inline=True),
    RewardRecord("regex", "1 if rm_regex matches somewhere in the response", function="make_regex"),
    RewardRecord("reasoning_gym", "the score of the task's own verifier, 0 to 1", function="make_reasoning_gym"),
)
"""Names for `rm_type`."""
# fmt: on


# Engines


@dataclass(frozen=True)
class EngineRecord(Record):
    """An engine; for a server, `function` is the path of its `ServerKind` inside `treadle.rollout.engines`.

    `title` is the name of the server, `owned` are the server's arguments that Treadle sets itself.
    """

    MODULE = "treadle.rollout.engines"

    title: str = ""
    owned: frozenset[str] = frozenset()

    def load(self, settings: Mapping[str, Any] | None = None) -> Any:
        """Import and return the `treadle.rollout.engines.server_kind.ServerKind`."""
        return pkgutil.resolve_name(f"{self.MODULE}.{self.function}")


ENGINES = _table(
    EngineRecord("torch", "Treadle's own engine, on the trainer's weights"),
    EngineRecord(
        "vllm",
        "a vLLM server",
        function="vllm_engine.launch:VLLM",
        title="vLLM",
        owned=frozenset(
            """model host port dtype seed max_num_seqs logprobs_mode weight_transfer_config enable_scale_out
            served_model_name api_key root_path""".split()
        ),
    ),
    EngineRecord(
        "sglang",
        "an SGLang server",
        function="sglang_engine.launch:SGLANG",
        title="SGLang",
        owned=frozenset(
            """model_path model host port dtype random_seed max_running_requests device skip_tokenizer_init
            served_model_name api_key admin_api_key weight_version is_embedding""".split()
        ),
    ),
)
"""Names for `rollout_engine`."""
SERVERS = {name: record for name, record in ENGINES.items() if record.title}
"""Engines that are servers; each has a table of arguments, `[engine.NAME]`."""


# Weight transports


@dataclass(frozen=True)
class TransportRecord(Record):
    """A weight transport; `function` is its module in `treadle.weights`, whose `TRANSPORT` declares its properties."""

    def load(self, settings: Mapping[str, Any] | None = None) -> Any:
        """Import the module and return its `treadle.weights.Transport`."""
        return pkgutil.resolve_name(f"treadle.weights.{self.function or self.name}:TRANSPORT")


TRANSPORTS = _table(
    TransportRecord("auto", "shm on one node, broadcast between nodes"),
    TransportRecord("shm", "a mapped file in shared memory, for processes of one node"),
    TransportRecord("disk", "safetensors files in a folder that all nodes can read"),
    TransportRecord("disk-delta", "the changes since the last version, in a shared folder", function="disk_delta"),
    TransportRecord("broadcast", "a process group of trainer and engines: gloo on CPUs, NCCL on GPUs"),
    TransportRecord("cuda_ipc", "handles of GPU memory, for an engine on the trainer's own GPU"),
)
"""Names for `weight_transport`."""


def reward_names(targets: tuple[str, ...]) -> tuple[str, ...]:
    """Return the name of each reward's part: the built-in's or the function's, with a number if two are equal.

    >>> reward_names(("math", "one.py:score", "package.other:score"))
    ('math', 'score', 'score_2')
    """
    names: list[str] = []
    for target in targets:
        base = target if target in REWARDS else target.rpartition(":")[2].replace("/", ".")
        name, number = base, 2
        while name in names:
            name, number = f"{base}_{number}", number + 1
        names.append(name)
    return tuple(names)
