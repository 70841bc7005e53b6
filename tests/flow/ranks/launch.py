"""Starts the ranks of the tests of many ranks: `python launch.py JOBS.json`, jobs one after the other.

The modules are imported once; each rank is a fork of this process, made before any tensor is. A job that is not done
by its deadline is ended. Each rank writes what it found into the job's folder, and what it said into `log-<rank>`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import sys
import time
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers.models.llama.modeling_llama
from safetensors.torch import save_file

from treadle.config import Config, batch_arithmetic
from treadle.metrics import Metric
from treadle.models.value import ValueModel
from treadle.training.checkpoint import find_checkpoint, save_checkpoint
from treadle.training.critic import Critic
from treadle.training.objective import build_objective
from treadle.training.parallel import Grid, ParallelSpec, build_grid
from treadle.training.ranks import join_ranks, leave_ranks
from treadle.training.reference import Reference
from treadle.training.rollout_plan import Planner
from treadle.training.sharded_state import full_parameters, load_parallel, weight_specs
from treadle.training.trainer import Trainer
from treadle.training.trainer_files import write_model, write_rest

CPU = torch.device("cpu")


def shared_fixtures() -> Any:
    sys.path.insert(0, str(Path(__file__).parents[3]))  # conftest.py imports modules of the tests
    spec = importlib.util.spec_from_file_location("shared_fixtures", Path(__file__).parents[2] / "conftest.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build(config: Config, job: dict[str, Any], grid: Grid) -> Trainer:
    """The trainer of one rank, with what its objective needs; reference and teacher are another model."""
    dtype = torch.bfloat16 if config.model.dtype == "bfloat16" else torch.float32
    objective = build_objective(config.algorithm, 64)
    model = load_parallel(job["model"], dtype, grid)
    reference = critic = teacher = None
    if objective.needs.ref_logprobs:
        reference = Reference(load_parallel(job["other"], dtype, grid, trainable=False), config.algorithm)
    if objective.needs.values:
        critic = Critic(load_parallel(job["model"], dtype, grid, wrap=ValueModel), config, 10, print)
    if objective.needs.teacher_logprobs:
        teacher = load_parallel(job["other"], dtype, grid, trainable=False)
    return Trainer(model, config, batch_arithmetic(config), 10, reference, print, critic, teacher)


def save(trainer: Trainer, planner: Planner, job: dict[str, Any], rollout_id: int) -> None:
    """As a driver does it: one process makes the checkpoint, every rank writes into the folder it names."""
    if trainer.policy.grid.is_first:

        def told(what: str, write):
            def tell(folder: Path) -> None:
                if not trainer.policy.grid.world.is_alone:
                    dist.distributed_c10d._get_default_store().set(what, str(folder))
                write(folder)

            return tell

        alone = trainer.policy.grid.world.is_alone
        save_checkpoint(
            Path(job["folder"]) / "saves",
            rollout_id,
            write_model=told("model", partial(write_model, trainer)),
            write_rest=told("rest", partial(write_rest, trainer)),
            optimizer=trainer.optimizer.state_tensors() if alone else None,
            state={**trainer.state(), **planner.state()},
            config={},
        )
    else:
        store = dist.distributed_c10d._get_default_store()
        write_model(trainer, Path(store.get("model").decode()))
        write_rest(trainer, Path(store.get("rest").decode()))


def run_job(rank: int, job: dict[str, Any]) -> None:
    """Train on the job's rollouts as one rank."""
    fixtures, folder = shared_fixtures(), Path(job["folder"])
    torch.manual_seed(0)
    config = fixtures._make_config(**{"adam_eps": 1.0, "lr": 0.2, "clip_grad": 1e9, "critic_lr": 0.2, **job["fields"]})
    spec = ParallelSpec.of(config, job["size"])
    if spec.num_ranks > 1:
        timeout = config.parallel.distributed_timeout_seconds
        at = job["at"] if isinstance(job["at"], int) else Path(job["at"])
        join_ranks(rank, spec.num_ranks, at=at, device=CPU, timeout_seconds=timeout)
    grid = build_grid(spec, CPU)
    trainer = build(config, job, grid)
    planner = Planner(config, trainer.arithmetic, spec.num_data_ranks, print)
    if "load" in job:
        checkpoint = find_checkpoint(Path(job["load"]), print)
        trainer.load(checkpoint)
        planner.load_state(checkpoint.state)
    metrics: list[list[Metric]] = []
    passes = []
    trainer.model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: passes.append(1))
    for rollout_id in job["rollouts"]:
        if job.get("dies") == [rank, rollout_id]:
            os._exit(17)
        if job.get("late", [None])[:2] == [rank, rollout_id]:
            time.sleep(job["late"][2])
        groups = fixtures._make_groups(seed=rollout_id, **job["groups"])
        metrics.append(trainer.train_share(planner.plan(groups)[grid.data.rank], rollout_id))
        if job.get("sleeps"):
            sleep_and_wake(trainer)
    rows = [[[m.name, m.value, m.weight] for m in found] for found in metrics]
    (folder / f"metrics-{rank}.json").write_text(json.dumps({"metrics": rows, "passes": len(passes)}))
    if job.get("saves"):
        save(trainer, planner, job, job["rollouts"][-1] + 1)
    weights = {name: w.clone() for name, w in full_parameters(trainer.policy)}
    assert {name: (tuple(w.shape), w.dtype) for name, w in weights.items()} == {
        name: (s.shape, s.dtype) for name, s in weight_specs(trainer.policy).items()
    }
    masters = {name: w.clone() for name, w in full_parameters(trainer.policy, torch.float32)}
    save_file(masters, folder / f"weights-{rank}.safetensors")
    if trainer.critic is not None:
        values = {name: w.clone() for name, w in full_parameters(trainer.critic.parallel, torch.float32)}
        save_file(values, folder / f"critic-{rank}.safetensors")
    leave_ranks()


