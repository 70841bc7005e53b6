"""vLLM as a rollout engine: a server of its own, reached over HTTP; vLLM itself is never imported here."""
