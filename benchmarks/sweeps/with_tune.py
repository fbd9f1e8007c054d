"""The sweep, by Ray Tune."""

from ray import tune

from benchmarks.sweeps.digits import CONFIGS, show, train


def trainable(config):
    """Train one network."""
    tune.report({"right": train(config["of"])})


tuner = tune.Tuner(
    trainable, param_space={"of": tune.grid_search(CONFIGS)}, run_config=tune.RunConfig(verbose=0)
)
results = {result.config["of"]["seed"]: result.metrics["right"] for result in tuner.fit()}
show(results[config["seed"]] for config in CONFIGS)
