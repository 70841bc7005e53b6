"""Time every weight transport on 135M random bfloat16 parameters, against a plain copy of the same bytes.

    OMP_NUM_THREADS=2 python benches/bench_weights.py [--rounds 7] [--folder DIR]

The plain copy is one `Tensor.copy_` of one flat tensor. Transports and the copy take turns in every round, and medians are
compared. "write and map" is what a reader on the map needs before it can use the first weight; the checksum is written,
and compared in the rows below. Deltas are measured twice: parameters that moved by one unit in the last place, as a small step of training
does, and parameters with random bits; their peer is the XOR of all bytes, split into planes, by the same zstd.
Prints a table, then one line of JSON; a ratio is ours over the peer, above 1 is better.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import torch
from torch import nn

from treadle.weights import Offer, SentWeights, ServedWeights, WeightReceiver, WeightSender
from treadle.weights.broadcast import BroadcastReceiver, open_broadcast
from treadle.weights.disk import DiskReceiver, DiskSender
from treadle.weights.disk_delta import DeltaReceiver, DeltaSender
from treadle.weights.in_process import InProcessReceiver, InProcessSender
from treadle.weights.shm import ShmReceiver, ShmSender, map_offer
from treadle.weights.version_folders import name_of

CHANGED = (0.001, 0.01, 0.1, 1.0)
BAR = 0.5  # of the plain copy, for inproc and for shm's write and map


def random_module() -> nn.Module:
    """Parameters shaped like SmolLM2-135M's, bfloat16, normal with deviation 0.03."""
    shapes = [(49152, 576), (576,)]
    for _ in range(30):
        shapes += [
            (576, 576),
            (192, 576),
            (192, 576),
            (576, 576),
            (1536, 576),
            (1536, 576),
            (576, 1536),
            (576,),
            (576,),
        ]
    module = nn.Module()
    for i, shape in enumerate(shapes):
        module.register_parameter(f"w{i:03d}", nn.Parameter((torch.randn(shape) * 0.03).bfloat16()))
    return module.requires_grad_(False)


def seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def push(sender: WeightSender, receiver: WeightReceiver, version: int) -> None:
    offer = Offer.from_json(sender.offer(version).to_json())
    thread = threading.Thread(target=sender.deliver)
    thread.start()
    receiver.receive(offer)
    thread.join()


