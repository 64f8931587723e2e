"""What is added to vLLM's OpenAI layer: errors, limits, admission, and figures in answers."""
