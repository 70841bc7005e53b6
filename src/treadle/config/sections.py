"""The settings of a run: one frozen section per owner, joined in `Config`.

A field name is unique across sections, so it is also the flag (`rollout_batch_size` is `--rollout-batch-size`). A
recipe groups the same names under `[section]`. The text below a field is its help. Conditions on a field say when it
has an effect; rules between fields of several sections are in `rules_*.py`.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from treadle.config.algorithm_section import AlgorithmSection, CriticSection
from treadle.config.cluster_section import ClusterSection
from treadle.config.conditions import IN_THE_RUN, absent, choice, compared, given, needs, when
from treadle.config.data_section import DataSection, EvalSection
from treadle.config.rollout_section import EngineSection, RewardSection, RolloutSection
from treadle.config.section import Section, seconds, setting

_TRAINING = absent("debug_rollout_only", "the weights never change", warn=True)
_DECAYS = choice("lr_decay_style", "linear", "cosine")
# fmt: off
_HAS_REFERENCE = when(lambda c: c.algorithm.uses_reference,
                      "is not loaded: neither use_kl_loss nor kl_coef is on; set one of them, or drop it", warn=True)
_BELOW_PEAK = compared("<=", "lr", "is above lr = {lr}; it is where the decay ends")
_AFTER_WARMUP = compared(">", "lr_warmup_steps",
                         "must be more than lr_warmup_steps = {lr_warmup_steps}: the decay starts after the warm-up")
_IN_RANGE = compared("<", "num_rollout",
                     "leaves nothing to do: the run ends after num_rollout = {num_rollout} (ids from 0)")
_NO_CHECKPOINT = absent("load", "the checkpoint says where to start", warn=True, part="run")
_FIXED_SIZE = absent("use_dynamic_batch_size",
                     "micro-batches are filled up to max_tokens_per_gpu; add --no-use-dynamic-batch-size")
_NOT_BOTH = when(lambda c: not c.debug.debug_rollout_only,
                 "and debug_rollout_only leave nothing to do; keep one of them")
_HAS_ROLLOUTS = needs("load_debug_rollout_data", "the folder of saved rollouts to train from")
_GENERATES = when(lambda c: not c.debug.debug_train_only,
                  "has nothing to save with debug_train_only; drop one of them")
# fmt: on


class ModelSection(Section):
    """The model that is trained."""

    hf_checkpoint: str = setting("", path=True)
    """Model folder in Hugging Face format, a hub id, or a bundled name (`smollm2-135m-instruct`)."""
    ref_load: str | None = setting(None, _HAS_REFERENCE, path=True)
    """Reference model for KL. Default: the starting model, if KL is used."""
    opd_teacher_load: str | None = setting(None, given("opd_kl_coef", why="the weight of the distillation"), path=True)
    """Teacher of on-policy distillation, a model of the same vocabulary (with opd_kl_coef)."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute dtype; master weights are always float32. `auto` is bfloat16 if the hardware is fast at it."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the model."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    fused_ops: bool = True
    """Use fewer and larger operations if the architecture is known: for norms, attention projections and MLPs in
    training, and on a CPU for the engine's whole layers. Off runs the model's own modules."""
    attention_backend: Literal["auto", "batched", "sdpa"] = "auto"
    """Attention of packed sequences: `batched` multiplies similar lengths together, `sdpa` makes one call per sequence.
    `auto` is one compiled call in bfloat16 on a CPU with GCC and bfloat16 instructions, else one of the two."""


class OptimSection(Section):
    """AdamW and its schedule."""

    lr: float = setting(1e-6, gt=0)
    """Peak learning rate."""
    min_lr: float = setting(0.0, _BELOW_PEAK, choice("lr_decay_style", "linear", "cosine", warn=True), ge=0)
    """Learning rate at the end of a decay."""
    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    """Schedule after the warm-up."""
    lr_warmup_steps: int = setting(0, ge=0)
    """Optimizer steps of linear warm-up."""
    lr_decay_steps: int | None = setting(None, _DECAYS, _AFTER_WARMUP, ge=1)
    """Optimizer steps until min_lr. Default: the whole run."""
    weight_decay: float = setting(0.0, ge=0)
    """Decoupled weight decay, on matrices only."""
    adam_beta1: float = setting(0.9, ge=0, lt=1)
    """Decay of the gradient mean."""
    adam_beta2: float = setting(0.95, ge=0, lt=1)
    """Decay of the squared gradient mean."""
    adam_eps: float = setting(1e-8, gt=0)
    """Constant added to AdamW's denominator."""
    clip_grad: float = setting(1.0, gt=0)
    """Clip the gradient to this global norm."""


class TrainSection(Section):
    """How long, and in what batches."""

    num_rollout: int | None = setting(None, ge=0)
    """Rollouts in the run."""
    num_epoch: int | None = setting(None, ge=1)
    """Passes over the data, instead of num_rollout."""
    start_rollout_id: int | None = setting(None, _IN_RANGE, _NO_CHECKPOINT, ge=0)
    """Id of the first rollout. A loaded checkpoint sets it."""
    global_batch_size: int | None = setting(None, ge=1)
    """Samples in an optimizer step."""
    num_steps_per_rollout: int | None = setting(None, ge=1)
    """Optimizer steps on each rollout."""
    use_dynamic_batch_size: bool = True
    """Fill micro-batches up to max_tokens_per_gpu instead of a number of samples."""
    max_tokens_per_gpu: int = setting(8192, given("use_dynamic_batch_size", warn=True), ge=1)
    """Tokens in a micro-batch; a sample that is longer makes a micro-batch of its own."""
    skip_zero_advantage: bool = True
    """Leave samples without advantage out of forward and backward if they add nothing to the loss: same gradient, less
    work."""
    micro_batch_size: int | None = setting(None, _FIXED_SIZE, ge=1)
    """Samples in a micro-batch, with --no-use-dynamic-batch-size."""
    seed: int = setting(1234, ge=0)
    """Seed of everything random outside the rollout."""


