"""vLLM's model runners V1 and V2 with windows, each on a CPU and on CUDA."""
