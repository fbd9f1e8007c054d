"""What happens next, decided without Ray, torch, threads, clocks or files."""
