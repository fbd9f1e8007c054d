"""Clusters: files for them, written and checked; launching and connecting; jobs; notices of
preemption.
"""
