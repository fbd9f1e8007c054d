"""The scheduler decides what a pool does next, without Ray, torch, threads, clocks or files."""
