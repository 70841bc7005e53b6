"""When the trainer delivers, and what is said where an end fails."""

import asyncio

import pytest

from treadle.errors import EngineError
from treadle.weights.publisher import exchange


@pytest.mark.parametrize(
    ("transport", "order"),
    [
        ("broadcast", ["receive", "deliver", "delivered", "received"]),
        ("cuda_ipc", ["receive", "received", "deliver", "delivered"]),
    ],
)
@pytest.mark.parametrize("refuses", [False, True])
def test_the_trainer_delivers_meanwhile_or_when_all_have_received(transport, order, refuses):
    seen = []

    async def receive():
        seen.append("receive")
        await asyncio.sleep(0.05)
        seen.append("received")
        if refuses:
            raise EngineError("another model")

    async def deliver():
        seen.append("deliver")
        await asyncio.sleep(0.01)
        seen.append("delivered")
        if refuses:
            raise EngineError("engine 1 refused")

    errors = asyncio.run(exchange(transport, receive(), deliver))
    assert seen == order
    assert [str(error) for error in errors] == (["another model", "engine 1 refused"] if refuses else [])
