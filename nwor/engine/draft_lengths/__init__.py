"""How many draft tokens each step gets: measured costs, estimated acceptance, the choice, bounds of requests."""
