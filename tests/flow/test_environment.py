"""Several turns of model and environment as one trajectory, through the real engine and manager."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from treadle.chat import Codec
from treadle.config import RewardSection
from treadle.errors import ConfigError
from treadle.rollout.conversation import SingleTurn, TurnLimits
from treadle.rollout.engines.torch_engine.engine import TorchEngine
from treadle.rollout.engines.torch_engine.scheduler import EngineLimits
from treadle.rollout.envs import Environment, Episode, IsolatedEnvironment, Opening, ReplyFunction, load_environment
from treadle.rollout.manager import Collect, RolloutManager
from treadle.rollout.rewards import build_scorer
from treadle.types import NO_VERSION, Group, Prompt, Sample, SamplingParams, Status

Reply = Callable[[Prompt, Sequence[str]], Any]
CHARACTERS = "abcdefghijklmnopqrstuvwxyz"
LIMITS = TurnLimits(8, 256)


class Scripted:
    """An environment that answers with what a function says."""

    def __init__(self, script: Reply):
        self.script = script

    async def reply(self, prompt: Prompt, turns: Sequence[str]) -> Any:
        answer = self.script(prompt, turns)
        return await answer if asyncio.iscoroutine(answer) else answer


@pytest.fixture
def collect(tiny_model, tiny_codec) -> Callable[..., Coroutine[Any, Any, list[Group]]]:
    """Groups of prompts with these ids and rows, all at once; each character of the alphabet ends a turn: turns are short."""

    async def run(
        environment: Environment, rows: Mapping[int, dict[str, Any]], *, n: int = 1, max_new_tokens: int = 40,
        limits: TurnLimits = LIMITS, rewards: tuple[str, ...] = ("exact",),
    ) -> list[Group]:  # fmt: skip
        engine = TorchEngine(tiny_model, tiny_codec, EngineLimits(64, 1 << 24))
        manager = RolloutManager(engine, tiny_codec, timeout_seconds=60, environment=environment, limits=limits)
        text = tiny_codec.render_messages([{"role": "user", "content": "hello"}])
        tokens = tuple(tiny_codec.encode_rendered(text))
        prompts = [Prompt(i, tokens, text, label="x", columns=row) for i, row in rows.items()]
        sampling = SamplingParams(max_new_tokens, stop=tuple(CHARACTERS))
        section = RewardSection(rm_type=rewards)
        try:
            async with build_scorer(section, required=False, needs_value=not rewards) as scorer:
                return await manager.collect(Collect("test", prompts, sampling, n, 3), scorer)
        finally:
            await engine.close()

    return run


@pytest.fixture
def play(collect) -> Callable[..., Sample]:
    """Run one sample with an environment."""

    def run(script: Reply, *, max_turns: int = 8, max_new_tokens: int = 40, max_length: int = 256) -> Sample:
        environment, limits = ReplyFunction(Scripted(script).reply), TurnLimits(max_turns, max_length)
        (group,) = asyncio.run(collect(environment, {7: {}}, max_new_tokens=max_new_tokens, limits=limits))
        return group.samples[0]

    return run


@pytest.fixture
def collect_isolated(collect) -> Callable[..., list[Sample]]:
    """Samples of these rows with the environment at a path, in its own process and with this deadline."""

    def run(path: str, seconds: float, rows: Sequence[dict[str, Any]], **settings: Any) -> list[Sample]:
        async def main() -> list[Group]:
            environment = await IsolatedEnvironment.open(path, seconds)
            try:
                return await collect(environment, dict(enumerate(rows)), **settings)
            finally:
                await environment.close()

        return [sample for group in asyncio.run(main()) for sample in group.samples]

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
        (3, "returned 3 of type int; return text, a list of messages"),
        ({"role": "user", "content": "x"}, "returned .* of type dict"),
        ([], r"returned \[\] of type list"),
        (["x"], "returned a list whose item 0 is of type str"),
        ([{"role": "user", "content": "x"}, {"text": "x"}], r"returned a message with the keys \['text'\]"),
        ([{"role": "user", "content": 5}], "returned a message whose content is of type int"),
        ([{"role": "user", "content": None}], "returned a message whose content is of type NoneType"),
        (
            [{"role": "user", "content": [{"type": "image"}]}],
            "returned a message whose content holds a part that is no",
        ),
        ([{"role": "user", "content": [{"type": "text", "text": "x"}], "when": object}], ""),
        ("\ud800", "can't encode"),
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


ENVIRONMENT = """
import asyncio, os, re, signal, sys, time

