"""Weight transports: both ends of each in one file."""

from treadle.weights.base import (
    Offer,
    WeightReceiver,
    WeightSender,
    WeightSpec,
    WeightTransport,
    check_specs,
)
from treadle.weights.in_process import InprocTransport
from treadle.weights.served_weights import SentWeights, ServedWeights

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
