"""What a run writes and shows: run folder, metric sinks, samples, live display, curve and summary."""
