"""The training, by raypool."""

from ray.train.torch import prepare_data_loader, prepare_model

from benchmarks.launchers.training import RANKS, loader, network, optimizer_of, show, train
from raypool import parpool


def loop():
    """Train on one rank."""
    model = prepare_model(network())
    return train(model, optimizer_of(model), prepare_data_loader(loader()))


show(parpool(RANKS).train(loop).result().values[0])