class ParallelSection(Section):
    """How ranks share a model: a grid of replicate × shard × tensor, in which the other two sizes leave the shards."""

    fsdp_replicate_size: int = setting(1, ge=1)
    """Copies of the sharded model (HSDP): weights are sharded inside a copy, gradients are averaged over all."""
    tensor_parallel_size: int = setting(1, ge=1)
    """Ranks that share the matrices of each layer and train on the same samples."""
    fsdp_cpu_offload: bool = False
    """Keep shards, gradients and AdamW in host memory and step there: slower, but larger models fit."""
    fsdp_sync_every_micro_batch: bool = False
    """Reduce gradients after each micro-batch instead of once a step: more traffic, but no rank holds a whole
    gradient."""
    distributed_timeout_seconds: float = seconds(600.0)
    """Abort a collective if any rank joins it later than this (seconds)."""


class CheckpointSection(Section):
    """Saving and resuming."""

    save: str | None = setting(None, _TRAINING, path=True)
    """Folder for checkpoints. Default: `checkpoints` in the run folder, if save_interval is set."""
    save_interval: int | None = setting(None, _TRAINING, IN_THE_RUN, ge=1)
    """Save every this many rollouts, and at the end."""
    keep_checkpoints: int | None = setting(None, given("save_interval", "save", why="no checkpoint is written"), ge=1)
    """Delete all but this many newest checkpoints. Default: all are kept."""
    load: str | None = setting(None, path=True)
    """Resume from a run folder, a save folder (its newest sound checkpoint), or one checkpoint."""


class ObserveSection(Section):
    """What is written and shown."""

    run_dir: str | None = setting(None, path=True)
    """Run folder. Default: the one that `load` names, or a new `runs/<recipe>-<time>`."""
    save_samples: bool = True
    """Write every rollout to `samples/` in the run folder, one JSON object a line."""
    tensorboard: bool = True
    """Write TensorBoard events to the run folder."""
    wandb_project: str | None = None
    """Also log to this Weights & Biases project (needs the `wandb` extra)."""
    progress: Literal["auto", "rich", "plain", "off"] = "auto"
    """Live display; `auto` is rich on a terminal, else one line a step."""
    num_samples_shown: int = setting(3, ge=0)
    """Sampled answers shown before and after training."""


class DebugSection(Section):
    """Run one half of the loop."""

    debug_rollout_only: bool = False
    """Generate and score, never train."""
    debug_train_only: bool = setting(False, _NOT_BOTH, _HAS_ROLLOUTS)
    """Train from saved rollouts, never generate (needs load_debug_rollout_data)."""
    save_debug_rollout_data: str | None = setting(None, _GENERATES, path=True)
    """Folder to save every rollout in, for load_debug_rollout_data."""
    load_debug_rollout_data: str | None = setting(None, given("debug_train_only"), path=True)
    """Folder of saved rollouts to train from instead of generating."""


class Config(Section):
    """The whole resolved configuration of a run."""

    model: ModelSection = Field(default_factory=ModelSection)
    data: DataSection = Field(default_factory=DataSection)
    rollout: RolloutSection = Field(default_factory=RolloutSection)
    engine: EngineSection = Field(default_factory=EngineSection)
    reward: RewardSection = Field(default_factory=RewardSection)
    algorithm: AlgorithmSection = Field(default_factory=AlgorithmSection)
    critic: CriticSection = Field(default_factory=CriticSection)
    optim: OptimSection = Field(default_factory=OptimSection)
    train: TrainSection = Field(default_factory=TrainSection)
    parallel: ParallelSection = Field(default_factory=ParallelSection)
    eval: EvalSection = Field(default_factory=EvalSection)
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)
    observe: ObserveSection = Field(default_factory=ObserveSection)
    cluster: ClusterSection = Field(default_factory=ClusterSection)
    debug: DebugSection = Field(default_factory=DebugSection)

    def value(self, name: str) -> Any:
        """Return the value of the field of this name, whatever its section."""
        return next(getattr(section, name) for _, section in self if name in type(section).model_fields)

    def uses_reward(self, name: str) -> bool:
        """Return whether a rollout or an evaluation set is scored by this reward."""
        return any(
            name in (rewards or ())
            for rewards in (self.reward.rm_type, *(o.rm_type for o in self.eval.eval_overrides.values()))
        )

    @property
    def models_beside(self) -> dict[str, str]:
        """The models that a run loads beside the one that it trains, by their flags."""
        if self.debug.debug_rollout_only:
            return {}
        has_critic = self.algorithm.estimator is None or self.algorithm.estimator.needs_values
        named = {
            "--ref-load": self.model.ref_load if self.algorithm.uses_reference else None,
            "--critic-load": self.critic.critic_load if has_critic else None,
            "--opd-teacher-load": self.model.opd_teacher_load,
        }
        return {flag: name for flag, name in named.items() if name is not None}
