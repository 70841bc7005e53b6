"""Fused operations for CPUs behind one interface: with none of it, the rest of Treadle reads and computes the same.

`fuse` replaces modules of a model that is trained, `inference_model` (inference.py) prepares one for an engine, and
`head_kernel` is the compiled output layer. `--no-fused-ops` switches the first two off. A C++ file is used if GCC is
installed, the processor has the instructions and the sizes fit; torch's operations are the fallback, and tests compare the two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treadle.models.cpu.head import CpuHead


def fuse(model: Any) -> int:
    """Replace norms, attention's projections and MLPs of a model by fused ones; return the number of known layers.

    Parameters keep their names, so checkpoints, sharding and engines stay the same.
    """
    from treadle.models.cpu.fused_layers import fuse_layers
    from treadle.models.cpu.norm import fuse_norms

    fuse_norms(model)
    return fuse_layers(model)


def head_kernel() -> CpuHead:
    """Return the compiled output layer, whose `fits` decides for each input."""
    from treadle.models.cpu.head import CpuHead

    return CpuHead()
