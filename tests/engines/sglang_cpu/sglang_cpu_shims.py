"""Run at the start of SGLang's interpreter, by a .pth file beside it: two operators that torchvision's wheel for CUDA lacks.

torchvision looks for them while it is imported; text models never call them. Nothing is imported before somebody
wants torchvision.
"""

import sys


class _BeforeTorchvision:
    """Finds nothing itself; declares the operators the first time torchvision is looked for."""

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            library = torch.library.Library("torchvision", "FRAGMENT")
            for operator in ("nms", "qnms"):
                library.define(operator + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            sys.sglang_cpu_shims = library  # as long as the process lives


sys.meta_path.insert(0, _BeforeTorchvision())
