"""Carries out what the scheduler decides: the driver's thread, its tasks and loops, durable
runs.
"""
