"""What this machine has: processor cores and GPUs. Knows nothing of pools."""
