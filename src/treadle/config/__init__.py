"""The configuration of a run: frozen sections, where their values come from, and the rules between them."""

from treadle.config.batch_sizes import BatchArithmetic, RunLength, batch_arithmetic, num_rollout, run_length
from treadle.config.checks import check_config
from treadle.config.eval_sets import parse_eval_sets
from treadle.config.load import load_config
from treadle.config.recipe import to_toml
from treadle.config.secrets import recorded
from treadle.config.sections import (
    AlgorithmSection,
    CheckpointSection,
    ClusterSection,
    Config,
    CriticSection,
    DataSection,
    DebugSection,
    EvalOverride,
    EvalSection,
    ModelSection,
    ObserveSection,
    OptimSection,
    ParallelSection,
    RewardSection,
    RolloutSection,
    Section,
    TrainSection,
)

__all__ = [
    "AlgorithmSection",
    "BatchArithmetic",
    "CheckpointSection",
    "ClusterSection",
    "Config",
    "CriticSection",
    "DataSection",
    "DebugSection",
    "EvalOverride",
    "EvalSection",
    "ModelSection",
    "ObserveSection",
    "OptimSection",
    "ParallelSection",
    "RewardSection",
    "RolloutSection",
    "RunLength",
    "Section",
    "TrainSection",
    "batch_arithmetic",
    "check_config",
    "load_config",
    "num_rollout",
    "parse_eval_sets",
    "recorded",
    "run_length",
    "to_toml",
]
