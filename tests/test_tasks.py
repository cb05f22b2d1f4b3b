"""A batch depends on (seed, worker, step) alone, an epoch uses each sample once, and evaluation counts each test sample
once."""

import gzip
import struct
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from torch import nn
from torch.nn import functional

import gossip
import graphs
from experiments import models, train
from experiments.partition import dirichlet, iid
from experiments.tasks import fashion
from experiments.tasks.batches import Batches
from experiments.tasks.classification import Classification
from experiments.tasks.digits import digits
from experiments.tasks.quadratic import Quadratic, quadratic

PARTS = [torch.arange(12), torch.arange(12, 15), torch.arange(15, 22)]


def stream(batches: Batches, worker: int, steps: range) -> list[int]:
    return [int(i) for step in steps for i in batches(torch.tensor([worker]), step)[0]]


@pytest.mark.parametrize("batch", [1, 4, 5, 12, 30])
def test_each_epoch_uses_each_sample_once(batch):
    batches = Batches(PARTS, batch, seed=0)
    for worker, part in enumerate(PARTS):
        steps = range(-(-10 * len(part) // batch))
        seen = stream(batches, worker, steps)[: 10 * len(part)]
        epochs = torch.tensor(seen).view(10, -1)
        assert all(torch.equal(e.sort().values, part) for e in epochs)
        assert len({tuple(e.tolist()) for e in epochs}) > 2  # another order each epoch


def test_a_batch_depends_on_seed_worker_and_step_alone():
    everyone = torch.arange(3)
    a = Batches(PARTS, 4, seed=0)
    table = [a(everyone, step).clone() for step in range(40)]
    b = Batches(PARTS, 4, seed=0)
    for step in (39, 3, 17, 17, 0, 38):  # backwards, and one worker at a time
        for worker in (2, 0, 1):
            assert torch.equal(b(torch.tensor([worker]), step)[0], table[step][worker])
    mixed = b(torch.tensor([1, 0, 2]), torch.tensor([5, 30, 9]))
    assert torch.equal(mixed, torch.stack([table[5][1], table[30][0], table[9][2]]))
    assert not torch.equal(Batches(PARTS, 4, seed=1)(everyone, 0), table[0])


def test_the_order_is_the_same_whoever_shares_the_draw():
    parts = list(torch.arange(3000).view(1000, 3)) + [torch.arange(3000, 40000)]
    together = Batches(parts, 4096, seed=0)(torch.arange(1001), 2)  # too many for one sort: in halves
    alone = Batches(parts, 4096, seed=0)
    for i in (0, 999, 1000):
        assert torch.equal(alone(torch.tensor([i]), 2)[0], together[i])


def test_the_order_of_samples_is_random():
    parts = list(torch.arange(64 * 512).view(512, 64))
    batches = Batches(parts, 64, seed=0)
    order = batches(torch.arange(512), 0) - torch.arange(512)[:, None] * 64
    first, correlation = (
        order[:, 0].double(),
        torch.corrcoef(torch.stack([order.double().flatten(), torch.arange(64.0).repeat(512).double()])),
    )
    assert abs(first.mean() - 31.5) < 3
    assert abs(correlation[0, 1]) < 0.02
    pairs = torch.stack([order[:-1, 0], order[1:, 0]]).double()
    assert abs(torch.corrcoef(pairs)[0, 1]) < 0.15


def test_a_batch_of_none_is_each_sample_once():
    rows = Batches(PARTS, None, seed=0)(torch.tensor([1, 0]), 7)
    assert rows.tolist() == [[12, 13, 14] + [-1] * 9, list(range(12))]
    with pytest.raises(ValueError, match="batch = 0"):
        Batches(PARTS, 0, seed=0)


def toy(n: int = 5, **more) -> Classification:
    x, y = torch.rand(60, 4, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 3
    return Classification(
        partial(models.mlp, 4, 3, hidden=(5,)), (x, y), (x[:20], y[:20]), iid, n, **{"batch": 4, **more}
    )


def test_gradients_are_those_of_the_batch_and_do_not_touch_it():
    task = toy(dtype="float64")
    everyone = torch.arange(5)
    x = task.initial() + 0.1 * torch.randn(
        5, len(task.initial()), dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    g, loss = (t.clone() for t in task.gradient(x, everyone, 3))
    inputs, targets = (t.clone() for t in task.batch(everyone, 3))
    module = models.mlp(4, 3, hidden=(5,)).double()
    for i in range(5):
        nn.utils.vector_to_parameters(x[i], module.parameters())
        module.zero_grad()
        mine = functional.cross_entropy(module(inputs[i]), targets[i])
        mine.backward()
        torch.testing.assert_close(loss[i], mine)
        torch.testing.assert_close(g[i], torch.cat([p.grad.flatten() for p in module.parameters()]))
    some, _ = task.gradient(x[[4, 1]], torch.tensor([4, 1]), torch.tensor([3, 3]))
    torch.testing.assert_close(some, g[[4, 1]], rtol=1e-12, atol=1e-12)
    assert torch.equal(task.batch(everyone, 3)[0], inputs)


def test_the_full_batch_is_the_exact_local_gradient_also_with_uneven_workers():
    task = toy(n=7, batch=None, dtype="float64")
    x = task.initial().repeat(7, 1)
    _, loss = task.gradient(x, torch.arange(7), 0)
    assert len(set(task.partition.sizes.tolist())) == 2
    for i, part in enumerate(task.partition):
        outputs = task.oracle.predict(x[:1], task.inputs[part])[0]
        torch.testing.assert_close(loss[i], functional.cross_entropy(outputs, task.targets[part]))


def test_evaluation_counts_every_test_sample_once_however_it_is_chunked():
    task = toy(dtype="float64")
    x = task.initial() + torch.randn(
        9, len(task.initial()), dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    outputs = task.oracle.predict(x, task.test_inputs)
    truth = [functional.cross_entropy(o, task.test_targets) for o in outputs]
    for passes in (1, 3, 8, 28, 8192):
        task.__dict__["_passes"] = passes
        found = task.evaluate(x)
        torch.testing.assert_close(found["loss"], torch.stack(truth))
        assert torch.equal(found["accuracy"], (outputs.argmax(-1) == task.test_targets).double().mean(1))


def test_float32_and_float64_start_alike_and_seeds_do_not():
    a, b, c = toy(), toy(dtype="float64"), toy(seed=1)
    assert torch.equal(a.initial().double(), b.initial())
    assert not torch.equal(a.initial(), c.initial())
    before = a.initial()
    before.zero_()
    assert a.initial().abs().sum() > 0


def test_bytes_are_converted_a_batch_at_a_time():
    x, y = torch.randint(0, 256, (40, 9), dtype=torch.uint8), torch.arange(40) % 2
    task = Classification(partial(models.logreg, 9, 2), (x, y), (x, y), iid, 4, batch=6, scale=1 / 255)
    inputs, _ = task.batch(torch.arange(4), 0)
    picked = x[task.batches(torch.arange(4), 0)]
    torch.testing.assert_close(inputs, picked.float() / 255)
    assert task.inputs.dtype == torch.uint8
    assert task.evaluate(task.initial()[None])["accuracy"].shape == (1,)


def test_a_partition_of_another_number_of_workers_is_refused():
    data = torch.rand(60, 4), torch.arange(60) % 3
    with pytest.raises(ValueError, match="partition has 3 workers and n = 5"):
        Classification(partial(models.logreg, 4, 3), data, data, lambda labels, n, seed: iid(labels, 3, seed), n=5)


@pytest.mark.parametrize("batch", [4, None])
def test_targets_of_any_integer_type(batch):  # cross_entropy takes int64 only, and −100 is 156 in uint8
    x, y = torch.rand(60, 4), torch.arange(60) % 3

    def task(targets):
        return Classification(partial(models.logreg, 4, 3), (x, targets), (x, targets), iid, n=7, batch=batch)

    wanted = task(y)
    start = wanted.initial().repeat(7, 1)
    for kind in (torch.uint8, torch.int32):
        got = task(y.to(kind))
        assert torch.equal(got.gradient(start, torch.arange(7), 0)[0], wanted.gradient(start, torch.arange(7), 0)[0])
        assert torch.equal(got.evaluate(start)["loss"], wanted.evaluate(start)["loss"])


def test_a_model_that_says_nan_is_never_right():
    task = toy()
    x = task.initial().repeat(2, 1)
    x[1] = float("nan")
    accuracy = task.evaluate(x)["accuracy"].tolist()
    assert accuracy[0] > 0
    assert accuracy[1] == 0


def test_samples_without_targets_are_refused():
    x, y = torch.rand(60, 4), torch.arange(60) % 3
    for data, words in [
        (((x, y[:50]), (x, y)), "train has 60 inputs and 50 targets"),
        (((x, y), (x[:0], y[:0])), "test has 0 inputs and 0 targets"),  # an accuracy of 0/0
    ]:
        with pytest.raises(ValueError, match=words):
            Classification(partial(models.logreg, 4, 3), *data, iid, n=5)


def test_dropout_draws_depend_on_the_worker_and_the_step():
    x, y = torch.rand(60, 4), torch.arange(60) % 3
    make = lambda: nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))  # noqa: E731
    task = Classification(make, (x, y), (x, y), iid, 5, batch=4)
    rows = task.initial().repeat(5, 1)
    g = task.gradient(rows, torch.arange(5), 2)[0].clone()
    torch.testing.assert_close(task.gradient(rows[3:4], torch.tensor([3]), 2)[0], g[3:4])


def test_batches_of_256_workers_cost_little_beside_their_gradient():
    count = 256 * 128
    data = torch.randn(count, 64), torch.randint(0, 10, (count,))
    task = Classification(partial(models.mlp, 64, 10), data, data, iid, 256, batch=32)
    everyone = torch.arange(256)
    x = task.initial().repeat(256, 1)
    took = []
    for what in (task.batch, partial(task.gradient, x)):
        what(everyone, 0)
        best = []
        for repeat in range(3):
            start = time.perf_counter()
            for step in range(4):  # one epoch: with its permutation
                what(everyone, 4 * repeat + step + 1)
            best.append(time.perf_counter() - start)
        took.append(min(best))
    assert took[0] < 0.5 * took[1]


def test_digits_split_and_learn():
    task = digits(n=8, partition=partial(dirichlet, alpha=0.5), dtype="float64")
    assert task.size == 1437
    assert len(task.test_targets) == 360
    assert task.batch_size == 32
    per_class = torch.bincount(task.test_targets)
    assert int(per_class.max() - per_class.min()) <= 2  # stratified
    assert torch.equal(task.test_targets, digits(n=8, seed=5).test_targets)  # one test set for all seeds
    assert "8 workers hold 1437" in task.report()
    x = task.initial().repeat(8, 1)
    for step in range(60):
        g, _ = task.gradient(x, torch.arange(8), step)
        x -= 0.5 * g.mean(0)
    assert float(task.evaluate(x[:1])["accuracy"][0]) > 0.85


class Median:
    """A user's own task: worker i holds one number, and all look for their median."""

    def __init__(self, numbers):
        self.numbers, self.n = torch.as_tensor(numbers, dtype=torch.float64)[:, None], len(numbers)

    def initial(self):
        return torch.zeros(1, dtype=torch.float64)

    def gradient(self, x, workers, step):
        away = x - self.numbers[workers]
        return away.sign(), away.abs().sum(1)

    def evaluate(self, x):
        return {"distance": (x[:, :, None] - self.numbers.T).abs().mean((1, 2))}


@pytest.mark.parametrize(
    "task", [Median([1.0, 2, 3, 50, 70]), quadratic(5, curvature=(1, 2), sigma=0.1), toy(dtype="float64")]
)
def test_any_object_with_these_members_is_a_task(task):
    rows = list(
        gossip.simulate(
            task, gossip.DPSGD(optimizer=partial(torch.optim.SGD, lr=0.1)), graphs.ring(5), rounds=100, every=100
        )
    )
    name = next(k for k in ("distance", "loss") if k in task.evaluate(rows[-1].x))
    assert float(task.evaluate(rows[-1].x.mean(0, keepdim=True))[name]) < float(
        task.evaluate(task.initial()[None])[name]
    )


def test_quadratics_know_their_optimum_and_their_noise():
    task = quadratic(n=6, d=4, curvature=(0.5, 4), spread=2, seed=1)
    x = task.optimum.repeat(6, 1)
    g, _ = task.gradient(x, torch.arange(6), 0)
    torch.testing.assert_close(g.mean(0), torch.zeros(4, dtype=torch.float64), atol=1e-12, rtol=0)
    away = task.optimum + torch.tensor([[1.0, 0, 0, 0]], dtype=torch.float64)
    f = lambda p: (task.h / 2 * (p - task.b).square().sum(1)).mean()  # noqa: E731
    torch.testing.assert_close(task.evaluate(away)["suboptimality"][0], f(away) - f(task.optimum))
    noisy = Quadratic(torch.zeros(4, 5000, dtype=torch.float64), sigma=3.0)
    zero = torch.zeros(4, 5000, dtype=torch.float64)
    first, _ = noisy.gradient(zero, torch.arange(4), 0)
    first = first.clone()
    assert abs(float(first.std()) - 3) < 0.1
    assert not torch.equal(first[0], first[1])
    assert torch.equal(noisy.gradient(zero[2:3], torch.tensor([2]), 0)[0][0], first[2])
    assert not torch.equal(noisy.gradient(zero, torch.arange(4), 1)[0], first)
    with pytest.raises(ValueError, match="curvatures are positive"):
        Quadratic(zero, h=-1.0)
    with pytest.raises(ValueError, match="curvature = "):
        quadratic(4, curvature=(1, 2, 3))
    for options, words in [
        ({"n": 0}, "n is 0"),
        ({"n": 2, "d": 1.5}, "d is 1.5"),
        ({"n": 2, "sigma": -1.0}, "sigma = -1"),
    ]:
        with pytest.raises(ValueError, match=words):
            quadratic(**options)


def write_idx(path: Path, array: torch.Tensor, zipped: bool) -> None:
    data = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.numpy().tobytes()
    path.write_bytes(gzip.compress(data) if zipped else data)


@pytest.mark.parametrize("zipped", [True, False])
def test_fashion_reads_idx_files_from_the_users_folder(tmp_path, monkeypatch, zipped):
    images, labels = torch.arange(20 * 784).remainder(251).view(20, 28, 28).byte(), (torch.arange(20) % 10).byte()
    for name in ("train", "t10k"):
        write_idx(tmp_path / f"{name}-images-idx3-ubyte{'.gz' * zipped}", images, zipped)
        write_idx(tmp_path / f"{name}-labels-idx1-ubyte{'.gz' * zipped}", labels, zipped)
    monkeypatch.setenv("GOSSIP_DATA", str(tmp_path))
    task = fashion.fashion(n=4, batch=3, model=models.cnn, test_samples=7)
    assert torch.equal(task.inputs, images.flatten(1))
    assert task.targets.tolist() == labels.tolist()
    g, _ = task.gradient(task.initial().repeat(4, 1), torch.arange(4), 0)
    assert g.shape == (4, 20586)
    assert bool(g.isfinite().all())
    assert len(task.test_targets) == 7


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\x89PNG....", "begins with 89504e47"),
        (bytes([0, 0, 8, 1, 0, 0, 0, 5, 1]), r"holds 1 bytes where its header \(5,\) asks for 5"),
        (b"", "begins with"),
    ],
)
def test_other_files_are_refused(tmp_path, data, words):
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(ValueError, match=words):
        fashion.read_idx(tmp_path / "x")
    (tmp_path / "x.gz").write_bytes(gzip.compress(bytes(1000))[:20] if data else data)  # a download that broke off
    with pytest.raises(ValueError, match="no whole gzip file.*Download it again" if data else "begins with"):
        fashion.read_idx(tmp_path / "x.gz")


def test_missing_data_names_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setenv("GOSSIP_DATA", str(tmp_path))
    monkeypatch.setattr(fashion, "DEBIAN", tmp_path / "none")
    with pytest.raises(FileNotFoundError, match="make data.*apt-get install dataset-fashion-mnist.*GOSSIP_DATA"):
        fashion.folder()


@pytest.mark.skipif(not fashion.DEBIAN.exists(), reason="Fashion-MNIST is not installed here: make data")
def test_fashion_of_the_debian_package(monkeypatch):
    monkeypatch.delenv("GOSSIP_DATA", raising=False)
    (x, y), (test_x, _) = fashion.load()
    assert x.shape == (60000, 784)
    assert y.bincount().tolist() == [6000] * 10
    assert test_x.shape == (10000, 784)
    task = fashion.fashion(n=16, test_samples=500)
    assert task.gradient(task.initial().repeat(16, 1), torch.arange(16), 0)[1].shape == (16,)
    assert 0 < float(task.evaluate(task.initial()[None])["accuracy"][0]) < 0.3


CONF = Path(train.__file__).parent / "conf"  # `train` registers the schema and the resolvers


@pytest.mark.parametrize("partition", [p.stem for p in sorted((CONF / "partition").glob("*.yaml"))])
@pytest.mark.parametrize("task", [p.stem for p in sorted((CONF / "task").glob("*.yaml"))])
def test_every_task_and_partition_is_a_config(task, partition):
    if task == "fashion" and not fashion.DEBIAN.exists():
        pytest.skip("Fashion-MNIST is not installed here: make data")
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("train", [f"task={task}", f"partition={partition}", "n=12", "seed=3", "batch=5"])
    built = instantiate(config.task)
    g, loss = built.gradient(built.initial().repeat(2, 1), torch.tensor([3, 11]), 1)
    assert built.n == 12
    assert g.isfinite().all()
    assert loss.shape == (2,)


def test_models_are_chosen_by_name():
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("train", ["task=digits", "task/model=logreg", "dtype=float64"])
    task = instantiate(config.task)
    assert task.initial().shape == (650,)
    assert task.initial().dtype == torch.float64
