"""NWOR inside vLLM: the only package that imports it."""
