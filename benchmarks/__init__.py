"""How fast raypool is, as ratios against Ray, the standard library and itself; run with `python -m
benchmarks`.
"""
