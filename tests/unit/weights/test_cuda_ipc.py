import inspect
import io
import pickle

import pytest
import torch
from torch.multiprocessing import reductions

from treadle.errors import EngineError
from treadle.weights import Offer, SentWeights, ServedWeights, WeightSpec
from treadle.weights.cuda_ipc import CudaIpcReceiver, CudaIpcSender, pickled_handles


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


class Opened(pickle.Unpickler):
    """Unpickles without a GPU: calls that would open a handle become their arguments by name."""

    def __init__(self, data):
        super().__init__(io.BytesIO(data))
        self.found = set()

    def find_class(self, module, name):
        self.found.add((module, name))
        if name != "rebuild_cuda_tensor":
            return super().find_class(module, name)
        signature = inspect.signature(reductions.rebuild_cuda_tensor)
        return lambda *args: signature.bind(*args).arguments


def test_handles_are_pickled_as_torch_does_it_with_the_uuid_of_the_gpu():
    handle = {"handle": [3, {"b": "AQ=="}, 96, 512, {"b": "Ag=="}, 7, {"b": "Aw=="}, True], "offset": 4}
    where = {"gpus": {"3": "GPU-x"}, "handles": {"a": handle, "none": None}}
    specs = {"a": WeightSpec((2, 3), torch.bfloat16), "none": WeightSpec((0, 3), torch.float32)}
    opened = Opened(pickled_handles(Offer("cuda_ipc", 1, specs, where)))
    ((name, arguments), (none, empty)) = opened.load()
    assert (name, none, empty.shape, empty.dtype) == ("a", "none", (0, 3), torch.float32)
    assert arguments == {
        "tensor_cls": torch.Tensor,
        "tensor_size": (2, 3),
        "tensor_stride": (3, 1),
        "tensor_offset": 4,
        "storage_cls": torch.storage.TypedStorage,
        "dtype": torch.bfloat16,
        "requires_grad": False,
        "storage_device": "GPU-x",
        "storage_handle": b"\x01",
        "storage_size_bytes": 96,
        "storage_offset_bytes": 512,
        "ref_counter_handle": b"\x02",
        "ref_counter_offset": 7,
        "event_handle": b"\x03",
        "event_sync_required": True,
    }
    assert ("torch.multiprocessing.reductions", "rebuild_cuda_tensor") in opened.found
    assert {module.split(".")[0] for module, _ in opened.found} <= {"torch", "builtins"}


def test_an_offer_of_another_kind_has_no_handles_to_pickle():
    with pytest.raises(EngineError, match=r"version 2 is not offered by GPU handles: .*handles"):
        pickled_handles(Offer("shm", 2, {"a": WeightSpec((3,), torch.float32)}, {}))
