"""Rewards that the tests name by path: good ones, and every way to go wrong."""

import asyncio
import json
import os
import re
import signal
import sys
import time
from pathlib import Path

from treadle.rollout.rewards import RewardScore


def length(sample):
    return len(sample.response)


def huge(sample):
    return 1e300


def parts(sample):
    return {"a": 1, "b/c": 0.5}


def scored(sample):
    return RewardScore(2.0, {"detail": 7.0})


def everything(sample):
    """All fields of the input, as text, to see what arrives in a worker."""
    seen = {
        "response": sample.response,
        "prompt": sample.prompt,
        "label": sample.label,
        "columns": sample.columns,
        "messages": sample.messages,
        "token_ids": sample.token_ids,
        "num_tokens": sample.num_tokens,
        "status": sample.status,
    }
    Path(sample.columns["file"]).write_text(json.dumps(seen))
    return 0.0


def misbehaves(sample):
    """Does what the response says."""
    word = sample.response
    if word == "raise":
        raise ValueError("bad\nlabel")
    if word == "hang":
        time.sleep(60)
    if word == "hang in C":
        re.match(r"(a+)+$", "a" * 60 + "b")
    if word == "exit":
        os._exit(3)
    if word == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if word == "sys.exit":
        sys.exit(0)
    if word == "slow":
        time.sleep(0.3)
    return {"none": None, "nan": float("nan"), "inf": float("inf"), "text": "1.0", "list": [1.0], "empty": {}}.get(
        word, 1.0
    )


def process_of_worker(sample):
    return float(os.getpid())


def torch_is_loaded(sample):
    return "torch" in sys.modules


def starts_a_child(sample):
    """Starts a process, writes its id, and hangs."""
    import subprocess

    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    Path(sample.columns["file"]).write_text(str(child.pid))
    time.sleep(60)


def prints(sample):
    """Prints the response in every way there is."""
    import subprocess

    print("printed", sample.response)
    print("logged", sample.response, file=sys.stderr)
    os.write(1, f"written {sample.response}\n".encode())
    subprocess.run(["echo", "echoed", sample.response], check=True)
    return 1.0


def detaches_a_child(sample):
    """Starts a process with a session of its own whose parent is gone, writes its id, and does what the response says."""
    import subprocess

    code = "import subprocess, sys; print(subprocess.Popen(['sleep', '60'], stdout=-3, stderr=-3, start_new_session=True).pid)"
    command = [sys.executable, "-c", code]
    child = subprocess.run(command, capture_output=True, text=True, start_new_session=True, check=True)
    Path(sample.columns["file"]).write_text(child.stdout)
    return misbehaves(sample)


def meets(sample):
    """Returns once four samples are here, each in a worker of its own."""
    folder = Path(sample.columns["folder"])
    (folder / sample.response).touch()
    while len(list(folder.iterdir())) < 4:
        time.sleep(0.01)
    return 1.0


_num_here = 0


async def async_meets(sample):
    """Returns once fifty samples are here."""
    global _num_here
    _num_here += 1
    while _num_here < 50:
        await asyncio.sleep(0.01)
    return len(sample.response)


async def async_length(sample):
    await asyncio.sleep(0.2)
    return len(sample.response)


async def async_misbehaves(sample):
    word = sample.response
    if word == "raise":
        raise KeyError("gone")
    if word == "exit":
        raise SystemExit(1)
    if word == "hang":
        await asyncio.sleep(60)
    if word == "stubborn":
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                await asyncio.sleep(0.5)
                return 0.0
    if word.startswith("block ") and word != "block in C":
        time.sleep(float(word.split()[1]))
    if word.startswith("hog"):  # in small steps
        end = time.monotonic() + float(word.split()[1])
        while time.monotonic() < end:
            time.sleep(0.02)
            await asyncio.sleep(0)
    if word == "block in C":
        re.match(r"(a+)+$", "a" * 60 + "b")
    if word == "_exit":
        os._exit(0)
    if word == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if word == "leaves a task":
        asyncio.get_running_loop().call_later(0.05, sys.exit, 3)
        await asyncio.sleep(0.5)
    if word == "wait":
        await asyncio.sleep(0.3)
    if word == "cancel":
        raise asyncio.CancelledError
    return 1.0


_gate = asyncio.Semaphore(3)
_inside = 0


async def async_limited(sample):
    """How many calls are inside of a limit that the module sets, at most: all share one event loop."""
    global _inside
    async with _gate:
        _inside += 1
        most = _inside
        await asyncio.sleep(0.02)
        _inside -= 1
    return float(most)


def trl_equals(completions, answer, **kwargs):
    assert set(kwargs) == {"prompts", "completion_ids", "label", "topic"}, sorted(kwargs)
    return [float(c == a) for c, a in zip(completions, answer, strict=True)]


def trl_rank(prompts, completions):
    """Depends on the whole group and on its order."""
    return [10.0 * i + len(set(completions)) for i, _ in enumerate(prompts)]


def trl_messages(completions, prompts):
    return [
        float(c[0]["role"] == "assistant") + len(c[0]["content"]) + 100 * len(p)
        for c, p in zip(completions, prompts, strict=True)
    ]


def trl_token_count(completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]


def trl_some(completions):
    return [None if c == "skip" else 1.0 for c in completions]


def trl_too_few(completions):
    return [1.0]


def trl_raises_on_bad(completions):
    if "bad" in completions:
        raise RuntimeError("one is bad")
    return [1.0 for _ in completions]


def trl_wants_solution(completions, solution):
    return [0.0 for _ in completions]


async def trl_async(completions, **kwargs):
    await asyncio.sleep(0)
    return [float(len(c)) for c in completions]


def two_arguments(sample, other):
    return 0.0


class Judge:
    def __call__(self, sample):
        return 1.0


judge = Judge()
number = 3
