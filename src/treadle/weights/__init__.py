"""Weight transports: both ends of each in one file."""

from treadle.weights.base import (
    Offer,
    WeightReceiver,
    WeightSender,
    WeightSpec,
    check_specs,
)
from treadle.weights.publisher import Publisher
from treadle.weights.served_weights import SentWeights, ServedWeights
from treadle.weights.transport import Transport, TransportPlan, choose_transport, find_transport, open_sender

__all__ = [
    "Offer",
    "Publisher",
    "SentWeights",
    "ServedWeights",
    "Transport",
    "TransportPlan",
    "WeightReceiver",
    "WeightSender",
    "WeightSpec",
    "check_specs",
    "choose_transport",
    "find_transport",
    "open_sender",
]
