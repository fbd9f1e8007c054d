"""The training, by Lightning Fabric."""

from lightning_fabric import Fabric

from benchmarks.launchers.training import RANKS, loader, network, optimizer_of, show, train

fabric = Fabric(accelerator="cpu", devices=RANKS)
fabric.launch()
model = network()
model, optimizer = fabric.setup(model, optimizer_of(model))
outcome = train(model, optimizer, fabric.setup_dataloaders(loader()), fabric.backward)
if fabric.is_global_zero:
    show(outcome)
