"""Weight transports: both ends of each in one file."""

from treadle.weights.base import (
    Offer,
    WeightReceiver,
    WeightSender,
    WeightSpec,
    WeightTransport,
    check_specs,
)
from treadle.weights.ends import SentWeights, ServedWeights
from treadle.weights.inproc import InprocTransport

__all__ = [
    "InprocTransport",
    "Offer",
    "SentWeights",
    "ServedWeights",
    "WeightReceiver",
    "WeightSender",
    "WeightSpec",
    "WeightTransport",
    "check_specs",
]
