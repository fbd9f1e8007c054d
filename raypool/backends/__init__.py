"""Where user code runs: in this process, or on Ray. `base` says what the driver asks of either."""
