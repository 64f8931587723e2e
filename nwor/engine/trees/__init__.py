"""Windows that are trees of draft tokens, on model runner V2 (docs/trees.md)."""