async def reply(prompt, turns):
    \"\"\"Do what the row of the sample says, after its first turn.\"\"\"
    word = prompt.columns["do"]
    if word == "raise":
        raise KeyError("gone")
    if word == "hang":
        await asyncio.sleep(60)
    if word == "block":
        time.sleep(60)
    if word == "exit":
        os._exit(0)
    if word == "sys.exit":
        sys.exit(0)
    if word == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if word == "number":
        return 7
    if word == "nested":
        value = []
        for _ in range(500):
            value = [value]
        return [{"role": "user", "content": "x", "more": value}]
    await asyncio.sleep(0.2)
    return [{"role": "user", "content": "go on"}] if len(turns) < 3 else None


class CanNotBeMade:
    def __init__(self):
        sys.exit(0)

    async def reply(self, prompt, turns):
        return None


def blocking(prompt, turns):
    return "b"
"""


@pytest.fixture
def run_rows(collect_isolated, tmp_path) -> Callable[[list[str]], list[Sample]]:
    """One sample of each row, all at once, with the environment above in its own process and a deadline of 1.5 s."""
    (tmp_path / "envs.py").write_text(ENVIRONMENT)
    return lambda words: collect_isolated(f"{tmp_path}/envs.py:reply", 1.5, [{"do": word} for word in words])


def test_an_environment_that_goes_wrong_costs_its_own_samples_only(run_rows) -> None:
    words = ["fine", "raise", "block", "fine", "exit", "sys.exit", "number", "nested", "fine"]
    samples = run_rows(words)
    fine = [sample for word, sample in zip(words, samples, strict=True) if word == "fine"]
    assert [sample.status for sample in fine] == [Status.COMPLETED] * 3
    assert all(np.count_nonzero(np.diff(s.loss_mask.astype(int)) == 1) == 3 for s in fine), "three turns each"
    failures = {w: s.failure for w, s in zip(words, samples, strict=True) if s.status is Status.FAILED}
    assert failures.keys() == set(words) - {"fine"}
    for word, why in {
        "raise": "raised KeyError: 'gone' (envs.py:",
        "block": "timed out after 1.5 s (it blocks its event loop)",
        "exit": "its worker process died (exit code 0)",
        "sys.exit": "raised SystemExit: 0 (envs.py:",
        "number": "returned 7 of type int; return text, a list of messages",
        "nested": "raised ValueError: it is nested more than 100 deep",
    }.items():
        assert failures[word].startswith(f"environment: {why}"), failures[word]


def test_one_that_waits_too_long_and_one_that_crashes(run_rows) -> None:
    hangs, fine, crashes = run_rows(["hang", "fine", "segfault"])
    assert hangs.failure == "environment: timed out after 1.5 s"
    assert crashes.failure == "environment: its worker process died (killed by SIGSEGV)"
    assert fine.status is Status.COMPLETED


async def replies(environment: Any, prompt: Prompt, turns: Sequence[str]) -> list[Any]:
    """Play an episode with these turns of a model."""
    episode = environment.episode()
    await episode.open(prompt)
    found = [(await episode.step(turn)).reply for turn in turns]
    await episode.close()
    return found


def test_environments_are_found_by_path(tmp_path: Path) -> None:
    file = tmp_path / "envs.py"
    file.write_text(
        "async def function(prompt, turns):\n    return 'f'\n"
        "class Class:\n    async def reply(self, prompt, turns):\n        return 'c'\n"
        "instance = Class()\n"
    )
    for name, answer in (("function", "f"), ("Class", "c"), ("instance", "c")):
        environment = load_environment(f"{file}:{name}")
        assert asyncio.run(replies(environment, Prompt(0, (1,), ""), ["x"])) == [answer]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("blocking", r"envs.py:blocking' has no `async def reply\(prompt, turns\)`"),
        ("CanNotBeMade", r"envs.py:CanNotBeMade' can't be made: it raised SystemExit: 0 \(envs.py:"),
        ("nowhere", "has no 'nowhere'"),
    ],
)
def test_an_environment_that_can_not_be_made_is_a_mistake_of_the_configuration(tmp_path: Path, name, message) -> None:
    (tmp_path / "envs.py").write_text(ENVIRONMENT)
    with pytest.raises(ConfigError, match=message) as caught:
        asyncio.run(IsolatedEnvironment.open(f"{tmp_path}/envs.py:{name}", 5.0))
    assert "\n" not in str(caught.value)


def test_an_environment_is_given_the_prompt_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "shows.py").write_text("async def reply(prompt, turns):\n    return repr((prompt, turns))\n")
    prompt = Prompt(
        3, (1, 2), "hé\ud800", label={"a": 1.5}, columns={"c": [None]}, data_name="d", row=4,
        messages=({"role": "user", "content": "x"},), metadata={"m": True},
    )  # fmt: skip

    async def main() -> Any:
        environment = await IsolatedEnvironment.open(f"{tmp_path}/shows.py:reply", 30.0)
        try:
            return (await replies(environment, prompt, ["one", "two"]))[-1]
        finally:
            await environment.close()

    assert asyncio.run(main()) == repr((prompt, ("one", "two")))


EPISODES = """
import os
from treadle.rollout.envs import Opening, Step

