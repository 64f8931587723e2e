"""vLLM's attention backends, extended, and what ties their layers to the window batch."""
