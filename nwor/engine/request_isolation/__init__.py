"""Requests that fail alone: found by the workers, ended and explained by the scheduler."""
