"""The exceptions Treadle raises for a user's mistake or a failed part.

Every message is one line that names the value and the remedy; the command line prints it and nothing else.
"""

from __future__ import annotations


def first_line(error: BaseException) -> str:
    """Return the first line of what an exception says, or its class if it says nothing.

    An error that asks for `trust_remote_code` is replaced: Treadle never runs code from a model's folder.
    """
    text = str(error)
    if "trust_remote_code" in text:
        return "it needs code from its own folder (auto_map), which Treadle never runs; use a model that transformers knows"
    return (text.strip().splitlines() or [type(error).__name__])[0]


class TreadleError(Exception):
    """Base of everything Treadle raises on purpose."""


class ConfigError(TreadleError, ValueError):
    """A recipe, a flag, or a combination of them is wrong."""


class DataError(TreadleError, ValueError):
    """A data set is missing, empty, malformed, or lacks a column."""


class ModelError(TreadleError, ValueError):
    """A model folder is unusable, or Treadle does not support the model's architecture."""


class CheckpointError(TreadleError, RuntimeError):
    """A checkpoint can't be written, is damaged, or belongs to another model."""


class RunFolderLostError(TreadleError, RuntimeError):
    """The folder of a run was removed or moved while the run went on."""


class EngineError(TreadleError, RuntimeError):
    """A rollout engine refused a request or failed."""


class EngineLostError(EngineError):
    """An engine's process died or stopped answering; its requests can be given to another."""


class WorkerLostError(TreadleError, RuntimeError):
    """A worker of a cluster died or stopped answering; the run can go on from its last checkpoint."""


class RewardError(TreadleError, RuntimeError):
    """A reward can't be built from its name or path."""


class FailedSamplesError(TreadleError, RuntimeError):
    """Too many samples failed in their reward or environment for the rest to be worth training on."""


class DeadlineError(TreadleError, TimeoutError):
    """A wait ran past its deadline; the message says what it waited for."""


class RankError(TreadleError, RuntimeError):
    """A train rank lost the connection to the other ranks."""
