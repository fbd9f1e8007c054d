"""The sweep, by Ray's ActorPool."""

import os

import ray
from ray.util import ActorPool

from benchmarks.sweeps.digits import CONFIGS, show, train


@ray.remote
class Trainer:
    """An actor that trains."""

    def train(self, config):
        """Train one network."""
        return train(config)


ray.init(log_to_driver=False)
pool = ActorPool([Trainer.remote() for _ in range(os.cpu_count())])
show(pool.map(lambda actor, config: actor.train.remote(config), CONFIGS))
