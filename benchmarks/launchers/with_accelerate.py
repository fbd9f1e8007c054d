"""The training, by Accelerate."""

from accelerate import Accelerator

from benchmarks.launchers.training import loader, network, optimizer_of, show, train

accelerator = Accelerator(cpu=True)
model = network()
model, optimizer, batches = accelerator.prepare(model, optimizer_of(model), loader())
outcome = train(model, optimizer, batches, accelerator.backward)
if accelerator.is_main_process:
    show(outcome)
accelerator.end_training()
