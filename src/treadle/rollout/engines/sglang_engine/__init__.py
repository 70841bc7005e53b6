"""SGLang as a rollout engine: a server of its own, reached over HTTP; SGLang itself is never imported here."""
