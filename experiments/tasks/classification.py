"""Classification of arrays that are split over the workers: model, loss, partition and batches, all pure functions."""

import copy
from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn import functional

import gossip
from experiments.models import seeded
from experiments.partition import Partition
from experiments.tasks.batches import BLANK, Batches

Loss = Callable[[Tensor, Tensor], Tensor]


class Classification:
    """F(x) = (1/n) Σᵢ Fᵢ(x), Fᵢ the mean loss over worker i's samples; the test set is common to all.

    Args:
        model: an `nn.Module` or a function of nothing that makes one; called with the seed, so that all processes build
            the same.
        train, test: (inputs (N, …), targets (N,)). Inputs of another dtype (uint8 images) are converted a batch at a
            time.
        partition: (labels, n, seed=…) -> n index tensors, such as ``functools.partial(dirichlet, alpha=0.1)``.
        n: workers.
        batch: samples a step, see `Batches`. None is the full batch: each sample of the worker exactly once in every
            step. Workers with fewer samples than the largest are filled up with targets of −100, which `cross_entropy`
            does not count.
        seed: of the partition, the initial parameters and the order of samples.
        loss: (outputs, targets) -> scalar mean.
        scale: factor of the inputs once converted, for example 1/255.
        dtype: "float32" or "float64". The initial parameters of both agree to float32.

    Raises ValueError for a partition with empty workers, or with another number of workers than n.

    >>> from experiments.models import logreg
    >>> from experiments.partition import iid
    >>> x, y = torch.rand(60, 4), torch.arange(60) % 3
    >>> task = Classification(lambda: logreg(4, 3), (x, y), (x, y), iid, n=5, batch=4)
    >>> inputs, targets = task.batch(torch.arange(5), step=7)
    >>> inputs.shape, targets.shape, task.initial().shape
    (torch.Size([5, 4, 4]), torch.Size([5, 4]), torch.Size([15]))
    """

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        train: tuple[Tensor, Tensor],
        test: tuple[Tensor, Tensor],
        partition: Callable[..., Sequence[Tensor]],
        n: int,
        batch: int | None = 32,
        seed: int = 0,
        loss: Loss = functional.cross_entropy,
        scale: float = 1.0,
        dtype: str = "float32",
        device: str = "cpu",
    ) -> None:
        for name, (inputs, targets) in (("train", train), ("test", test)):
            if len(inputs) != len(targets) or not len(targets):
                raise ValueError(
                    f"{name} has {len(inputs)} inputs and {len(targets)} targets: a task needs at least one sample, and one "
                    "target for each."
                )
        self.n, self.scale, self.loss = n, scale, loss
        self.dtype, self.device = getattr(torch, dtype), torch.device(device)
        module = copy.deepcopy(model) if isinstance(model, nn.Module) else seeded(seed, model)
        module = module.to(self.device, self.dtype)
        self.layout = gossip.Layout.of(module)
        self.oracle = gossip.Oracle(module, loss)
        self._initial = self.layout.flatten(module).detach().clone()

        # integers of any width index classes, and −100 is none of uint8
        train, test = ((x, y if y.is_floating_point() else y.long()) for x, y in (train, test))
        self.inputs, self.targets = (t.to(self.device) for t in train)
        self.test_inputs, self.test_targets = (t.to(self.device) for t in test)
        if scale == 1 and self.inputs.is_floating_point():
            self.inputs, self.test_inputs = self.inputs.to(self.dtype), self.test_inputs.to(self.dtype)
        parts = partition(train[1], n, seed=seed)
        self.partition = parts if isinstance(parts, Partition) else Partition(tuple(parts), train[1])
        if len(self.partition) != n:
            raise ValueError(
                f"the partition has {len(self.partition)} workers and n = {n}: they must agree. Give both the same n."
            )
        self.batches = Batches(self.partition.parts, batch, seed)
        self.size = int(self.partition.sizes.sum())
        self.batch_size = batch if batch is not None else self.size / n
        self._seed = seed
        self._buffers: dict[str, Tensor] = {}

    def report(self) -> str:
        about = f"{len(self.test_targets)} test samples, common to all; {self._initial.numel()} parameters"
        return f"{self.partition.report()}\n{about}"

    def initial(self) -> Tensor:
        return self._initial.clone()

    def batch(self, workers: Tensor, step: int | Tensor) -> tuple[Tensor, Tensor]:
        """(m, b, …) inputs and (m, b) targets of each worker's step, valid until the next call."""
        index = self.batches(workers.cpu(), step.cpu() if isinstance(step, Tensor) else step)
        blank = index < 0 if self.batches.batch is None else None
        flat = (index if blank is None else index.clamp(min=0)).reshape(-1).to(self.device)
        raw = torch.index_select(self.inputs, 0, flat, out=self._buffer("raw", len(flat), self.inputs))
        targets = torch.index_select(self.targets, 0, flat, out=self._buffer("targets", len(flat), self.targets))
        inputs = self._converted(raw)
        targets = targets.view(index.shape)
        if blank is not None:
            targets.masked_fill_(blank.to(self.device), BLANK)
        return inputs.view(*index.shape, *inputs.shape[1:]), targets

    def gradient(self, x: Tensor, workers: Tensor, step: int | Tensor) -> tuple[Tensor, Tensor]:
        keys = gossip.rng.key(self._seed, "dropout", workers, step) if self.oracle.draws else None
        return self.oracle(x, *self.batch(workers, step), keys)

    @torch.no_grad()
    def evaluate(self, x: Tensor) -> dict[str, Tensor]:
        """Accuracy and mean loss of each row on all test samples, each counted once; a few (row, sample) pairs at a
        time, so that the memory is bounded whatever the number of rows."""
        passes, count = self._passes, len(self.test_targets)
        samples = min(count, max(1, passes // 4))
        rows = max(1, passes // samples)
        correct = torch.zeros(len(x), dtype=torch.int64, device=x.device)
        loss = torch.zeros(len(x), dtype=torch.float64, device=x.device)
        mean = torch.vmap(self.loss, in_dims=(0, None))
        for begin in range(0, count, samples):
            inputs = self._converted(self.test_inputs[begin : begin + samples], "test")
            targets = self.test_targets[begin : begin + samples]
            for r in range(0, len(x), rows):
                outputs = self.oracle.predict(x[r : r + rows], inputs)
                # argmax takes the first NaN for the largest: a model that says NaN would have the accuracy of chance
                right = (outputs.argmax(-1) == targets) & ~outputs.isnan().any(-1)
                correct[r : r + rows] += right.sum(-1)
                loss[r : r + rows] += mean(outputs, targets).double() * len(targets)
        return {"accuracy": correct.double() / count, "loss": loss / count}

    @cached_property
    def _passes(self) -> int:
        """(row, sample) pairs evaluated at a time: about 16 million activations (64 MB), also the fastest for a CNN on
        a CPU."""
        made: list[int] = []
        hooks = [
            m.register_forward_hook(lambda _m, _i, out: made.append(out.numel() if isinstance(out, Tensor) else 0))
            for m in self.oracle.model.modules()
        ]
        self.oracle.model(self._converted(self.test_inputs[:1], "one"))
        for hook in hooks:
            hook.remove()
        return min(8192, max(16, 2**24 // max(1, sum(made))))

    def _converted(self, raw: Tensor, name: str = "inputs") -> Tensor:
        if raw.dtype == self.dtype and self.scale == 1:
            return raw
        out = self._buffer(name, len(raw), raw, self.dtype)
        return out.copy_(raw).mul_(self.scale)

    def _buffer(self, name: str, length: int, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """The first ``length`` rows of a buffer that is kept between calls and only ever grows."""
        held = self._buffers.get(name)
        if held is None or len(held) < length:
            held = torch.empty(length, *like.shape[1:], dtype=dtype or like.dtype, device=self.device)
            self._buffers[name] = held
        return held[:length]
