"""Models are built alike in every process and leave the global random state alone."""

import pytest
import torch

from experiments import models


@pytest.mark.parametrize(
    ("make", "inputs", "parameters"), [(models.logreg, 64, 650), (models.mlp, 64, 9610), (models.cnn, 784, 20586)]
)
def test_shapes_sizes_and_seeds(make, inputs, parameters):
    before = torch.random.get_rng_state()
    a, b, c = (models.seeded(seed, make, inputs, 10) for seed in (0, 0, 1))
    assert torch.equal(before, torch.random.get_rng_state())
    flat = [torch.cat([p.flatten() for p in m.parameters()]) for m in (a, b, c)]
    assert len(flat[0]) == parameters
    assert torch.equal(flat[0], flat[1])
    assert not torch.equal(flat[0], flat[2])
    assert a(torch.rand(3, inputs)).shape == (3, 10)


def test_the_cnn_refuses_what_it_cannot_see():
    with pytest.raises(ValueError, match="inputs = 30.*no square"):
        models.cnn(30, 10)
    with pytest.raises(ValueError, match="groups = 4 does not divide 6"):
        models.cnn(784, 10, channels=(6,))


def test_an_mlp_without_hidden_layers_is_logistic_regression():
    assert sum(p.numel() for p in models.mlp(5, 3, hidden=()).parameters()) == 18
