"""Ten trainings, watched: hopeless ones are stopped, and the first good one ends the sweep."""

import time
import traceback

import torch
from sklearn.datasets import load_digits

from raypool import current_task, fetch_next, parpool, report


def train(width, lr):
    torch.set_num_threads(1)  # the other cores are for the other workers
    torch.manual_seed(0)
    device = current_task().device
    images, digits = (torch.as_tensor(part, device=device) for part in load_digits(return_X_y=True))
    images, is_test = images.float() / 16, torch.arange(len(images), device=images.device) % 6 == 0
    layers = torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, 10)
    net = torch.nn.Sequential(*layers).to(images)
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    for epoch in range(300):
        for batch in (~is_test).nonzero()[:, 0].split(50):
            loss = torch.nn.functional.cross_entropy(net(images[batch]), digits[batch])
            optimizer.zero_grad(), loss.backward(), optimizer.step()
        right = (net(images[is_test]).argmax(dim=1) == digits[is_test]).float().mean().item()
        report(epoch=epoch, loss=loss.item(), right=right)
        print(f"epoch {epoch}: loss {loss.item():.3f}, {right:.1%} right")
        if epoch >= 2 and loss > 10:
            raise ArithmeticError("the training diverges")
        if current_task().should_stop:
            break
    return right


configs = [(64, 1e-5), (64, 100.0)]
configs += [(width, lr) for lr in (0.003, 0.01, 0.03, 0.1) for width in (16, 256)]

with parpool() as pool:
    jobs = [
        pool.options(name=f"width {width}, lr {lr:g}").parfeval(train, width, lr)
        for width, lr in configs
    ]
    best = None
    while best is None:
        for job in pool.queue.running:
            seen = job.metrics  # a table, live
            if len(seen) >= 20 and seen.right.iloc[-1] < 0.2 and not job.stop_requested:
                job.request_stop()
                print(f"{job.name} learns nothing and is stopped:")
                print(seen[["epoch", "loss", "right"]].tail(2), end="\n\n")
        try:
            number, right = fetch_next(jobs, timeout_s=0.1)  # whichever ends first
        except TimeoutError:
            continue
        except ArithmeticError as error:
            print("".join(traceback.format_exception_only(error)))
            continue
        print(f"{jobs[number].name}: {right:.1%}")
        if right > 0.975:
            best = jobs[number]
    pool.cancel_all()  # running jobs too
    cancelled_at = time.perf_counter()
    pool.parfeval_on_all(abs, 1).result()
    took_ms = 1000 * (time.perf_counter() - cancelled_at)
    print(f"All workers are free again after {took_ms:.0f} ms: {pool}\n")
    print(f"Best: {best.name}, after {best.running_duration_s:.1f} s on worker {best.worker}")
    for job in jobs:
        print(f"{job.name:20} {job.state:10}", *job.diary.splitlines()[-1:])
