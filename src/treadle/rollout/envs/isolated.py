"""An environment in worker processes: one that raises, blocks or crashes costs its sample and nothing else."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from treadle.errors import ConfigError
from treadle.registry import check_name
from treadle.rollout.envs.base import Episode, Opening, Step
from treadle.rollout.envs.serving import LOADER, opening_from_json, prompt_row, request_of, step_from_json
from treadle.rollout.isolation.fault import CallFault, StartFault
from treadle.rollout.isolation.worker_pool import Work, WorkerPool
from treadle.types import Prompt


class IsolatedEnvironment:
    """The environment at a path, run by worker processes; use `open` to make it."""

    def __init__(self, path: str, timeout_seconds: float):
        location, _, name = path.rpartition(":")
        if location.endswith(".py"):  # workers find it from any folder
            path = f"{Path(location).expanduser().resolve()}:{name}"
        self._pool = WorkerPool(Work(LOADER, [path], timeout_seconds, concurrent=True))
        self.opens = self.keeps_state = False

    @classmethod
    async def open(cls, path: str, timeout_seconds: float) -> IsolatedEnvironment:
        """Start a worker with the environment.

        Raises:
            ConfigError: if the environment can't be imported or made, or is not of a known kind.
        """
        check_name("environment", path, {})
        environment = cls(path, timeout_seconds)
        try:
            kind = await environment.ask({})
        except BaseException as error:
            await environment.close()
            if isinstance(error, StartFault) and error.error is not None:
                raise error.error from error
            if isinstance(error, CallFault):
                raise ConfigError(f"environment {path!r}: {error}") from error
            raise
        environment.opens, environment.keeps_state = kind["opens"], kind["keeps_state"]
        return environment

    async def ask(self, request: Mapping[str, Any]) -> Any:
        """Return a worker's answer; raises `CallFault` if it gave none in time, and says why."""
        return await asyncio.wrap_future(self._pool.submit(0, request))

    def episode(self) -> Episode:
        return _RemoteEpisode(self, [])

    async def resumed(self, prompt: Prompt, turns: Sequence[str]) -> Episode:
        episode = _RemoteEpisode(self, list(turns))
        await episode.open(prompt)
        return episode

    def process_ids(self) -> list[int]:
        """Process ids of the workers that run now."""
        return self._pool.process_ids()

    async def close(self) -> None:
        """End the workers; safe to call twice."""
        await asyncio.to_thread(self._pool.close)


class _RemoteEpisode:
    """An episode in a worker process."""

    def __init__(self, environment: IsolatedEnvironment, turns: list[str]):
        self._environment, self._turns = environment, turns
        self._id, self._prompt = uuid.uuid4().hex, Prompt(0, (), "")

    @cached_property
    def _row(self) -> Any:
        """The prompt for the worker, which a step needs too: another process may have to make the episode again."""
        return prompt_row(self._prompt)

    async def open(self, prompt: Prompt) -> Opening:
        self._prompt = prompt
        if not self._environment.opens or self._turns:
            return Opening()
        return opening_from_json(await self._environment.ask(request_of(self._id, self._row, [])))

    async def step(self, turn: str) -> Step:
        self._turns.append(turn)
        return step_from_json(await self._environment.ask(request_of(self._id, self._row, self._turns)))

    async def close(self) -> None:
        if self._environment.keeps_state:
            with suppress(CallFault):
                await self._environment.ask(request_of(self._id, None, [], closes=True))
