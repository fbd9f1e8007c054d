"""All that travels between the driver and the processes that run tasks, and how it gets there."""
