"""Several processes that serve HTTP: how many, one of them, and their supervisor."""
