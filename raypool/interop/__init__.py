"""A pool in the shape of other libraries' pools, for code that is written for them."""
