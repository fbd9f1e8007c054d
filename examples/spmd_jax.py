"""JAX in a pool: one JAX over all workers, set up with `ctx.jax_options()`.

Each rank provides its share of the rows of an array. JAX treats these as one array, spread over all
ranks, and divides computations under `jax.jit` among them. Run it with

    pip install jax
    python examples/spmd_jax.py

on two workers: CPUs here, and GPUs, unchanged, if there are two.

JAX looks for its devices once in a process. So that the next call can connect again, `disconnect`
lets JAX forget them, and with them its arrays: return NumPy arrays, as `train` does. It waits for
the other ranks, so it does not stand in a `finally`: a rank that fails has to end at once. After
that the JAX of the others is of no use, or ends its process: open another pool.
"""

import numpy as np

from raypool import parpool

WEIGHTS = np.array([[1.0], [-2.0], [3.0], [0.5]])


def make_data():
    inputs = np.random.default_rng(0).normal(size=(64, len(WEIGHTS)))
    return inputs, inputs @ WEIGHTS


def disconnect():
    """Let JAX leave the other ranks, and be as it was before `jax.distributed.initialize`."""
    import jax
    from jax.extend import backend

    jax.distributed.shutdown()
    jax.clear_caches()
    backend.clear_backends()


def train(ctx, steps):
    """Train on every rank of an spmd call; return how many devices JAX saw, the losses, and the
    weights at the end.
    """
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    jax.config.update("jax_enable_x64", True)
    jax.distributed.initialize(**ctx.jax_options())  # before anything is computed with JAX
    mesh = Mesh(np.array(jax.devices()), ("ranks",))
    by_rows = NamedSharding(mesh, PartitionSpec("ranks"))
    share = np.split(np.arange(64), ctx.world_size)[ctx.rank]
    inputs, targets = (
        jax.make_array_from_process_local_data(by_rows, part[share]) for part in make_data()
    )

    @jax.jit
    def step(weights, inputs, targets):
        loss, gradient = jax.value_and_grad(
            lambda weights: ((inputs @ weights - targets) ** 2).mean()
        )(weights)
        return weights - 0.1 * gradient, loss

    weights, losses = np.zeros(WEIGHTS.shape), []
    for _ in range(steps):
        weights, loss = step(weights, inputs, targets)
        losses.append(float(loss))
    num_devices, weights = jax.device_count(), np.asarray(weights)
    disconnect()
    return num_devices, losses, weights


def train_alone(steps):
    """Do the same in one process, without JAX."""
    inputs, targets = make_data()
    weights, losses = np.zeros(WEIGHTS.shape), []
    for _ in range(steps):
        errors = inputs @ weights - targets
        losses.append(float((errors**2).mean()))
        weights = weights - 0.1 * 2 * inputs.T @ errors / len(errors)
    return losses, weights


def main(steps=40):
    with parpool(2) as pool:
        num_devices, losses, weights = pool.spmd(train, steps)[0]
    losses_alone, weights_alone = train_alone(steps)
    print(f"JAX saw {num_devices} devices.")
    for step in range(0, steps, 10):
        print(
            f"step {step:2}: loss {losses[step]:.6f} on two ranks, {losses_alone[step]:.6f} in one"
            " process"
        )
    print(
        f"After {steps} steps the weights differ by {np.abs(weights - weights_alone).max():.0e} at"
        " most."
    )


if __name__ == "__main__":
    main()
