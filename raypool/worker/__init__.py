"""The processes (or threads) that run tasks: everything around a call of a user's function."""
