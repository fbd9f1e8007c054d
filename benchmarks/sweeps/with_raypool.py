"""The sweep, by raypool."""

from benchmarks.sweeps.digits import CONFIGS, show, train
from raypool import gcp

show(gcp().parfor(train, CONFIGS))
