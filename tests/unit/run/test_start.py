"""What is built for a run, and what a run refuses or survives. Whole runs are in tests/flow."""

import asyncio
import json
import shutil
import threading
from contextlib import AsyncExitStack

import pytest

from treadle.chat import Codec
from treadle.config import EvalOverride
from treadle.errors import CheckpointError, ConfigError, DataError, ModelError, RunFolderLostError, TreadleError
from treadle.observe.samples import read_groups, rollout_file
from treadle.rollout.conversation import SingleTurn
from treadle.rollout.engines.torch_engine.model_runner import ModelRunner
from treadle.run import build, model_files, session, start
from treadle.run.compute import ComputeThread
from treadle.run.place import save_folder
from treadle.training.trainer import Trainer

REWARD = "async def reward(sample):\n    return float(len(set(sample.response)))\n"


@pytest.fixture
def make_run(make_config, tiny_model_dir, tmp_path):
    """The configuration of a small run in `tmp_path / name`, of prompts 'say 0' to 'say 6'."""
    data, reward = tmp_path / "toy.jsonl", tmp_path / "toy_reward.py"
    data.write_text("".join(json.dumps({"input": f"say {i}"}) + "\n" for i in range(7)))
    reward.write_text(REWARD)

    def make(name, **fields):
        common = {
            "hf_checkpoint": str(tiny_model_dir),
            "prompt_data": (str(data),),
            "custom_rm_path": f"{reward}:reward",
            "rollout_batch_size": 3,
            "n_samples_per_prompt": 2,
            "rollout_max_response_len": 4,
            "rollout_shuffle": True,
            "num_rollout": 3,
            "dtype": "float32",
            "progress": "plain",
            "tensorboard": False,
            "run_dir": str(tmp_path / name),
        }
        return make_config(**{**common, **fields})

    return make


def drawn(folder, rollout_id):
    groups = read_groups(rollout_file(folder / "samples", rollout_id))
    return [(g.group_id, g.prompt.text, [s.token_ids.tolist() for s in g.samples]) for g in groups]


# Building


def test_checkpoints_lie_in_the_run_folder_or_where_asked(make_config, tmp_path):
    assert save_folder(make_config(), tmp_path) == tmp_path / "checkpoints"
    assert save_folder(make_config(save=str(tmp_path / "x")), tmp_path / "run") == tmp_path / "x"


def test_the_engine_and_manager_have_the_limits_of_the_configuration(make_config, tiny_model, tiny_codec):
    config = make_config(
        max_running_requests=5, kv_cache_gib=0.5, rollout_timeout_seconds=77.0, max_concurrent_prompts=3
    )

    async def main():
        engine = build.open_torch_engine(config, tiny_model, tiny_codec, ComputeThread())
        generation = await build.open_generation(config, engine, tiny_codec, 256, None, (None, []), AsyncExitStack())
        manager = generation.manager
        assert (manager.timeout_seconds, manager.max_concurrent_prompts) == (77.0, 3)
        assert isinstance(manager._shared.environment, SingleTurn)
        limits = engine._runner.store.limits
        assert (limits.max_rows, limits.kv_bytes) == (5, 2**29)
        await engine.close()

    asyncio.run(main())


def test_an_evaluation_set_has_its_own_sampling_and_rewards(make_run, tiny_codec, tmp_path):
    config = make_run(
        "run",
        eval_prompt_data=(f"one={tmp_path / 'toy.jsonl'}", f"two={tmp_path / 'toy.jsonl'}@[2:5]"),
        eval_overrides={"two": EvalOverride(rm_type=("regex",), n_samples_per_eval_prompt=4, eval_temperature=1.0)},
        rm_regex="a",
    )

    async def main():
        async with AsyncExitStack() as stack:
            scorer, (one, two) = await build.open_scoring(config, tiny_codec, 50, stack)
            assert one.scorer is scorer
            assert two.scorer.reward_names == ("regex",)
            assert [(s.name, len(s.prompts), s.n, s.sampling.temperature) for s in (one, two)] == [
                ("one", 7, 1, 0.0),
                ("two", 3, 4, 1.0),
            ]

    asyncio.run(main())


