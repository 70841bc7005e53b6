"""The compute thread: the one thread of a process that runs torch.

OpenMP gives every thread that computes a team of its own. With more threads in teams than cores in the machine, they all
sleep between two operations instead of waiting for the next one: on two cores, a model loaded by one thread and run by
another takes twice as long for a decode step, and for a training step by a third thread likewise. So a runtime makes one of
these and has its model loaded, its engine stepped and its trainer run there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

Given = ParamSpec("Given")
Result = TypeVar("Result")


def in_short_lived_thread(call: Callable[Given, Result], *args: Given.args, **kwargs: Given.kwargs) -> Result:
    """Make the call in a thread of its own, which ends with its OpenMP team; return the result.

    For computations before the compute thread starts, in a process that goes on to train or generate.
    """
    with ThreadPoolExecutor(1) as short_lived:
        return short_lived.submit(call, *args, **kwargs).result()


class ComputeThread:
    """A thread that makes one call after the other."""

    def __init__(self) -> None:
        self.executor = ThreadPoolExecutor(1, thread_name_prefix="compute")

    async def run(self, call: Callable[Given, Result], *args: Given.args, **kwargs: Given.kwargs) -> Result:
        """Return the result of the call, which the thread makes while the event loop goes on."""
        return await asyncio.wrap_future(self.executor.submit(call, *args, **kwargs))

    def close(self) -> None:
        """Take no more calls. One that runs is not waited for here; Python does so when it exits, or a second Ctrl-C ends it."""
        self.executor.shutdown(wait=False, cancel_futures=True)
