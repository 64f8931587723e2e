"""What the HTTP front costs: nwor-server against stock ``vllm serve``."""
