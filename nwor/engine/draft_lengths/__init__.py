"""How many draft tokens each step gets: measured costs, estimated acceptance, choice, bounds of requests."""
