"""New weights for an SGLang server, in each of the ways that it takes them.

The server reads a folder as it did at its start (`/update_weights_from_disk`). The other two ways are sessions between
`/begin_weight_update` and `/end_weight_update`: buckets that all ranks of a group get (weights/sglang_group.py), and
handles to memory of the server's own GPU. The server does not check names and shapes; that was done before.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

from treadle.errors import EngineError, EngineLostError
from treadle.rollout.engines.server_client import Call, RefusedError, ServerClient
from treadle.weights import Offer
from treadle.weights.cuda_ipc import pickled_handles
from treadle.weights.sglang_group import ServerRanks, whole_buckets
from treadle.weights.whole_offer import folder_of

_SPARE_SECONDS = 30.0
"""Added to the trainer's deadline, so that a server can answer after the trainer gave up and broke the group."""


async def load_folder(client: ServerClient, offer: Offer) -> None:
    """Have the server read the offered weights from their files."""
    update = {"model_path": str(folder_of(offer)), "load_format": "safetensors"}
    await _tell(client, "/update_weights_from_disk", update | _ending(offer))


async def load_handles(client: ServerClient, offer: Offer, ranks: int) -> None:
    """Have the server copy the weights from the trainer's GPU memory; they are copied when this returns."""
    pickled = base64.b64encode(pickled_handles(offer)).decode()
    async with _session(client):
        update = {"serialized_named_tensors": [pickled] * ranks}
        await _tell(client, "/update_weights_from_tensor", update | _ending(offer))
    # Copies may still run on the GPU. A checksum, here of no weight at all, waits for the GPU.
    await _tell(client, "/weights_checker", {"action": "checksum", "skip_tensor_list": [""]})


class GroupUpdates:
    """A server's part in broadcasts, and the group that it is in."""

    def __init__(self) -> None:
        self._ranks = ServerRanks()
        self._group: str | None = None  # the server's group, until the server is told to leave it

    async def join(self, client: ServerClient, offer: Offer, ranks: int, refusal: EngineError | None) -> None:
        """Bring this server into the group of the trainer and all servers; its weights stay as they are.

        Raises `EngineError` if any of them refuses.
        """
        joining = await asyncio.to_thread(self._ranks.enter, offer, ranks, refusal)
        if not joining.is_new:
            return
        seconds = _step_seconds(client, offer)
        await self._leave(client, seconds)
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
            await _tell(client, "/init_weights_update_group", group, seconds)
        except EngineError:
            self._ranks.leave()
            raise
        self._ranks.group = self._group = joining.group

    async def load(self, client: ServerClient, offer: Offer) -> None:
        """Have the server take all buckets, which the trainer sends meanwhile."""
        seconds = _step_seconds(client, offer)
        *_, last = layouts = list(whole_buckets(offer.specs, int(offer.where["bucket_bytes"])))
        # If this breaks off, the server leaves at once: trainer and other servers wait for it, and its ranks for each other.
        async with _session(client, seconds, partial(self._leave, client, seconds)):
            for layout in layouts:
                specs = [layout.specs[name] for name in layout.offsets]
                update = {
                    "names": list(layout.offsets),
                    "dtypes": [str(spec.dtype).removeprefix("torch.") for spec in specs],
                    "shapes": [list(spec.shape) for spec in specs],
                    "group_name": self._group,
                    "load_format": "flattened_bucket",
                }
                ending = _ending(offer) if layout is last else {"flush_cache": False, "weight_version": None}
                await _tell(client, "/update_weights_from_distributed", update | ending, seconds)

    async def _leave(self, client: ServerClient, seconds: float) -> None:
        self._ranks.group = None
        if self._group is not None:
            group, self._group = self._group, None
            with suppress(RefusedError):
                await client.ask(Call("/destroy_weights_update_group", {"group_name": group}), seconds)

    def close(self) -> None:
        """Leave the rendezvous. A server that runs on keeps its end of the group until it joins another one."""
        self._ranks.leave()


@asynccontextmanager
async def _session(
    client: ServerClient, seconds: float | None = None, let_go: Callable[[], Awaitable[None]] | None = None
) -> AsyncGenerator[None, None]:
    """Open a session for new weights. An error closes it too, else the server would refuse the next one.

    `let_go` is called before that: it frees the server from what it waits for.
    """
    try:
        try:
            await _tell(client, "/begin_weight_update", {}, seconds)
        except EngineLostError:
            raise
        except EngineError:  # a session is open, of a client that died meanwhile
            await _tell(client, "/end_weight_update", {}, seconds)
            await _tell(client, "/begin_weight_update", {}, seconds)
        yield
        await _tell(client, "/end_weight_update", {}, seconds)
    except EngineLostError:
        raise
    except EngineError:
        if let_go is not None:
            await let_go()
        with suppress(RefusedError):
            await client.ask(Call("/end_weight_update", {}, slow=True), seconds)
        raise


async def _tell(client: ServerClient, path: str, body: Mapping[str, Any], seconds: float | None = None) -> None:
    """Ask for one step of an update; raises `EngineError` unless the server answers that it did it."""
    try:
        reply = await client.ask(Call(path, body, slow=True), seconds)
    except RefusedError as error:
        raise EngineError(f"{error}; see the server's log") from error
    if not (isinstance(reply, Mapping) and reply.get("success") is True):
        raise EngineError(f"{client.name} did not do {path}: {str(reply)[:300]}")


def _ending(offer: Offer) -> dict[str, Any]:
    """Return the fields of an update's last request: the new version, and that keys and values are dropped."""
    return {"weight_version": str(offer.version), "flush_cache": True}


def _step_seconds(client: ServerClient, offer: Offer) -> float:
    """Return how long a server may take for a step that trainer and servers take together."""
    return min(client.seconds[True], float(offer.where["timeout_seconds"]) + _SPARE_SECONDS)
