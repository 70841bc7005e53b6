"""Runs: the one loop, the local runtime it drives, and what starts them."""
