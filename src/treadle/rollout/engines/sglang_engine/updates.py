"""New weights for an SGLang server: the requests of each way in which it takes them.

From a folder the server reads as it did at its start (`/update_weights_from_disk`). The other two ways stand between
`/begin_weight_update` and `/end_weight_update`: buckets that all ranks of a group get (weights/sglang_group.py), and
handles to memory on the server's own GPU. The server does not look whether names and shapes fit: that was done before.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

from treadle.errors import EngineError, EngineLostError
from treadle.rollout.engines.http_calls import RefusedError
from treadle.rollout.engines.server_engine import Ask
from treadle.weights import Offer
from treadle.weights.cuda_ipc import pickled_handles
from treadle.weights.sglang_group import ServerRanks, whole_buckets
from treadle.weights.whole_offer import folder_of

_SPARE_SECONDS = 30.0
"""Given to the server after the trainer gave up: what breaks a group is told to it, and it answers."""


async def load_folder(ask: Ask, offer: Offer, seconds: float) -> None:
    """Have the server read the offered weights from where they lie as files."""
    update = {
        "model_path": str(folder_of(offer)),
        "load_format": "safetensors",
        "weight_version": str(offer.version),
        "flush_cache": True,
    }
    await _tell(ask, "/update_weights_from_disk", update, seconds)


async def load_handles(ask: Ask, offer: Offer, ranks: int, seconds: float) -> None:
    """Have the server copy the weights from the trainer's GPU memory; they are copied when this returns."""
    pickled = base64.b64encode(pickled_handles(offer)).decode()
    update = {
        "serialized_named_tensors": [pickled] * ranks,
        "weight_version": str(offer.version),
        "flush_cache": True,
    }
    async with _session(ask, seconds):
        await _tell(ask, "/update_weights_from_tensor", update, seconds)
    # Copies may still run on the GPU. A checksum, here of no weight at all, begins and ends with waiting for it.
    nothing = {"action": "checksum", "skip_tensor_list": [""]}
    await _tell(ask, "/weights_checker", nothing, seconds)


class GroupUpdates:
    """A server's part in broadcasts, and the group it is in."""

    def __init__(self) -> None:
        self._ranks = ServerRanks()
        self._group: str | None = None  # what the server has, until it is told to let go of it

    async def join(self, ask: Ask, offer: Offer, ranks: int, refusal: EngineError | None, seconds: float) -> None:
        """Meet trainer and servers and have this server be in their group; its weights stay as they are.

        Raises `EngineError` where any of them refuses.
        """
        joining = await asyncio.to_thread(self._ranks.enter, offer, ranks, refusal)
        if not joining.is_new:
            return
        wait = _step_seconds(offer, seconds)
        await self._leave(ask, wait)
        where = offer.where
        group = {
            "master_address": where["host"],
            "master_port": where["port"],
            "rank_offset": joining.first_rank,
            "world_size": int(where["receivers"]) + 1,
            "group_name": joining.group,
            "backend": where["backend"],
        }
        try:
            await _tell(ask, "/init_weights_update_group", group, wait)
        except EngineError:
            self._ranks.leave()
            raise
        self._ranks.group = self._group = joining.group

    async def load(self, ask: Ask, offer: Offer, seconds: float) -> None:
        """Have the server take all buckets, which the trainer sends meanwhile."""
        wait = _step_seconds(offer, seconds)
        layouts = list(whole_buckets(offer.specs, int(offer.where["bucket_bytes"])))
        # Let go of at once where it breaks off: trainer and other servers wait for this one, and its ranks for each other.
        async with _session(ask, seconds, partial(self._leave, ask, wait)):
            for i, layout in enumerate(layouts):
                is_last = i == len(layouts) - 1
                specs = [layout.specs[name] for name in layout.offsets]
                update = {
                    "names": list(layout.offsets),
                    "dtypes": [str(spec.dtype).removeprefix("torch.") for spec in specs],
                    "shapes": [list(spec.shape) for spec in specs],
                    "group_name": self._group,
                    "load_format": "flattened_bucket",
                    "flush_cache": is_last,
                    "weight_version": str(offer.version) if is_last else None,
                }
                await _tell(ask, "/update_weights_from_distributed", update, wait)

    async def _leave(self, ask: Ask, seconds: float) -> None:
        self._ranks.group = None
        if self._group is not None:
            group, self._group = self._group, None
            with suppress(RefusedError):
                await ask("/destroy_weights_update_group", {"group_name": group}, seconds=seconds)

    def close(self) -> None:
        """Leave the meeting; a server that goes on keeps its end of the group until it is in another one."""
        self._ranks.leave()


@asynccontextmanager
async def _session(
    ask: Ask, seconds: float, let_go: Callable[[], Awaitable[None]] | None = None
) -> AsyncIterator[None]:
    """Weights are taken inside; an error there closes the session too, else the server would refuse the next one.

    What the server needs to get out of what it waits for comes first then: `let_go`.
    """
    try:
        await _begin(ask, seconds)
        yield
        await _tell(ask, "/end_weight_update", {}, seconds)
    except EngineLostError:
        raise
    except EngineError:
        if let_go is not None:
            await let_go()
        with suppress(RefusedError):
            await ask("/end_weight_update", {}, seconds=seconds)
        raise


async def _begin(ask: Ask, seconds: float) -> None:
    try:
        await _tell(ask, "/begin_weight_update", {}, seconds)
    except EngineLostError:
        raise
    except EngineError:  # one is open, of a client that was lost on the way
        await _tell(ask, "/end_weight_update", {}, seconds)
        await _tell(ask, "/begin_weight_update", {}, seconds)


async def _tell(ask: Ask, path: str, body: Mapping[str, Any], seconds: float) -> None:
    """Ask for a step of an update; raises `EngineError` where the server does not say that it did it."""
    try:
        reply = await ask(path, body, seconds=seconds)
    except RefusedError as error:
        raise EngineError(f"{error}; see the server's log") from error
    if not (isinstance(reply, Mapping) and reply.get("success") is True):
        raise EngineError(f"the SGLang server did not do {path}: {str(reply)[:300]}")


def _step_seconds(offer: Offer, seconds: float) -> float:
    """How long a server may take for a step that trainer and servers take together."""
    return min(seconds, float(offer.where["timeout_seconds"]) + _SPARE_SECONDS)
