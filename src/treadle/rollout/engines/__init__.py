"""Rollout engines: the seam in `base`, and one folder or file for each engine."""
