"""What every environment must hold to, as a check that any can be run through, yours too.

    check_environment("my_env.py:Search", [Prompt(0, (), "find it", label="x")])

It runs the environment in this process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from treadle.plain_json import plain_json
from treadle.rollout.envs.base import Environment, Opening, Step, load_environment
from treadle.rollout.envs.serving import opening_from_json, step_from_json, step_to_json
from treadle.types import Prompt

ODD_TURNS = ("", " \n", "δ 四十二 \N{GRINNING FACE}", "\x00", "word " * 2000)


def check_environment(
    environment: str | Environment, prompts: Sequence[Prompt], turns: Sequence[str] = ODD_TURNS, *, repeats: bool = True
) -> None:
    """Check an environment, by path or as an object, on prompts and the turns of a model.

    An episode must open and answer every turn with values that JSON can hold. Episodes must not share state: one that is
    played alone, one that is played beside others, and one that is made again from its turns give the same answers. Set
    `repeats` to False for an environment whose answers change by themselves, such as a search on the web.

    Raises:
        AssertionError: if one of these does not hold; the text says which.
    """
    assert prompts, "check_environment needs at least one prompt"
    found = load_environment(environment) if isinstance(environment, str) else environment
    asyncio.run(_check(found, prompts, turns, repeats))


async def _check(environment: Environment, prompts: Sequence[Prompt], turns: Sequence[str], repeats: bool) -> None:
    alone = [await _play(environment, prompt, turns) for prompt in prompts]
    together = await asyncio.gather(*(_play(environment, prompt, turns) for prompt in prompts))
    if not repeats:
        return
    for prompt, one, other in zip(prompts, alone, together, strict=True):
        assert one == other, f"an episode of prompt {prompt.group_id} answered otherwise beside other episodes: {other}"
        answers = one[1]
        for place in range(1, len(answers)):
            episode = await environment.resumed(prompt, turns[:place])
            step = _checked_step(await episode.step(turns[place]))
            await episode.close()
            assert step == answers[place], f"made again after {place} turns, an episode answered otherwise: {step}"


async def _play(environment: Environment, prompt: Prompt, turns: Sequence[str]) -> tuple[Opening, list[Step]]:
    episode = environment.episode()
    opening = await episode.open(prompt)
    as_json = plain_json({"messages": opening.messages, "tools": opening.tools})
    assert opening_from_json(as_json) == opening, f"JSON changes the opening of prompt {prompt.group_id}: {opening}"
    steps = []
    for turn in turns:
        steps.append(_checked_step(await episode.step(turn)))
        await asyncio.sleep(0)  # another episode has its turn
        if steps[-1].reply is None:
            break
    await episode.close()
    return opening, steps


def _checked_step(step: Step) -> Step:
    assert step_from_json(plain_json(step_to_json(step))) == step, f"JSON changes the answer {step}"
    return step
