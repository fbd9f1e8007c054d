"""The sweep, by joblib."""

from joblib import Parallel, delayed

from benchmarks.sweeps.digits import CONFIGS, show, train

show(Parallel(n_jobs=-1)(delayed(train)(config) for config in CONFIGS))
