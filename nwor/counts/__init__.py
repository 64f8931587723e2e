"""What windows write, counted: formulas, a step's record, and the histogram of windows. No vLLM, no torch."""
