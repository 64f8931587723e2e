"""How figures travel with a step's messages, and the Prometheus metrics made of them."""
