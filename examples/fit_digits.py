"""A convolutional network that reads digits, trained on all workers of a pool without writing a
loop.

`pool.fit` takes a network, data, a loss and options, as MATLAB's trainnet does. Each mini-batch is
split across the workers, and the result is that of a single worker. Then all workers read the test
images. Run it with

    python examples/fit_digits.py

on two workers: CPUs here, and GPUs, unchanged, if there are two. It needs scikit-learn.
"""

import pandas as pd
import torch
from sklearn.datasets import load_digits

from raypool import TrainingOptions, parpool


def load_data():
    """Return the images and digits to train on, and those to test with: every sixth."""
    images, digits = (torch.as_tensor(part) for part in load_digits(return_X_y=True))
    images, is_test = images.float().reshape(-1, 1, 8, 8) / 16, torch.arange(len(images)) % 6 == 0
    return (images[~is_test], digits[~is_test]), (images[is_test], digits[is_test])


def make_net():
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 16, kernel_size=3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Conv2d(16, 32, kernel_size=3, padding=1),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(32 * 4 * 4, 10),
    )


def main(max_epochs=20):
    train_set, test_set = load_data()
    options = TrainingOptions(
        optimizer="sgdm",
        learning_rate=0.05,
        schedule="cosine",
        mini_batch_size=64,  # on all workers together
        max_epochs=max_epochs,
        validation_data=test_set,
        patience=5,
    )
    with parpool(2) as pool:
        result = pool.fit(make_net, train_set, torch.nn.functional.cross_entropy, options).result()
        print(result.metrics_frame[["epoch", "loss", "validation_loss"]])

        images, digits = test_set
        read = pool.classify(result.model, images)
    print(pd.crosstab(digits.numpy(), read, rownames=["is"], colnames=["read as"]))
    print(f"{(read == digits.numpy()).mean():.1%} of the images were read right.")


if __name__ == "__main__":
    main()