# Running


def test_a_run_that_starts_in_the_middle_draws_what_the_whole_run_draws(make_run, tmp_path):
    start.train(make_run("whole", debug_rollout_only=True), "toy")
    start.train(make_run("late", debug_rollout_only=True, start_rollout_id=2), "toy")
    assert not rollout_file(tmp_path / "late" / "samples", 1).exists()
    assert drawn(tmp_path / "late", 2) == drawn(tmp_path / "whole", 2)
    assert drawn(tmp_path / "whole", 2) != drawn(tmp_path / "whole", 1)


def test_what_is_in_flight_changes_no_sample(make_run, tmp_path):
    start.train(make_run("wide", debug_rollout_only=True, num_rollout=1), "toy")
    narrow = {"max_running_requests": 2, "max_concurrent_prompts": 1}
    start.train(make_run("narrow", debug_rollout_only=True, num_rollout=1, **narrow), "toy")
    assert drawn(tmp_path / "wide", 0) == drawn(tmp_path / "narrow", 0)


BREAK_SAVES = """
import shutil
from pathlib import Path

def reward(sample):
    saves = Path({saves!r})
    if saves.is_dir():
        shutil.rmtree(saves)
        saves.write_text("not a folder")
    return 1.0
"""


def test_a_save_that_fails_is_told_and_only_the_last_one_ends_the_run(make_run, tmp_path, capsys):
    saves, reward = tmp_path / "saves", tmp_path / "breaks.py"
    reward.write_text(BREAK_SAVES.format(saves=str(saves)))
    config = make_run("run", save=str(saves), save_interval=1, num_rollout=2, custom_rm_path=f"{reward}:reward")
    with pytest.raises(CheckpointError):
        start.train(config, "toy")
    output = "".join(capsys.readouterr())
    assert output.count("training goes on, the next save tries again") == 1
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["rollout_id"] for row in rows] == [0, 1]
    assert (tmp_path / "run" / "summary.json").is_file(), "what was measured is summed up all the same"


LOSE_FOLDER = """
import shutil
from pathlib import Path

calls = []

def reward(sample):
    calls.append(1)
    if len(calls) == {calls}:
        {act}
    return float(len(calls))
"""


@pytest.mark.parametrize(
    "act", ["shutil.rmtree({run!r})", "Path({run!r}).rename({run!r} + '2')"], ids=["removed", "moved"]
)
@pytest.mark.parametrize(("calls", "done"), [(7, 1), (12, 1)], ids=["while generating", "with the last sample"])
def test_a_run_whose_folder_is_lost_says_so_and_saves_what_it_learned(make_run, tmp_path, act, calls, done):
    run, saves, reward = tmp_path / "run", tmp_path / "saves", tmp_path / "loses.py"
    reward.write_text(LOSE_FOLDER.format(calls=calls, act=act.format(run=str(run))))
    config = make_run("run", save=str(saves), num_rollout=4, custom_rm_path=f"{reward}:reward")
    with pytest.raises(RunFolderLostError, match=r"run folder .*/run was removed or moved while the run went on"):
        start.train(config, "toy")
    assert (saves / "latest").read_text() == f"rollout_{done:06d}\n"
    assert not run.exists(), "nothing is written to a folder that somebody removed"


def test_metrics_that_are_lost_while_a_step_is_trained_end_the_run(make_run, tmp_path, monkeypatch):
    trained = Trainer.train

    def lose(*args, **kwargs):
        shutil.rmtree(tmp_path / "run")
        return trained(*args, **kwargs)

    monkeypatch.setattr(Trainer, "train", lose)
    with pytest.raises(RunFolderLostError, match=r"metrics\.jsonl was removed or replaced"):
        start.train(make_run("run", save=str(tmp_path / "saves"), num_rollout=4), "toy")
    assert (tmp_path / "saves" / "latest").read_text() == "rollout_000001\n"
    assert not (tmp_path / "run").exists()


