"""Models: load and write them, packed attention, and the forward pass in two halves."""
