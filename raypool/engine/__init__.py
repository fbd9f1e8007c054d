"""Makes happen what the core decides: one driver thread, and the backends that run user code."""
