"""The live page of runs: their state, read from their folders, and the server that shows it."""
