import pytest
import torch

from treadle.errors import EngineError
from treadle.weights import Offer, SentWeights, ServedWeights, WeightSpec
from treadle.weights.cuda_ipc import CudaIpcReceiver, CudaIpcSender


def test_weights_on_the_cpu_have_no_gpu_handle():
    with pytest.raises(EngineError, match=r"'a' is not on a GPU.*shm"):
        CudaIpcSender(SentWeights({"a": torch.ones(3)})).offer(1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to open handles with")
def test_an_engine_without_that_gpu_says_so_and_keeps_its_weights():
    served = ServedWeights({"a": torch.zeros(3)}, lambda version: None)
    handle = {"handle": [0, {"b": "AAAA"}, 12, 0, {"b": "AAAA"}, 0, {"b": "AAAA"}, True], "offset": 0}
    where = {"gpus": {"0": "GPU-x"}, "handles": {"a": handle}}
    offer = Offer("cuda_ipc", 1, {"a": WeightSpec((3,), torch.float32)}, where)
    with pytest.raises(EngineError, match="GPU GPU-x, which this engine does not see; use broadcast"):
        CudaIpcReceiver(served).receive(offer)
    assert (served.version, served.torn) == (None, None)
    with pytest.raises(EngineError, match="can't be opened"):
        CudaIpcReceiver(served).receive(Offer("cuda_ipc", 1, offer.specs, {"gpus": {}, "handles": {}}))