SCHEMA = {"type": "function", "function": {"name": "look"}}

class Counts:
    '''Says how many turns it has had, and then what the sample is worth.'''

    def __init__(self):
        self.turns = []

    async def open(self, prompt):
        self.wanted = prompt.columns.get("turns", 2)
        return Opening([{"role": "user", "content": prompt.columns.get("begin", "go")}])

    async def step(self, turn):
        self.turns.append(turn)
        if len(self.turns) < self.wanted:
            return [{"role": "user", "content": f"T{len(self.turns)}"}]
        return Step(reward={"turns": len(self.turns), "last": 0.5})

class Dies(Counts):
    '''One row ends the process in its second step: the state of the others must be made again from their turns.'''

    async def open(self, prompt):
        self.dies = "dies" in prompt.columns
        return await super().open(prompt)

    async def step(self, turn):
        if len(self.turns) == 1 and self.dies:
            os._exit(3)
        return await super().step(turn)

class Compacts(Counts):
    '''After its first turn the context starts again.'''

    async def step(self, turn):
        self.turns.append(turn)
        if len(self.turns) == 1:
            return Step([{"role": "user", "content": "in short"}], fresh=True)
        return Step(reward=2.0)

class NoReward(Counts):
    async def step(self, turn):
        return None

class Wrong(Counts):
    async def step(self, turn):
        return Step("on", reward=1.0)

class OpensWrong(Counts):
    async def open(self, prompt):
        return Opening("text")
