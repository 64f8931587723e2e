"""Faults of vLLM's mended, with and without NWOR: LoRA adapters, seeded requests."""
