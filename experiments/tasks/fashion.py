"""Fashion-MNIST (Xiao et al. 2017, arXiv 1708.07747): 60,000 + 10,000 grey images of 28×28, 10 classes, in IDX files."""

import gzip
import math
import os
import struct
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from experiments import models
from experiments.partition import iid
from experiments.tasks.classification import Classification

DEBIAN = Path("/usr/share/datasets/fashion-mnist")


def read_idx(path: Path) -> Tensor:
    """A uint8 tensor from an IDX file, plain or gzipped: two zero bytes, 0x08 for uint8, the number of dimensions, each
    of them as a big-endian uint32, then the data. Raises ValueError for anything else and for a file of another length
    than its header says."""
    data = path.read_bytes()
    if path.suffix == ".gz":
        try:
            data = gzip.decompress(data)
        except (EOFError, OSError, zlib.error) as error:
            raise ValueError(f"{path} is no whole gzip file ({error}). Download it again.") from error
    if len(data) < 4 or data[:3] != b"\0\0\x08" or len(data) < 4 + 4 * data[3]:
        raise ValueError(
            f"{path} begins with {data[:4].hex()}: an IDX file of bytes begins with 000008. Download it again."
        )
    shape = struct.unpack_from(f">{data[3]}I", data, 4)
    begin = 4 + 4 * data[3]
    if len(data) - begin != math.prod(shape):
        raise ValueError(
            f"{path} holds {len(data) - begin} bytes where its header {shape} asks for {math.prod(shape)}. Download "
            "it again."
        )
    return torch.from_numpy(np.frombuffer(data, np.uint8, offset=begin).reshape(shape).copy())


def folder() -> Path:
    """Where the files are: $GOSSIP_DATA/fashion-mnist or $GOSSIP_DATA itself, then the Debian package.
    FileNotFoundError names the remedy."""
    places = [DEBIAN]
    if given := os.environ.get("GOSSIP_DATA"):
        places = [Path(given).expanduser() / "fashion-mnist", Path(given).expanduser(), *places]
    for place in places:
        if any(place.glob("train-images-idx3-ubyte*")):
            return place
    raise FileNotFoundError(
        f"Fashion-MNIST is in none of {', '.join(map(str, places))}. Run `make data` (as root: `apt-get install "
        "dataset-fashion-mnist`), or set GOSSIP_DATA to a folder that holds train-images-idx3-ubyte.gz and its three "
        "companions."
    )


def load() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """(inputs (60000, 784) uint8, targets (60000,)), and the same of the 10,000 test samples."""
    place = folder()

    def read(name: str) -> Tensor:
        plain = place / name
        return read_idx(plain if plain.exists() else place / f"{name}.gz")

    def both(name: str) -> tuple[Tensor, Tensor]:
        return read(f"{name}-images-idx3-ubyte").flatten(1), read(f"{name}-labels-idx1-ubyte").long()

    return both("train"), both("t10k")


def fashion(
    n: int,
    partition: Callable[..., Sequence[Tensor]] = iid,
    model: Callable[..., nn.Module] = models.mlp,
    batch: int | None = 32,
    seed: int = 0,
    test_samples: int | None = None,
    dtype: str = "float32",
    device: str = "cpu",
) -> Classification:
    """The task: ``model(inputs=784, classes=10)``, pixels in [0, 1]. Images stay uint8 (47 MB a process) until they are
    in a batch.

    ``test_samples`` tests on the first so many of the 10,000 test samples only (they are in random order): a CNN on one
    core needs 1.6 s for all of them, for each worker.
    """
    train, test = load()
    test = (test[0][:test_samples], test[1][:test_samples])
    make = partial(model, inputs=784, classes=10)
    return Classification(make, train, test, partition, n, batch, seed, scale=1 / 255, dtype=dtype, device=device)
