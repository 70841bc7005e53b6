"""Several turns of model and environment as one trajectory, through the real engine and manager."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from treadle.config import RewardSection
from treadle.errors import ConfigError
from treadle.rollout.conversation import Conversation, TurnLimits
from treadle.rollout.engines.torch_engine import EngineLimits, TorchEngine
from treadle.rollout.envs import load_environment
from treadle.rollout.manager import Collect, RolloutManager
from treadle.rollout.rewards import build_scorer
from treadle.types import NO_VERSION, Prompt, Sample, SamplingParams, Status

Reply = Callable[[Prompt, Sequence[str]], Any]
CHARACTERS = "abcdefghijklmnopqrstuvwxyz"


class Scripted:
    """An environment that answers with what a function says."""

    def __init__(self, script: Reply):
        self.script = script

    async def reply(self, prompt: Prompt, turns: Sequence[str]) -> Any:
        answer = self.script(prompt, turns)
        return await answer if asyncio.iscoroutine(answer) else answer


@pytest.fixture
def play(tiny_model, tiny_codec) -> Callable[..., Sample]:
    """Run one sample with an environment; every character of the alphabet ends a turn, so turns are short."""

    def run(script: Reply, *, max_turns: int = 8, max_new_tokens: int = 40, max_length: int = 256) -> Sample:
        async def main() -> Sample:
            engine = TorchEngine(tiny_model, tiny_codec, EngineLimits(8, 1 << 24))
            limits = TurnLimits(max_turns, reply_timeout_seconds=0.5, max_length=max_length)
            conversation = Conversation(engine, tiny_codec, Scripted(script), limits)
            manager = RolloutManager(engine, tiny_codec, timeout_seconds=60, conversation=conversation)
            text = tiny_codec.render_messages([{"role": "user", "content": "hello"}])
            prompt = Prompt(7, tuple(tiny_codec.encode_rendered(text)), text, label="x")
            sampling = SamplingParams(max_new_tokens, stop=tuple(CHARACTERS))
            async with build_scorer(RewardSection(rm_type=("exact",))) as scorer:
                (group,) = await manager.collect(Collect("test", [prompt], sampling, 1, 3), scorer)
            await engine.close()
            return group.samples[0]

        return asyncio.run(main())

    return run


def test_replies_are_masked_and_the_models_own_tokens_are_kept(play, tiny_codec) -> None:
    heard: list[tuple[str, ...]] = []

    def script(prompt: Prompt, turns: Sequence[str]) -> Any:
        heard.append(tuple(turns))
        return [{"role": "user", "content": "XYZ"}] if len(turns) < 3 else None

    sample = play(script)
    # A stop string ended each turn: the end-of-turn token of the template is given, and not trained.
    reply = tiny_codec.encode_rendered("<eos><user>XYZ<bot>")
    assert sample.status is Status.COMPLETED
    assert [len(turns) for turns in heard] == [1, 2, 3]
    assert heard[2][:2] == heard[1]
    given = ~sample.loss_mask
    assert (sample.rollout_logprobs[given] == 0).all()
    assert (sample.weight_versions[given] == NO_VERSION).all()
    assert (sample.rollout_logprobs[sample.loss_mask] < 0).all()
    # prompt, turn, reply, turn, reply, turn: three runs of trained tokens, and the replies between them
    edges = np.flatnonzero(np.diff(sample.loss_mask.astype(int)))
    pieces = np.split(sample.token_ids, edges + 1)
    assert len(pieces) == 6
    assert pieces[2].tolist() == pieces[4].tolist() == reply
    for piece, turn in zip(pieces[1::2], heard[2], strict=True):
        assert tiny_codec.decode(piece.tolist()) == turn
    assert sample.text == "<eos><user>XYZ<bot>".join(heard[2])


def test_the_number_of_turns_and_of_tokens_is_bounded(play) -> None:
    sample = play(lambda prompt, turns: "!", max_turns=3)
    assert sample.status is Status.TRUNCATED
    assert np.count_nonzero(np.diff(sample.loss_mask.astype(int)) == 1) == 3
    assert play(lambda prompt, turns: "!", max_turns=99, max_new_tokens=12).response_length <= 12
    long = play(lambda prompt, turns: "!" * 20, max_turns=99, max_length=60)
    assert long.status is Status.TRUNCATED
    assert len(long.token_ids) <= 60  # a reply that leaves no room for an answer is not kept
    assert long.loss_mask[-1]


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        (3, "it returned 3 of type int; return text, a list of messages"),
        ({"role": "user", "content": "x"}, "of type dict"),
        ([], r"it returned \[\] of type list"),
        (["x"], "message 0 it returned is of type str"),
        ([{"role": "user", "content": "x"}, {"text": "x"}], r"message 1 it returned has the keys \['text'\]"),
        ([{"role": "user", "content": 1 / 3, "when": object}], ""),  # the template makes what it can of it
        ("\ud800", "raised"),
    ],
)
def test_a_reply_of_the_wrong_kind_fails_its_sample_only(play, reply, why) -> None:
    sample = play(lambda prompt, turns: reply if len(turns) < 2 else None)
    if why:
        assert sample.status is Status.FAILED
        assert sample.reward is None
        assert sample.response_length > 0
        assert re.match(f"environment: .*{why}", sample.failure)
    else:
        assert sample.status is Status.COMPLETED


def test_an_environment_that_raises_or_hangs_fails_its_sample_only(play) -> None:
    sample = play(lambda prompt, turns: 1 / 0)
    assert sample.status is Status.FAILED
    assert "ZeroDivisionError" in sample.failure
    sample = play(lambda prompt, turns: asyncio.sleep(60))
    assert sample.status is Status.FAILED
    assert sample.failure == "environment: no reply within 0.5 s"


def test_environments_are_found_by_path(tmp_path: Path) -> None:
    file = tmp_path / "envs.py"
    file.write_text(
        "async def function(prompt, turns):\n    return 'f'\n"
        "class Class:\n    async def reply(self, prompt, turns):\n        return 'c'\n"
        "instance = Class()\n"
        "def blocking(prompt, turns):\n    return 'b'\n"
    )
    for name, answer in (("function", "f"), ("Class", "c"), ("instance", "c")):
        environment = load_environment(f"{file}:{name}")
        assert asyncio.run(environment.reply(Prompt(0, (1,), ""), ["x"])) == answer
    with pytest.raises(ConfigError, match="async def reply"):
        load_environment(f"{file}:blocking")
