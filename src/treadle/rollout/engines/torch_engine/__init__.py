"""The embedded engine: continuous batching on the trainer's own module, on CPU or GPU."""
