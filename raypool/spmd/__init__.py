"""Every worker at once: one function on all ranks, with collectives, and values that stay where they are."""
