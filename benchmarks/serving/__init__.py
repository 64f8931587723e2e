"""Real servers under HTTP load: stock ``vllm serve`` and ``nwor-server`` in turns on one device."""