"""


@pytest.fixture
def play_episodes(collect_isolated, tmp_path) -> Callable[..., list[Sample]]:
    """Two samples of each row with the episode class of this name, rewarded by the episode alone."""
    file = tmp_path / "episodes.py"
    file.write_text(EPISODES)

    def run(name: str, rows: Sequence[dict[str, Any]] = ({},)) -> list[Sample]:
        return collect_isolated(f"{file}:{name}", 5.0, rows, n=2, max_new_tokens=60, rewards=())

    return run


def given_parts(sample: Sample) -> list[list[int]]:
    """The runs of tokens that nobody sampled."""
    pieces = np.split(sample.token_ids, np.flatnonzero(np.diff(sample.loss_mask.astype(int))) + 1)
    return [piece.tolist() for piece in pieces[::2]]


def test_an_episode_gives_the_first_messages_keeps_state_and_rewards_its_sample(play_episodes, tiny_codec) -> None:
    samples = play_episodes("Counts", [{"begin": "abc", "turns": 3}, {}])
    assert [s.status for s in samples] == [Status.COMPLETED] * 4
    assert given_parts(samples[0])[0] == tiny_codec.encode_rendered("<user>abc<bot>")
    assert [tiny_codec.decode(part) for part in given_parts(samples[0])[1:]] == [
        "<eos><user>T1<bot>",
        "<eos><user>T2<bot>",
    ]
    assert [s.reward for s in samples] == [3.5, 3.5, 2.5, 2.5]
    assert samples[0].reward_parts == {"env": 3.5, "env.turns": 3.0, "env.last": 0.5}


def test_episodes_of_a_process_that_died_are_made_again_from_their_turns(play_episodes) -> None:
    samples = play_episodes("Dies", [{"dies": True}, {"turns": 5}, {"turns": 4}])
    assert [s.failure for s in samples[:2]] == ["environment: its worker process died (exit code 3)"] * 2
    assert [(s.reward, s.failure) for s in samples[2:]] == [(5.5, "")] * 2 + [(4.5, "")] * 2


def test_a_fresh_context_makes_two_samples_of_one_trajectory(play_episodes, tiny_codec) -> None:
    samples = play_episodes("Compacts")
    assert [(s.index, s.trajectory_id) for s in samples] == [(0, 0), (0, 0), (1, 1), (1, 1)]
    assert [s.reward for s in samples] == [2.0] * 4
    assert given_parts(samples[0]) == [tiny_codec.encode_rendered("<user>go<bot>")]
    assert given_parts(samples[1]) == [tiny_codec.encode_rendered("<user>in short<bot>")]
    assert all(s.response_length > 0 for s in samples)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("NoReward", "the environment gave no reward: return a Step with one at the end"),
        ("Wrong", "environment: returned a reward with a reply"),
        ("OpensWrong", "environment: opened with text: 'text'"),
    ],
)
def test_a_wrong_episode_fails_its_samples(play_episodes, name, why) -> None:
    for sample in play_episodes(name):
        assert sample.status is Status.FAILED
        assert sample.failure.startswith(why)


def test_a_sample_that_a_limit_ended_has_no_reward_of_its_episode(play_episodes) -> None:
    """The episode never came to its end: eight turns are the limit."""
    for sample in play_episodes("Counts", [{"turns": 30}]):
        assert (sample.status, sample.reward, sample.reward_parts) == (Status.TRUNCATED, 0.0, {})


class OpensInThreeWays:
    """The first sample of a group does not begin, the next two begin with the same prompt, and the others with their own."""

    opens, keeps_state = True, False

    def __init__(self) -> None:
        self.index = -1

    def episode(self) -> Episode:
        self.index += 1
        return _Opens(self.index)


class _Opens(SingleTurn):
    def __init__(self, index: int):
        self.index = index

    async def open(self, prompt: Prompt) -> Opening:
        if not self.index:
            raise OSError("full")
        return Opening([{"role": "user", "content": "ab" if self.index < 3 else f"c{self.index}"}])


def test_samples_that_begin_with_the_same_prompt_are_generated_together(collect, monkeypatch, tiny_codec) -> None:
    """And nothing is generated for one that does not begin."""
    asked: dict[str, int] = {}
    generate = TorchEngine.generate

    def spy(engine: TorchEngine, token_ids: Sequence[int], sampling: SamplingParams, n: int = 1) -> Any:
        asked[tiny_codec.decode(list(token_ids))] = n
        return generate(engine, token_ids, sampling, n)

    monkeypatch.setattr(TorchEngine, "generate", spy)
    (group,) = asyncio.run(collect(OpensInThreeWays(), {0: {}}, n=5))
    assert asked == {"<user>ab<bot>": 2, "<user>c3<bot>": 1, "<user>c4<bot>": 1}
    assert [s.index for s in group.samples] == [0, 1, 2, 3, 4]
    assert group.samples[0].failure.startswith("environment: raised OSError: full")
    assert [given_parts(s) for s in group.samples[1:]] == [
        [tiny_codec.encode_rendered(f"<user>{text}<bot>")] for text in ("ab", "ab", "c3", "c4")
    ]
    assert len({s.token_ids[s.loss_mask].tobytes() for s in group.samples[1:3]}) == 2, "the two draw differently"


def test_the_text_of_a_single_turn_is_decoded_once(collect, monkeypatch) -> None:
    decoded: list[list[int]] = []
    response_text = Codec.response_text

    def spy(codec: Codec, token_ids: Sequence[int], *more: Any) -> str:
        decoded.append(list(token_ids))
        return response_text(codec, token_ids, *more)

    monkeypatch.setattr(Codec, "response_text", spy)
    (group,) = asyncio.run(collect(SingleTurn(), {0: {}}, n=3))
    assert sorted(decoded) == sorted(s.token_ids[s.loss_mask].tolist() for s in group.samples)
