"""Backends, which run user code: in this process (`local`) or on Ray. `base` is their protocol."""
