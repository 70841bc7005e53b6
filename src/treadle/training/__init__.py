"""Training: samples to batches, packed micro-batches, losses, and new weights."""
