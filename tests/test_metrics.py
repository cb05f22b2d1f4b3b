"""The average model, the mean, the worst and the best worker are told apart, and nothing depends on who hosts the
rows."""

import math
from types import SimpleNamespace

import pytest
import torch

import gossip
from experiments import metrics


def test_four_numbers_for_one_metric():
    workers = {"accuracy": torch.tensor([0.2, 0.9, 0.4]), "loss": torch.tensor([3.0, 0.1, 2.0])}
    row = metrics.summary(workers, {"accuracy": torch.tensor([0.95]), "loss": torch.tensor([0.05])})
    assert {k: round(v, 6) for k, v in row.items()} == {
        "eval/average/accuracy": 0.95,
        "eval/average/loss": 0.05,
        "eval/mean/accuracy": 0.5,
        "eval/worst/accuracy": 0.2,
        "eval/best/accuracy": 0.9,
        "eval/mean/loss": 1.7,
        "eval/worst/loss": 3.0,
        "eval/best/loss": 0.1,
    }


def test_the_worst_of_what_grows_is_the_lowest():
    row = metrics.summary({"AUC": torch.tensor([0.6, 0.9]), "macro_f1": torch.tensor([0.1, 0.4])}, {})
    assert (row["eval/worst/AUC"], row["eval/best/macro_f1"]) == (pytest.approx(0.6), pytest.approx(0.4))


def test_a_worker_that_diverged_is_the_worst():
    row = metrics.summary({"loss": torch.tensor([1.0, math.nan, math.inf])}, {})
    assert math.isnan(row["eval/worst/loss"])
    assert row["eval/best/loss"] == 1
    row = metrics.summary({"loss": torch.tensor([1.0, math.inf])}, {})
    assert (row["eval/worst/loss"], row["eval/best/loss"]) == (math.inf, 1)
    assert math.isnan(metrics.summary({"loss": torch.tensor([math.nan])}, {})["eval/best/loss"])


def test_consensus_distance_is_a_mean_over_workers_wherever_their_rows_are():
    x = torch.randn(150, 7, generator=torch.Generator().manual_seed(0))
    center = x.mean(0, dtype=torch.float64)
    here = metrics.squared_distances(x, center)
    parts = torch.cat([metrics.squared_distances(part, center) for part in (x[:3], x[3:80], x[80:])])
    assert torch.equal(here, parts)
    truth = float((x.double() - x.double().mean(0)).square().sum()) / 150
    assert math.isclose(gossip.consensus_distance(x), truth, rel_tol=1e-12)
    assert math.isclose(metrics.evaluation({}, {}, here)["consensus/distance"], truth, rel_tol=1e-6)
    assert gossip.consensus_distance(x[:1]) == 0


def test_small_disagreement_on_large_parameters_is_not_lost():
    x = torch.full((4, 1000), 1e4)
    x[0] += 1e-2
    assert math.isclose(gossip.consensus_distance(x), 1000 * float(x[0, 0] - 1e4) ** 2 * 3 / 16, rel_tol=1e-6)


def test_every_axis_is_in_every_row():
    row = metrics.axes(SimpleNamespace(batch_size=32, size=1437), 100, 200, bits=8e6, seconds=2.0, n=16)
    assert list(row) == ["round", "bits", "megabytes", "seconds", "samples", "epoch"]
    assert {*row, "simulated"} == set(metrics.AXES)
    assert metrics.axes(None, 1, 1, 0, 0, simulated=2.5)["simulated"] == 2.5
    assert (row["samples"], row["megabytes"], round(row["epoch"], 3)) == (6400, 1.0, 71.26)
    assert set(metrics.axes(None, 1, 1, 0, 0)) == {"round", "bits", "megabytes", "seconds"}


def test_the_last_batch_losses_are_averaged():
    row = metrics.evaluation({}, {}, torch.zeros(2), torch.tensor([1.0, 2.0]))
    assert row == {"consensus/distance": 0.0, "train/loss": 1.5}
