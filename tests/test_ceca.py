"""CECA-2P averages exactly in ⌈log₂ n⌉ one-peer rounds, for every n (graphs/ceca.py)."""

import pytest
import torch

import graphs


@pytest.mark.parametrize("n", [1, 2, 3, 5, 6, 7, 8, 12, 17, 33, 100])
def test_it_is_exact_after_the_logarithm(n):
    x = torch.rand(n, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
    stack = torch.cat([x, torch.full_like(x, 7.0)])  # x̂ may start anywhere
    rounds = graphs.ceca(n)
    assert len(rounds) == (n - 1).bit_length()
    for W in rounds:
        stack = W @ stack
    assert torch.allclose(stack[:n], x.mean(0).expand(n, -1), atol=1e-13)


@pytest.mark.parametrize("n", [2, 6, 33])
def test_every_worker_hears_one_peer_a_round_and_rows_sum_to_one(n):
    for W in graphs.ceca(n):
        dense = W.to_dense()
        assert torch.allclose(dense.sum(1), torch.ones(2 * n, dtype=torch.float64))
        workers = dense.view(2, n, 2, n).ne(0).any(0).any(1)  # [receiver, sender]
        assert int((workers & ~torch.eye(n, dtype=torch.bool)).sum(1).max()) <= 1


def test_a_wrong_n_is_refused():
    with pytest.raises(ValueError, match="n"):
        graphs.ceca(0)
