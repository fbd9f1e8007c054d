"""Carries out what the scheduler decides: the driver, its tasks and loops, durable runs."""
