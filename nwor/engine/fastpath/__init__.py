"""Short ways through vLLM's host code and kernels, each where vLLM's own code is the known one."""
