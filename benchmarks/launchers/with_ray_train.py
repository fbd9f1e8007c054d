"""The training, by Ray Train."""

from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model

from benchmarks.launchers.training import RANKS, loader, network, optimizer_of, show, train


def loop():
    """Train on one rank."""
    model = prepare_model(network())
    return train(model, optimizer_of(model), prepare_data_loader(loader()))


show(TorchTrainer(loop, scaling_config=ScalingConfig(num_workers=RANKS)).fit().return_value)
