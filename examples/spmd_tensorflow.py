"""TensorFlow in a pool: its MultiWorkerMirroredStrategy on all workers, set up with
`ctx.tf_config()`.

Each rank trains on its share of the data, and TensorFlow averages the gradients by its own
collectives. Run it with

    pip install tensorflow
    python examples/spmd_tensorflow.py

on two workers: CPUs here, and GPUs, unchanged, if there are two.

A process can belong to only one TensorFlow cluster in its life; a strategy for another one would
wait forever. So `connect` makes it once, it stays on the workers as a Composite, and any number of
calls use it. If a worker is lost, open another pool. (Keras 3 cannot `fit` with this strategy, so
the loop is written out.)
"""

import numpy as np

from raypool import parpool

WEIGHTS = np.array([[1.0], [-2.0], [3.0], [0.5]])


def connect(ctx):
    """Make the strategy, on every rank of an spmd call."""
    ctx.tf_config()  # before TensorFlow looks at the environment
    import tensorflow as tf

    return tf.distribute.MultiWorkerMirroredStrategy()


def make_data():
    inputs = np.random.default_rng(0).normal(size=(64, len(WEIGHTS)))
    return inputs, inputs @ WEIGHTS


def train(ctx, strategy, steps):
    """Train on every rank of an spmd call; return the loss at each step, and the weights at the
    end.
    """
    import tensorflow as tf

    share = slice(ctx.rank, None, ctx.world_size)
    inputs, targets = (tf.constant(part[share]) for part in make_data())
    with strategy.scope():
        # TensorFlow keeps it the same on all ranks
        weights = tf.Variable(tf.zeros(WEIGHTS.shape, tf.float64))

    def replica(inputs, targets):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((inputs @ weights - targets) ** 2)
        gradient = tf.distribute.get_replica_context().all_reduce(
            "MEAN", tape.gradient(loss, weights)
        )
        weights.assign_sub(0.1 * gradient)
        return loss

    @tf.function
    def step():
        return strategy.reduce("MEAN", strategy.run(replica, (inputs, targets)), axis=None)

    losses = [float(step()) for _ in range(steps)]
    return losses, weights.numpy()


def train_alone(steps):
    """Do the same in one process, with all the data and without TensorFlow."""
    inputs, targets = make_data()
    weights = np.zeros(WEIGHTS.shape)
    losses = []
    for _ in range(steps):
        errors = inputs @ weights - targets
        losses.append(float((errors**2).mean()))
        weights = weights - 0.1 * 2 * inputs.T @ errors / len(errors)
    return losses, weights


def main(steps=40):
    with parpool(2) as pool:
        strategies = pool.spmd(connect)
        losses, weights = pool.spmd(train, strategies, steps)[0]
    losses_alone, weights_alone = train_alone(steps)
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
