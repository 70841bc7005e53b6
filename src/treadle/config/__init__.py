"""The configuration of a run: frozen sections, where their values come from, and the rules between them."""

from treadle.config.batch_sizes import BatchArithmetic, RunLength, batch_arithmetic, run_length
from treadle.config.checks import check_config
from treadle.config.data_section import EvalOverride, parse_eval_sets
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
