"""Pools with the interfaces of other libraries: joblib and `multiprocessing`."""
