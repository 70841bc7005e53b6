"""Rules about saving, resuming and debugging; each is one function and says one thing."""

from __future__ import annotations

from collections.abc import Iterator

from treadle.config.findings import Finding, Rule, fault, warning
from treadle.config.sections import Config


def folders_have_names(config: Config) -> Iterator[Finding]:
    folders = {"run_dir": config.observe.run_dir, "save": config.checkpoint.save, "load": config.checkpoint.load}
    for name, value in folders.items():
        if value is not None and (not value.strip() or "\0" in value):
            yield fault(f"{name} = {value!r} names no folder; leave it out, or write . for the current folder")


def checkpoints_are_written(config: Config) -> Iterator[Finding]:
    checkpoint = config.checkpoint
    if checkpoint.keep_checkpoints is not None and checkpoint.save is None and checkpoint.save_interval is None:
        yield fault(
            f"keep_checkpoints = {checkpoint.keep_checkpoints} does nothing: no checkpoint is written; "
            "set save_interval or save"
        )


def interval_is_reached(config: Config) -> Iterator[Finding]:
    rollouts = config.train.num_rollout
    for name, interval in (
        ("save_interval", config.checkpoint.save_interval),
        ("eval_interval", config.eval.eval_interval),
    ):
        if rollouts and interval is not None and interval > rollouts:
            yield warning(
                f"{name} = {interval} is longer than the run (num_rollout = {rollouts}): none falls inside it"
            )


def resume_says_where(config: Config) -> Iterator[Finding]:
    start, load = config.train.start_rollout_id, config.checkpoint.load
    if start is not None and load is not None:
        yield warning(f"start_rollout_id = {start} does nothing: the checkpoint loaded from {load} says where to start")


def one_half_at_a_time(config: Config) -> Iterator[Finding]:
    if config.debug.debug_rollout_only and config.debug.debug_train_only:
        yield fault("debug_rollout_only and debug_train_only leave nothing to do; keep one of them")


def saved_rollouts_are_read(config: Config) -> Iterator[Finding]:
    debug = config.debug
    if debug.debug_train_only and debug.load_debug_rollout_data is None:
        yield fault(
            "debug_train_only trains from saved rollouts: set load_debug_rollout_data to a folder that "
            "save_debug_rollout_data wrote"
        )
    if debug.load_debug_rollout_data is not None and not debug.debug_train_only:
        yield fault(
            f"load_debug_rollout_data = {debug.load_debug_rollout_data} is read with debug_train_only only; add it"
        )


def rollouts_to_save_are_made(config: Config) -> Iterator[Finding]:
    debug = config.debug
    if debug.debug_train_only and debug.save_debug_rollout_data is not None:
        yield fault(
            f"save_debug_rollout_data = {debug.save_debug_rollout_data} has nothing to save with debug_train_only"
        )


def train_only_does_not_evaluate(config: Config) -> Iterator[Finding]:
    if config.debug.debug_train_only and config.eval.eval_interval is not None:
        yield fault(
            f"eval_interval = {config.eval.eval_interval} needs generation, which debug_train_only switches off; "
            "drop one of them"
        )


def rollout_only_has_nothing_to_save(config: Config) -> Iterator[Finding]:
    checkpoint = config.checkpoint
    if config.debug.debug_rollout_only and (checkpoint.save is not None or checkpoint.save_interval is not None):
        yield warning("save and save_interval do nothing with debug_rollout_only: the weights never change")


RUN_RULES: tuple[Rule, ...] = (
    folders_have_names,
    checkpoints_are_written,
    interval_is_reached,
    resume_says_where,
    one_half_at_a_time,
    saved_rollouts_are_read,
    rollouts_to_save_are_made,
    train_only_does_not_evaluate,
    rollout_only_has_nothing_to_save,
)