def test_a_save_folder_that_can_not_be_written_is_refused_before_training(make_run, tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "odd" / "latest").mkdir(parents=True)
    for save in ("file", "file/saves", "odd"):
        with pytest.raises(TreadleError, match=r"(choose|give) another --save") as caught:
            start.train(make_run("run", save=str(tmp_path / save)), "toy")
        assert "\n" not in str(caught.value)
        assert not (tmp_path / "run").exists(), "a run that never began leaves nothing"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").write_text("mine")
    with pytest.raises(TreadleError, match="another --save"):
        start.train(make_run("run", save_interval=1), "toy")


@pytest.mark.parametrize("field", ["run_dir", "save", "load"])
def test_an_empty_name_is_not_the_current_folder(make_run, tmp_path, field):
    with pytest.raises(ConfigError, match=f"{field} = '' names no folder"):
        start.train(make_run("run", **{field: ""}), "toy")
    with pytest.raises(ConfigError, match=f"{field} = '' names no folder"):
        start.evaluate(make_run("run", eval_prompt_data=(f"a={tmp_path / 'toy.jsonl'}",), **{field: ""}), "toy")


def test_a_generation_config_that_transformers_refuses_is_saved_as_it_was(make_run, tiny_model_dir, tmp_path):
    model = shutil.copytree(tiny_model_dir, tmp_path / "model")
    given = {"temperature": 0.7, "top_p": 0.9, "eos_token_id": [0, 2]}
    (model / "generation_config.json").write_text(json.dumps(given))
    start.train(make_run("run", hf_checkpoint=str(model), save_interval=1, num_rollout=1), "toy")
    saved = tmp_path / "run" / "checkpoints" / "rollout_000001" / "model" / "generation_config.json"
    found = json.loads(saved.read_text())
    assert {name: found[name] for name in given} == given


def test_a_model_that_can_not_be_saved_is_refused_before_training(make_run, tmp_path, monkeypatch):
    def refuse(codec, folder):
        raise ValueError("this tokenizer can't be written\nat all")

    monkeypatch.setattr(Codec, "save", refuse)
    with pytest.raises(ModelError, match=r"could not be saved after training: this tokenizer can't be written$"):
        start.train(make_run("run", save_interval=1), "toy")
    assert not (tmp_path / "run" / "samples" / "rollout_000000.jsonl").exists()


def test_evaluation_needs_sets(make_run):
    with pytest.raises(ConfigError, match="--eval-prompt-data name=source"):
        start.evaluate(make_run("run"), "toy")


def test_saved_rollouts_that_are_not_there_are_named(make_run, tmp_path):
    saved = tmp_path / "saved"
    start.train(make_run("run", save_debug_rollout_data=str(saved), debug_rollout_only=True, num_rollout=2), "toy")
    again = make_run("again", debug_train_only=True, load_debug_rollout_data=str(saved), num_rollout=3)
    with pytest.raises(DataError, match=r"has no .*rollout_000002\.jsonl; lower --num-rollout"):
        start.train(again, "toy")


# Threads


def test_one_thread_computes(make_run, monkeypatch):
    """OpenMP makes a team for each thread that computes, and teams in each other's way halve the speed of all."""
    seen = {}

    def watch(owner, name):
        call = getattr(owner, name)

        def watched(*args, **kwargs):
            seen.setdefault(name, set()).add(threading.get_ident())
            return call(*args, **kwargs)

        monkeypatch.setattr(owner, name, watched)

    watch(session, "compute_dtype")
    watch(model_files, "check_models")
    watch(build, "load_policy")
    watch(build, "build_trainer")
    watch(ModelRunner, "__init__")
    watch(ModelRunner, "run")
    watch(Trainer, "train")
    watch(Trainer, "state")
    start.train(make_run("threads", save_interval=2, dtype="auto"), "toy")
    # Threads that ended: their idents may be in use again.
    before = seen.pop("compute_dtype") | seen.pop("check_models")
    assert threading.get_ident() not in before
    assert set(seen) == {"load_policy", "build_trainer", "__init__", "run", "train", "state"}
    assert len(set.union(*seen.values())) == 1
    assert threading.get_ident() not in seen["run"]  # which belongs to the event loop
