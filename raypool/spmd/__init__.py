"""SPMD: one function on all workers together, with collectives, and values that stay there."""
