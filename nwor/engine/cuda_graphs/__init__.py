"""CUDA graphs of mode ``stage``, of whole mixed steps and of the drafter's first pass."""
