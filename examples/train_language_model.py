"""A small transformer that learns to write as scikit-learn's documentation does, with its
parameters spread over all workers.

The text, 15,000 characters, are the descriptions of the data sets that scikit-learn ships. With
strategy="fsdp" each worker holds only its part of every parameter, gradient and state of the
optimizer: for models that are too large for one GPU. Run it with

    python examples/train_language_model.py

on two workers: CPUs here, and GPUs, unchanged, if there are two. It needs scikit-learn.
"""

import torch
from sklearn import datasets
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.data import Dataset

from raypool import TrainingOptions, parpool

CONTEXT = 64  # characters that the model sees
WIDTH, HEADS, LAYERS = 64, 4, 2


def load_text():
    names = ("breast_cancer", "diabetes", "digits", "iris", "linnerud", "wine")
    return "\n".join(getattr(datasets, f"load_{name}")().DESCR for name in names)


class Windows(Dataset):
    """Pieces of a text, each with the characters that follow each of its own, as numbers."""

    def __init__(self, text, stride=16):
        self.alphabet = sorted(set(text))
        self.codes = torch.tensor([self.alphabet.index(character) for character in text])
        self.starts = range(0, len(text) - CONTEXT, stride)

    def __len__(self):
        return len(self.starts)

    def __getitem__(self, number):
        piece = self.codes[self.starts[number] :][: CONTEXT + 1]
        return piece[:-1], piece[1:]


class Block(torch.nn.Module):
    """Attention to what stands before, then a small network for each character."""

    def __init__(self):
        super().__init__()
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(WIDTH) for _ in range(2))
        self.queries_keys_values = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.mix = torch.nn.Linear(WIDTH, WIDTH)
        self.think = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.GELU(), torch.nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x):  # noqa: D102
        heads = self.queries_keys_values(self.norms[0](x)).unflatten(-1, (3, HEADS, -1))
        seen = scaled_dot_product_attention(*heads.permute(2, 0, 3, 1, 4), is_causal=True)
        x = x + self.mix(seen.transpose(1, 2).flatten(2))
        return x + self.think(self.norms[1](x))


class LanguageModel(torch.nn.Module):
    """What it takes each next character for, as one number for each of the alphabet."""

    def __init__(self, num_characters):
        super().__init__()
        self.characters = torch.nn.Embedding(num_characters, WIDTH)
        self.places = torch.nn.Embedding(CONTEXT, WIDTH)
        self.blocks = torch.nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.guess = torch.nn.Linear(WIDTH, num_characters)

    def forward(self, codes):  # noqa: D102
        places = torch.arange(codes.shape[1], device=codes.device)
        return self.guess(self.norm(self.blocks(self.characters(codes) + self.places(places))))


def loss(guesses, following):
    """Return the mean over all characters of all pieces."""
    return cross_entropy(guesses.flatten(0, 1), following.flatten())


def write(model, codes, num_characters):
    """Let the model go on from some characters."""
    codes = list(codes)
    for _ in range(num_characters):
        with torch.no_grad():
            guesses = model(torch.tensor([codes[-CONTEXT:]]))[0, -1]
        codes.append(torch.multinomial((guesses / 0.5).softmax(dim=0), 1).item())
    return codes


def main(max_epochs=12):
    torch.manual_seed(0)
    windows = Windows(load_text())
    options = TrainingOptions(
        strategy="fsdp",
        optimizer="adam",
        learning_rate=3e-3,
        clip_gradient_norm=1.0,
        mini_batch_size=32,
        max_epochs=max_epochs,
    )
    with parpool(2) as pool:
        result = pool.fit(
            lambda: LanguageModel(len(windows.alphabet)), windows, loss, options
        ).result()
    print(result.metrics_frame[["epoch", "loss"]])
    print(
        "".join(
            windows.alphabet[code] for code in write(result.model, windows[0][0].tolist()[:1], 300)
        )
    )


if __name__ == "__main__":
    main()
