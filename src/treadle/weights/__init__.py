"""Weight transports: both ends of each in one file."""

from treadle.weights.base import WeightSpec, WeightTransport, check_specs
from treadle.weights.inproc import InprocTransport

__all__ = ["InprocTransport", "WeightSpec", "WeightTransport", "check_specs"]
