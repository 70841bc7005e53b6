"""Rules about folders, saving and evaluating; one rule a function."""

from __future__ import annotations

from collections.abc import Iterator

from treadle.config.findings import Finding, fault, rule, warning
from treadle.config.sections import Config


@rule("all")
def folders_have_names(config: Config) -> Iterator[Finding]:
    folders = {"run_dir": config.observe.run_dir, "save": config.checkpoint.save, "load": config.checkpoint.load}
    for name, value in folders.items():
        if value is not None and (not value.strip() or "\0" in value):
            yield fault(f"{name} = {value!r} names no folder; leave it out, or write . for the current folder")


@rule("run")
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
