"""Handwritten digits of scikit-learn: 1,797 images of 8×8 pixels, 10 classes, no download."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from experiments import models
from experiments.partition import iid
from experiments.tasks.classification import Classification


def load(split_seed: int = 0) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """(inputs (1437, 64) in [0, 1], targets), and the same of the 360 test samples: a stratified split of 80 to 20.

    The split has a seed of its own, so that runs of all seeds are tested on the same samples.

    >>> (x, y), (test, _) = load()
    >>> x.shape, len(test), float(x.max()), y.bincount().tolist()
    (torch.Size([1437, 64]), 360, 1.0, [142, 146, 142, 146, 145, 145, 145, 143, 139, 144])
    """
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    data: Any = load_digits()
    x, test_x, y, test_y = train_test_split(
        data.data / 16, data.target, test_size=0.2, random_state=split_seed, stratify=data.target
    )
    return (torch.from_numpy(x), torch.from_numpy(y)), (torch.from_numpy(test_x), torch.from_numpy(test_y))


def digits(
    n: int,
    partition: Callable[..., Sequence[Tensor]] = iid,
    model: Callable[..., nn.Module] = models.mlp,
    batch: int | None = 32,
    seed: int = 0,
    split_seed: int = 0,
    dtype: str = "float32",
    device: str = "cpu",
) -> Classification:
    """The task: ``model(inputs=64, classes=10)``, by default the MLP 64-128-10 of 9,610 parameters."""
    train, test = load(split_seed)
    make = partial(model, inputs=64, classes=10)
    return Classification(make, train, test, partition, n, batch, seed, dtype=dtype, device=device)
