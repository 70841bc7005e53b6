"""An environment as its worker process runs it: JSON values in, JSON values out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from treadle.rollout.envs.base import load_environment, read_reply
from treadle.rollout.isolation.plain_json import plain_json
from treadle.rollout.isolation.worker import Handler
from treadle.types import prompt_from_json

LOADER = f"{__name__}:load_handler"


def load_handler(path: str) -> Handler:
    """Import and make an environment and return the function that answers its requests.

    An empty request only shows that the environment is there.
    """
    environment = load_environment(path)

    async def handle(request: Mapping[str, Any]) -> Any:
        if not request:
            return None
        prompt = prompt_from_json(request["prompt"])
        return plain_json(read_reply(await environment.reply(prompt, tuple(request["turns"]))))

    return handle
