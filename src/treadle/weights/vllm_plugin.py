"""What vLLM loads by the entry point `vllm.general_plugins`: it makes Treadle's weight transfer known by its name.

It runs inside vLLM's processes, whose interpreter has torch, safetensors and xxhash, and none of Treadle's other needs.
"""

BACKEND = "treadle"
"""Value of `backend` in the server's `--weight-transfer-config`."""


def register() -> None:
    """Tell vLLM of the backend; it loads plugins in each of its processes, and may do so twice."""
    from contextlib import suppress

    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    with suppress(ValueError):  # registered already
        WeightTransferEngineFactory.register_engine(BACKEND, "treadle.weights.vllm_receiver", "TreadleWeights")
