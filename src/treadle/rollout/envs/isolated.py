"""An environment in a process of its own: one that raises, blocks or crashes costs its sample and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from treadle.errors import ConfigError
from treadle.registry import check_name
from treadle.rollout.envs.base import Reply
from treadle.rollout.envs.serving import LOADER
from treadle.rollout.isolation.fault import CallFault, StartFault
from treadle.rollout.isolation.plain_json import plain_json
from treadle.rollout.isolation.worker_pool import Work, WorkerPool
from treadle.types import Prompt, prompt_to_json


class IsolatedEnvironment:
    """The environment at a path, run by worker processes; use `open` to make it."""

    def __init__(self, path: str, timeout_seconds: float):
        location, _, name = path.rpartition(":")
        if location.endswith(".py"):  # workers find it from any folder
            path = f"{Path(location).expanduser().resolve()}:{name}"
        self._pool = WorkerPool(Work(LOADER, [path], timeout_seconds, concurrent=True))

    @classmethod
    async def open(cls, path: str, timeout_seconds: float) -> IsolatedEnvironment:
        """Start a worker with the environment.

        Raises:
            ConfigError: if the environment can't be imported or made, or has no `async def reply`.
        """
        check_name("environment", path, {})
        environment = cls(path, timeout_seconds)
        try:
            await asyncio.wrap_future(environment._pool.submit(0, {}))
        except BaseException as error:
            await environment.close()
            if isinstance(error, StartFault) and error.error is not None:
                raise error.error from error
            if isinstance(error, CallFault):
                raise ConfigError(f"environment {path!r}: {error}") from error
            raise
        return environment

    async def reply(self, prompt: Prompt, turns: Sequence[str]) -> Reply:
        """Return the environment's answer; raises `CallFault` if it gave none in time, and says why."""
        request = {"prompt": plain_json(prompt_to_json(prompt)), "turns": list(turns)}
        answer: Reply = await asyncio.wrap_future(self._pool.submit(0, request))
        return answer

    def process_ids(self) -> list[int]:
        """Process ids of the workers that run now."""
        return self._pool.process_ids()

    async def close(self) -> None:
        """End the workers; safe to call twice."""
        await asyncio.to_thread(self._pool.close)
