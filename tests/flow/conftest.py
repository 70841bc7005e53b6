"""A whole tiny run: a task, a reward and a recipe for the tiny random Llama."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

REWARD = '''
def reward(sample):
    """The share of the response that is the letter the label names: easy to learn for any model."""
    text = sample.response
    return sum(c == sample.label for c in text) / max(1, len(text))
'''


@pytest.fixture
def toy_flags(tiny_model_dir: Path, tmp_path: Path) -> list[str]:
    """Flags of a run on the toy task, without the number of rollouts and the run folder."""
    data, reward = tmp_path / "toy.jsonl", tmp_path / "toy_reward.py"
    data.write_text("".join(json.dumps({"input": f"say {i}", "label": "a"}) + "\n" for i in range(10)))
    reward.write_text(REWARD)
    flags = f"""--hf-checkpoint {tiny_model_dir} --prompt-data {data} --label-key label --apply-chat-template
        --rollout-shuffle --custom-rm-path {reward}:reward --rollout-batch-size 4 --n-samples-per-prompt 8
        --rollout-max-response-len 8 --dtype float32 --progress off --no-tensorboard --lr 3e-3"""
    return flags.split()


@pytest.fixture
def read_rows() -> Callable[[Path], list[dict]]:
    """The rows of a run's metrics.jsonl."""

    def read(folder: Path) -> list[dict]:
        return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]

    return read
