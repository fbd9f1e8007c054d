"""The training, by torchrun."""

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.launchers.training import loader, network, optimizer_of, show, train

dist.init_process_group("gloo")
data, size = loader().dataset, loader().batch_size
model = DistributedDataParallel(network())
outcome = train(
    model,
    optimizer_of(model),
    DataLoader(data, size, sampler=DistributedSampler(data, shuffle=False)),
)
if dist.get_rank() == 0:
    show(outcome)
dist.destroy_process_group()