def time_in_turns(runs: dict[str, Callable[[int], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each, after two rounds that are not counted (memory is touched for the first time there)."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for i in range(rounds + 2):
        for name, run in runs.items():
            times[name].append(seconds(lambda run=run, i=i: run(i)))
    return {name: statistics.median(found[2:]) for name, found in times.items()}


def time_transports(rounds: int, folder: Path) -> tuple[dict[str, float], int]:
    """Median seconds by transport, and the bytes each moves."""
    trained, served = random_module(), random_module()
    sent = {name: p.detach() for name, p in trained.named_parameters()}

    def engine() -> ServedWeights:
        return ServedWeights(dict(served.named_parameters()), lambda version: None)

    num_bytes = SentWeights(sent).num_bytes
    one, other = torch.ones(2, num_bytes, dtype=torch.uint8)
    inproc = InProcessSender(SentWeights(sent)), InProcessReceiver(engine())
    mapped, shm = ShmSender(SentWeights(sent)), ShmSender(SentWeights(sent))
    disk = DiskSender(SentWeights(sent), folder / "disk")
    broadcast = open_broadcast(SentWeights(sent), 1)
    ends: list[tuple[WeightSender, WeightReceiver]] = [
        (shm, ShmReceiver(engine())),
        (disk, DiskReceiver(engine())),
        (broadcast, BroadcastReceiver(engine())),
    ]
    found = time_in_turns(
        {
            "memcpy": lambda i: other.copy_(one),
            "inproc": lambda i: push(*inproc, i),
            "shm, write and map": lambda i: map_offer(mapped.offer(i), verify=False),
            "shm, checked as well": lambda i: map_offer(mapped.offer(i)),
            "shm, into the engine": lambda i: push(*ends[0], i),
        },
        rounds,
    )
    found |= time_in_turns(
        {
            "plain file, with fsync": lambda i: write_file(folder / "plain", one),
            "disk, into the engine": lambda i: push(*ends[1], i),
            "gloo, into the engine": lambda i: push(*ends[2], i),
        },
        3,
    )
    for sender, receiver in ends:
        receiver.close()
        sender.close()
    mapped.close()
    return found, num_bytes


def write_file(path: Path, tensor: torch.Tensor) -> None:
    with path.open("wb") as file:
        file.write(tensor.numpy().data)
        os.fsync(file.fileno())


@torch.no_grad()
def move(weight: torch.Tensor, fraction: float, how: str) -> int:
    """Change that part of a weight in place; the number of elements that are other bits now."""
    integers = weight.view(torch.int16)
    before = integers.clone()
    moved = torch.rand(weight.shape) < fraction if fraction < 1 else torch.ones(weight.shape, dtype=torch.bool)
    if how == "steps":
        integers[moved] += (torch.randint(0, 2, (int(moved.sum()),)) * 2 - 1).short()
    else:
        integers[moved] = torch.randint(-(2**15), 2**15, (int(moved.sum()),)).short()
    return int((integers != before).sum())


def xor_size(old: dict[str, torch.Tensor], new: dict[str, torch.Tensor]) -> int:
    codec = pyarrow.Codec("zstd", compression_level=1)
    size = 0
    for name, weight in new.items():
        planes = (weight.view(torch.int16) ^ old[name].view(torch.int16)).view(torch.uint8).view(-1, 2).t().contiguous()
        size += sum(len(codec.compress(pyarrow.py_buffer(plane.numpy()))) for plane in planes)
    return size


def measure_deltas(folder: Path) -> dict[str, dict[str, float]]:
    """By kind and part of the parameters changed: sizes in bytes, seconds to write and to take in."""
    weights = {name: p.detach() for name, p in random_module().named_parameters()}
    found: dict[str, dict[str, float]] = {}
    version = 0
    for how in ("steps", "random bits"):
        for fraction in CHANGED:
            sender = DeltaSender(SentWeights(weights), folder / "delta")
            served = ServedWeights({name: torch.zeros_like(w) for name, w in weights.items()}, lambda version: None)
            receiver = DeltaReceiver(served)
            receiver.receive(sender.offer(version := version + 1))
            old = {name: w.clone() for name, w in weights.items()}
            changed = sum(move(weight, fraction, how) for weight in weights.values())
            offers: list[Offer] = []
            write = seconds(lambda s=sender, v=version + 1, o=offers: o.append(s.offer(v)))
            version += 1
            take = seconds(lambda r=receiver, o=offers: r.receive(o[0]))
            files = (folder / "delta" / name_of(version)).glob("*.safetensors")
            assert all(
                torch.equal(served.tensors[n].view(torch.int16), w.view(torch.int16)) for n, w in weights.items()
            )
            found[f"{fraction:.1%}, {how}"] = {
                "changed_bytes": 2 * changed,
                "bytes": sum(file.stat().st_size for file in files),
                "xor_bytes": xor_size(old, weights),
                "write_seconds": round(write, 2),
                "receive_seconds": round(take, 2),
            }
            sender.close()
    return found


def show(times: dict[str, float], num_bytes: int, deltas: dict[str, dict[str, float]]) -> None:
    print(f"{num_bytes / 1e6:.0f} MB, {torch.get_num_threads()} threads")
    print(f"{'transport':24}{'ms':>9}{'GB/s':>8}{'of memcpy':>11}")
    for name, took in times.items():
        print(f"{name:24}{took * 1e3:9.0f}{num_bytes / took / 1e9:8.2f}{times['memcpy'] / took:11.0%}")
    print(
        f"\n{'changed':22}{'changed MB':>11}{'delta MB':>10}{'delta/changed':>15}{'XOR MB':>9}{'write s':>9}{'take s':>8}"
    )
    for name, d in deltas.items():
        print(
            f"{name:22}{d['changed_bytes'] / 1e6:11.2f}{d['bytes'] / 1e6:10.2f}{d['bytes'] / d['changed_bytes']:15.2f}"
            f"{d['xor_bytes'] / 1e6:9.2f}{d['write_seconds']:9.2f}{d['receive_seconds']:8.2f}"
        )


def report(times: dict[str, float], num_bytes: int, deltas: dict[str, dict[str, float]]) -> dict[str, Any]:
    speeds = {name: round(num_bytes / took / 1e9, 3) for name, took in times.items()}
    memcpy, plain_file = speeds.pop("memcpy"), speeds.pop("plain file, with fsync")
    ratios = {f"{name} / memcpy": round(speed / memcpy, 3) for name, speed in speeds.items() if "disk" not in name}
    ratios["disk, into the engine / plain file"] = round(speeds["disk, into the engine"] / plain_file, 3)
    ratios |= {f"XOR size / delta size, {name}": round(d["xor_bytes"] / d["bytes"], 3) for name, d in deltas.items()}
    return {
        "bench": "weights",
        "work": {"bytes": num_bytes, "dtype": "bfloat16", "tensors": 272, "threads": torch.get_num_threads()},
        "ours": {"gb_per_second": speeds, "deltas": deltas},
        "peers": {"memcpy_gb_per_second": memcpy, "plain_file_gb_per_second": plain_file},
        "ratios": ratios,
        "bars": {"inproc / memcpy": BAR, "shm, write and map / memcpy": BAR},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=None, help="where disk transports write")
    options = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        times, num_bytes = time_transports(options.rounds, Path(scratch))
        deltas = measure_deltas(Path(scratch))
    show(times, num_bytes, deltas)
    print(json.dumps(report(times, num_bytes, deltas)))


if __name__ == "__main__":
    main()