def sleep_and_wake(trainer: Trainer) -> None:
    """To the host and back; meanwhile the weights have no memory."""
    held = [p.detach().clone() for p in trainer.optimizer.masters.values()]
    freed = trainer.sleep(force=True)
    assert freed >= sum(t.nbytes for t in held) * 3  # weights and two moments
    assert all(p.untyped_storage().nbytes() == 0 for p in trainer.optimizer.masters.values())
    assert trainer.wake() == freed
    assert all(torch.equal(p, t) for p, t in zip(trainer.optimizer.masters.values(), held, strict=True))


def start(rank: int, job: dict[str, Any]) -> int:
    """Fork one rank; returns its process id."""
    pid = os.fork()
    if pid:
        return pid
    log = os.open(f"{job['folder']}/log-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        run_job(rank, job)
    except BaseException as error:
        traceback.print_exc()
        print(f"{type(error).__name__}: {error}", flush=True)
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Running:
    """A job whose ranks run."""

    def __init__(self, job: dict[str, Any]):
        Path(job["folder"]).mkdir(parents=True)
        self.job, self.began = job, time.monotonic()
        # Ranks of one machine find each other by a file, those of several by a port.
        job["at"] = free_port() if job["size"] > 2 else str(Path(job["folder"]) / "store")
        self.ranks = {start(rank, job): rank for rank in range(job["size"])}
        self.codes: dict[int, Any] = {}

    def is_over(self) -> bool:
        """True once every rank has ended, or was ended; then it is written down how."""
        seconds = time.monotonic() - self.began
        for pid, rank in list(self.ranks.items()):
            late = seconds > self.job["deadline"]
            if late:
                os.kill(pid, signal.SIGKILL)
            done, status = os.waitpid(pid, 0 if late else os.WNOHANG)
            if done:
                self.codes[rank] = "deadline" if late else os.waitstatus_to_exitcode(status)
                del self.ranks[pid]
        if not self.ranks:
            ended = {"codes": self.codes, "seconds": seconds}
            (Path(self.job["folder"]) / "ended.json").write_text(json.dumps(ended))
        return not self.ranks


def main(jobs: list[dict[str, Any]]) -> None:
    """One job after the other, and beside them those that mostly sleep."""
    torch.set_num_threads(1)
    beside = [Running(job) for job in jobs if "late" in job]
    for job in jobs:
        if "late" not in job:
            running = Running(job)
            while not running.is_over():
                beside = [other for other in beside if not other.is_over()]
                time.sleep(0.01)
    while beside:
        beside = [other for other in beside if not other.is_over()]
        time.sleep(0.01)


if __name__ == "__main__":
    assert transformers.models.llama.modeling_llama
    main(json.loads(Path(sys.argv[1]).read_text()))
