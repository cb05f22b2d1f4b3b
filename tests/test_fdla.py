"""Fastest mixing weights: at the optimum of the semidefinite program, by either method (graphs/fdla.py)."""

import math
from importlib.util import find_spec

import pytest

from graphs import (
    barbell,
    complete,
    fdla,
    from_edges,
    geant,
    germany50,
    grid,
    karate,
    path,
    ring,
    slem,
    star,
    watts_strogatz,
)
from graphs.properties import offence

OPTIMA = {  # by Clarabel; path and star in closed form; ring, star, grid 8x5 also in the BEER notebook
    "path 20": (path(20), math.cos(math.pi / 20)),
    "ring 40": (ring(40), 0.98776367),
    "star 40": (star(40), 39 / 41),
    "grid 8x5": (grid(8, 5), 0.9373930),
    "barbell 20": (barbell(20), 0.9486833),
    "grid 5x5": (grid(5, 5), 0.8867093),
    "karate": (karate(), 0.9245886),
    "geant": (geant(), 0.9455212),
    "germany50": (germany50(), 0.9387781),
    "watts-strogatz 64": (watts_strogatz(64), 0.9653139),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n[:2] in ("ka", "ge", "wa") else n for n in OPTIMA]
)
def test_within_5e_4_of_the_optimum(name):
    topology, optimum = OPTIMA[name]
    W = fdla(topology)
    assert offence(W, "symmetric") is None
    assert offence(W, "doubly_stochastic") is None
    assert -1e-6 < slem(W) - optimum < 5e-4


@pytest.mark.skipif(find_spec("clarabel") is None, reason="needs clarabel")
@pytest.mark.parametrize("name", ["path 20", "barbell 20", "grid 5x5"])
def test_the_exact_program(name):
    topology, optimum = OPTIMA[name]
    assert abs(slem(fdla(topology, "exact")) - optimum) < 1e-6


def test_small_graphs_and_errors():
    assert fdla(ring(1)).to_dense().tolist() == [[1.0]]
    assert slem(fdla(ring(2))) < 1e-12
    assert slem(fdla(complete(4))) < 1e-3
    with pytest.raises(ValueError, match="2 components"):
        fdla(from_edges([(0, 1), (2, 3)]))
    with pytest.raises(ValueError, match="method is"):
        fdla(ring(4), "fast")
    with pytest.raises(ValueError, match="beyond 1000"):
        fdla(ring(1001))
