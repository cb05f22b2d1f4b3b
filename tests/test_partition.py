"""Every sample is used once, by the same worker on every machine, and the report tells the truth."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.partition import Partition, by_label, dirichlet, iid

SORTED = torch.arange(10).repeat_interleave(60)


def everything(parts) -> list[int]:
    return sorted(torch.cat(list(parts)).tolist())


@pytest.mark.parametrize(
    "split", [iid, lambda y, n, seed: dirichlet(y, n, 0.1, seed), lambda y, n, seed: by_label(y, n, 3, seed)]
)
def test_a_partition_is_a_pure_function_that_uses_every_sample_once(split):
    a, b, other = split(SORTED, 8, seed=3), split(SORTED, 8, seed=3), split(SORTED, 8, seed=4)
    assert len(a) == 8
    assert everything(a) == list(range(600))
    assert all(torch.equal(p, q) for p, q in zip(a, b))
    assert not all(torch.equal(p, q) for p, q in zip(a, other))
    assert all(p.dtype == torch.int64 and bool((p[1:] > p[:-1]).all()) for p in a)


def test_partitions_are_the_same_on_every_machine():
    assert iid(SORTED, 8, 0)[0][:4].tolist() == [12, 18, 26, 36]
    assert dirichlet(SORTED, 8, 0.1, 0).sizes.tolist() == [6, 64, 131, 74, 67, 36, 44, 178]
    assert by_label(SORTED, 8, 3, 0)[0][:4].tolist() == [120, 121, 126, 127]


def test_iid_is_shuffled_although_the_labels_are_sorted():
    p = iid(SORTED, 10, seed=0)
    assert p.sizes.tolist() == [60] * 10
    assert float(p.distance.max()) < 0.3
    assert int((p.counts > 0).sum(1).min()) >= 8


def test_large_alpha_is_close_to_the_global_histogram():
    assert float(dirichlet(SORTED, 10, alpha=1000, seed=0).distance.max()) < 0.05


@pytest.mark.parametrize("seed", range(20))
def test_small_alpha_ends_and_leaves_nobody_empty(seed):
    p = dirichlet(torch.arange(100) % 10, 16, alpha=0.05, seed=seed)
    assert int(p.sizes.min()) >= 1
    assert everything(p) == list(range(100))
    assert ("moved so that each worker has at least 1" in p.report()) == bool(p.note)


def test_a_class_that_runs_out_gives_no_nan():
    labels = torch.tensor([0] * 10 + [1] * 10 + [2])
    for alpha in (1e-4, 100):
        p = dirichlet(labels, 2, alpha=alpha, seed=0)
        assert everything(p) == list(range(21))
        assert not p.distance.isnan().any()


def test_min_size_is_reached_by_moving_or_refused_with_the_numbers():
    assert int(dirichlet(SORTED, 20, 0.05, seed=1, min_size=20).sizes.min()) >= 20
    with pytest.raises(
        ValueError,
        match=r"min_size = 40 for n = 20 workers needs 800 samples, there are 600 .*alpha = 0.05 .*min_size ≤ 30",
    ):
        dirichlet(SORTED, 20, 0.05, seed=1, min_size=40)


@given(seed=st.integers(0, 99), n=st.integers(1, 30), alpha=st.floats(1e-3, 1e3), size=st.integers(30, 80))
@settings(max_examples=40, deadline=None)
def test_dirichlet_property(seed, n, alpha, size):
    p = dirichlet(torch.arange(size) % 7, n, alpha, seed)
    assert everything(p) == list(range(size))
    assert int(p.sizes.min()) >= 1


@given(seed=st.integers(0, 99), n=st.integers(4, 30), classes=st.integers(3, 10))
@settings(max_examples=40, deadline=None)
def test_by_label_property(seed, n, classes):
    p = by_label(SORTED, n, classes, seed)
    assert (p.counts > 0).sum(1).tolist() == [classes] * n
    assert everything(p) == list(range(600))
    holders = (p.counts > 0).sum(0)
    assert int(holders.max() - holders.min()) <= 1


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: iid(SORTED[:3], 4), r"3 samples for n = 4 workers.*at most 3 workers"),
        (lambda: iid(SORTED, 0), "n is 0"),
        (lambda: iid(SORTED, 1.5), "n is 1.5"),
        (lambda: iid(SORTED, 4, seed=-1), "seed is -1"),
        (lambda: dirichlet(SORTED, 4, 0.1, seed=None), "seed is None"),
        (lambda: dirichlet(SORTED, 4, 0.1, min_size=-1), "min_size is -1"),
        (lambda: iid(["cat", "dog"], 2), r"type <U3.*np.unique\(labels, return_inverse=True\)"),
        (lambda: iid(torch.nn.functional.one_hot(SORTED), 2), r"shape \(600, 10\)"),
        (lambda: Partition((SORTED > 4, SORTED <= 4), SORTED), r"type torch.bool.*mask.nonzero"),
        (lambda: Partition((torch.tensor([0.7]),), SORTED), "type torch.float32"),
        (lambda: Partition((), SORTED), "among no workers"),
        (lambda: Partition((torch.arange(60),), SORTED).matching(SORTED), "label 1 is not one of the partition's"),
        (lambda: iid(SORTED.double(), 4), "float64: a partition needs one integer"),
        (lambda: dirichlet(SORTED, 4, 0), "alpha = 0.*positive"),
        (lambda: by_label(SORTED, 4, 2), r"hold 8 labels, and there are 10.*classes_per_worker ≥ 3"),
        (lambda: by_label(SORTED, 4, 11), "use 1 to 10"),
        (
            lambda: Partition((torch.tensor([0]), torch.tensor([], dtype=torch.int64)), SORTED),
            r"worker 1 of 2 has no samples.*fewer workers",
        ),
        (lambda: Partition((torch.tensor([0, 1]), torch.tensor([1])), SORTED), "sample 1 is given out 2 times"),
        (lambda: Partition((torch.tensor([0, 600]),), SORTED), "sample 600 is outside of the 600"),
    ],
)
def test_errors_name_value_rule_and_remedy(call, words):
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize("kind", [torch.int8, torch.uint8, torch.int32, "numpy", "list"])
def test_labels_of_any_integer_type_give_the_same_partition(kind):
    labels = {"numpy": SORTED.numpy(), "list": SORTED.tolist()}.get(kind) if isinstance(kind, str) else SORTED.to(kind)
    p, same = dirichlet(labels, 8, 0.1, seed=0), dirichlet(SORTED, 8, 0.1, seed=0)
    assert all(torch.equal(a, b) for a, b in zip(p, same))
    assert torch.equal(p.counts, same.counts)
    assert [len(part) for part in p.matching(labels)] == same.sizes.tolist()
    assert iid(SORTED > 4, 2).counts.sum(0).tolist() == [300, 300]


def test_the_test_set_follows_the_labels_of_the_training_set():
    train = by_label(SORTED, 5, 2, seed=0)
    test = torch.arange(9, -1, -1).repeat_interleave(10)  # another order of first appearance
    parts = train.matching(test)
    assert everything(parts) == list(range(100))
    for i, part in enumerate(parts):
        assert set(test[part].tolist()) == set(train.classes[train.counts[i] > 0].tolist())
    with pytest.raises(ValueError, match="label 10 is not one"):
        train.matching(torch.tensor([10]))


def test_report_counts_samples_and_labels():
    lines = by_label(SORTED, 10, 1, seed=0).report().splitlines()
    assert lines[0].startswith("10 workers hold 600 of 600 samples, 60 to 60 each")
    assert "0.900 at most" in lines[0]
    assert len(lines) == 12
    assert lines[2].split()[:3] == ["0", "60", "0.900"]
    assert lines[2].count("·") == 9
    assert len(iid(SORTED, 100).report().splitlines()) <= 7
