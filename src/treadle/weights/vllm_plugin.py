"""The plugin that vLLM loads through its entry point `vllm.general_plugins`: it registers Treadle's weight transfer.

It runs in vLLM's processes, whose interpreter has torch, safetensors and xxhash but not Treadle's other dependencies.
"""

BACKEND = "treadle"
"""Value of `backend` in the server's `--weight-transfer-config`."""


def register() -> None:
    """Register the backend in this process of vLLM, which may load its plugins twice."""
    from contextlib import suppress

    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    with suppress(ValueError):  # registered already
        WeightTransferEngineFactory.register_engine(BACKEND, "treadle.weights.vllm_receiver", "TreadleWeights")
