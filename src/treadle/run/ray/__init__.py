"""The cluster runtime: everything that knows Ray."""
