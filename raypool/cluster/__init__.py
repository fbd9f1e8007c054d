"""Clusters: their files, written and checked before money is spent; jobs; what a cloud says of its machines."""
