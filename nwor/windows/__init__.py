"""A window batch from begin to commit, and the KV layers that it is staged for. Torch and the ops only."""
