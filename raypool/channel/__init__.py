"""Data and messages between the driver and the processes that run tasks."""
