"""Topologies: what a graph is, whichever way it came in (graphs/topology.py, graphs/convert.py)."""

import math
import warnings

import networkx as nx
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphs import (
    Topology,
    circulant,
    from_adjacency,
    from_data,
    from_edges,
    from_networkx,
    metropolis,
    path,
    push,
    ring,
    star,
    uniform,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch_geometric.data import Data


@st.composite
def edge_lists(draw):
    n = draw(st.integers(1, 9))
    worker = st.integers(0, n - 1)
    return n, draw(st.lists(st.tuples(worker, worker), max_size=20))


def quiet(edges, n, directed=False):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return from_edges(edges, n, directed=directed)


@given(edge_lists(), st.booleans())
def test_every_edge_list_becomes_a_proper_topology(case, directed):
    n, edges = case
    t = quiet(edges, n, directed)
    wanted = {(a, b) for a, b in edges if a != b}
    if not directed:
        wanted |= {(b, a) for a, b in wanted}
    assert t.n == n
    assert t.edge_index.T.tolist() == sorted(map(list, wanted))
    assert t.directed == any((b, a) not in wanted for a, b in wanted)
    assert t.in_degree.sum() == t.out_degree.sum() == t.messages == len(wanted)


@given(edge_lists(), st.booleans())
def test_round_trips_and_the_same_numbers_in_every_representation(case, directed):
    n, edges = case
    t = quiet(edges, n, directed)
    g = t.to_networkx()
    assert from_networkx(g) == t
    assert from_data(t.to_data()) == t
    assert from_adjacency(nx.to_numpy_array(g, nodelist=range(n))) == t
    assert g.number_of_nodes() == t.n
    assert g.number_of_edges() == (t.messages if t.directed else t.messages // 2)
    strong = nx.strongly_connected_components(g) if t.directed else nx.connected_components(g)
    assert sorted(map(sorted, strong)) == [list(part) for part in t.components]
    assert t.connected == (len(t.components) == 1)
    assert list(t.isolated) == sorted(nx.isolates(g))
    W = metropolis(quiet(edges, n))
    assert int((W.to_dense().fill_diagonal_(0) != 0).sum()) == quiet(edges, n).messages


@given(edge_lists())
def test_equality_and_hash_do_not_depend_on_the_order_of_edges(case):
    n, edges = case
    a, b = quiet(edges, n), quiet(edges[::-1], n)
    assert a == b
    assert hash(a) == hash(b)
    assert a.digest == b.digest
    assert a.digest != quiet(edges, n + 1).digest


def test_digest_is_the_same_on_every_machine():
    assert ring(5).digest == "445d2596d698d3f2e662f01988c88f8e4133564eea98ceba743d23fb11bad7ac"


def test_labels_are_ranks_not_insertion_order():  # GRAPH-09
    t = from_edges([(3, 0), (1, 2), (0, 1)], n=4)
    assert t.neighbours(0) == (1, 3)
    assert t.names is None
    g = nx.Graph([(3, 0), (1, 2), (0, 1)])
    assert list(g.nodes) != sorted(g.nodes)
    assert from_networkx(g) == t
    W = metropolis(from_networkx(g)).to_dense()
    assert W[0].nonzero().flatten().tolist() == [0, 1, 3]


@pytest.mark.parametrize(
    "same",
    [
        lambda: from_edges(np.array([[3.0, 0], [1, 2], [0, 1]])),  # as numpy.loadtxt reads it
        lambda: from_edges([("3", "0"), ("1", "2"), ("0", "1")]),
        lambda: from_edges([(np.int64(3), torch.tensor(0)), (1, np.float32(2)), (0, 1)]),
        lambda: from_networkx(nx.parse_edgelist(["3 0", "1 2", "0 1"])),
    ],
)
def test_whole_numbers_are_ranks_also_as_text_or_floats(same):  # GRAPH-09, networkx#2856, node2vec#9
    assert same() == from_edges([(3, 0), (1, 2), (0, 1)])


def test_numbers_with_gaps_keep_their_order_and_their_names():
    assert from_networkx(nx.Graph([("10", "9"), ("9", "2")])).names == ("2", "9", "10")
    assert from_networkx(nx.Graph([("1", 1), ("0", 1)])).n == 3


def test_a_set_of_named_edges_is_the_same_graph_in_every_process():  # SEED-01: set order
    edges = {(a, b) for a in "abcdefgh" for b in "abcdefgh" if a < b}
    assert from_edges(edges).names == tuple("abcdefgh")


def test_a_large_sparse_adjacency_stays_sparse():
    i = torch.arange(10**6)
    A = torch.sparse_coo_tensor(torch.stack([i, (i + 1) % 10**6]), torch.ones(10**6), check_invariants=True)
    assert from_adjacency(A) == ring(10**6, directed=True)
    assert from_adjacency(torch.ones(3, 3, dtype=torch.bfloat16, requires_grad=True).triu(1)).messages == 3


def test_data_brings_lengths_and_places_only_where_they_are_one_each():
    data = Data(edge_index=torch.tensor([[0], [1]]), num_nodes=2, length=torch.tensor([5]), pos=torch.ones(2, 3))
    assert from_data(data).lengths.tolist() == [5]
    assert from_data(data).positions is None
    assert from_data(Data(edge_index=torch.tensor([[0], [1]]), num_nodes=2, length=7)).lengths is None
    assert from_networkx(nx.Graph([(0, 1, {"length": "2.5"})])).lengths.tolist() == [2.5, 2.5]  # GraphML without types


def test_other_labels_are_mapped_openly():
    t = from_networkx(nx.Graph([(30, 10), (10, 20)]))
    assert t.names == ("10", "20", "30")
    assert t.neighbours(0) == (1, 2)
    assert from_networkx(nx.Graph([("b", "a")])).names == ("b", "a")
    with pytest.raises(ValueError, match="leaves the 3 workers"):
        from_edges([(0, 5)], n=3)
    with pytest.raises(ValueError, match="leaves the 3 workers"):
        Topology(3, torch.tensor([[0], [3]]))


def test_isolated_last_node_is_kept_everywhere():  # GRAPH-13
    t = from_edges([(0, 1), (1, 2), (3, 4)], n=6)
    for same in (from_networkx(t.to_networkx()), from_data(t.to_data())):
        assert same.n == 6
        assert same.isolated == (5,)
        assert same.components == ((0, 1, 2), (3, 4), (5,))
    assert t.to_data().num_edges == t.messages == 6
    assert str(t) == (
        "Topology: 6 workers, 3 undirected edges (6 messages a round), degree 0 to 2, 3 components, isolated workers 5"
    )
    assert metropolis(t).to_dense()[5].tolist() == [0, 0, 0, 0, 0, 1]


def test_repeated_edges_are_reported_and_collapsed():  # GRAPH-14
    with pytest.warns(UserWarning, match="1 repeated edges collapsed"):
        t = from_edges([(0, 1), (0, 1)])
    assert t.messages == 2
    with pytest.warns(UserWarning, match="repeated"):
        assert from_networkx(nx.MultiGraph([(0, 1), (0, 1)])) == t
    assert from_edges([(0, 1), (1, 0)]) == t
    with pytest.raises(ValueError, match="appears twice"):
        Topology(2, torch.tensor([[0, 0], [1, 1]]))


def test_loops_are_stripped_before_degrees_are_taken():  # GRAPH-15
    with pytest.warns(UserWarning, match="1 loops stripped"):
        t = from_edges([(0, 1), (1, 1)])
    assert t.degree.tolist() == [1, 1]
    assert torch.equal(metropolis(t).to_dense(), torch.full((2, 2), 0.5, dtype=torch.float64))
    with pytest.raises(ValueError, match="is a loop"):
        Topology(2, torch.tensor([[1], [1]]))


def test_edge_weights_are_left_behind():
    karate = from_networkx(nx.karate_club_graph())
    W = metropolis(karate).to_dense()
    assert W.min() >= 0
    assert torch.allclose(W.sum(1), torch.ones(34, dtype=torch.float64), atol=1e-14)


def test_no_edges_and_one_worker():  # GRAPH-27, GRAPH-04
    empty = from_edges([], n=4)
    assert empty.isolated == (0, 1, 2, 3)
    assert not empty.connected
    assert torch.equal(metropolis(empty).to_dense(), torch.eye(4, dtype=torch.float64))
    one = Topology(1, torch.empty(2, 0))
    assert one.connected
    assert not one.directed
    assert one.diameter == 0
    with pytest.raises(ValueError, match="say how many workers"):
        from_edges([])


def test_lengths_follow_their_edges():
    t = from_edges([(2, 1), (0, 1)], lengths=[21.0, 10.0])
    assert dict(zip(map(tuple, t.edge_index.T.tolist()), t.lengths.tolist())) == {
        (0, 1): 10,
        (1, 0): 10,
        (1, 2): 21,
        (2, 1): 21,
    }
    assert from_networkx(t.to_networkx()) == t
    shuffled = Topology(3, torch.tensor([[2, 0], [1, 1]]), lengths=torch.tensor([21.0, 10.0]))
    assert shuffled.lengths.tolist() == [10, 21]
    assert t != from_edges([(2, 1), (0, 1)])


def test_diameter():
    assert [ring(8).diameter, ring(8, directed=True).diameter, path(5).diameter, star(9).diameter] == [4, 7, 4, 2]
    with pytest.raises(ValueError, match="2 components"):
        _ = from_edges([(0, 1)], n=3).diameter


def test_a_topology_is_frozen():
    edges, km = torch.tensor([[0, 1], [1, 0]]), torch.tensor([5.0, 5.0], dtype=torch.float64)
    t = Topology(3, edges, lengths=km)
    edges += 1
    km += 1
    assert t == from_edges([(0, 1)], n=3, lengths=[5.0])
    with pytest.raises(AttributeError):
        ring(3).n = 4  # ty: ignore


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Topology(0, torch.empty(2, 0)), "n is 0"),
        (lambda: Topology(2.5, torch.empty(2, 0)), "n is 2.5"),
        (lambda: Topology(2, torch.tensor([[0, 1]])), "must be \\(2, E\\)"),
        (lambda: Topology(2, torch.tensor([[0.0], [1.0]])), "must be \\(2, E\\)"),
        (lambda: Topology(2, torch.tensor([[0], [1]]), names=("a",)), "1 names for 2 workers"),
        (lambda: Topology(2, torch.tensor([[0], [1]]), lengths=torch.ones(3)), "one entry per message"),
        (lambda: Topology(2, torch.tensor([[0], [1]]), positions=torch.ones(3, 2)), "positions"),
        (lambda: from_edges([(0, 1, 2)]), "is no edge"),
        (lambda: from_edges([("a", "b")], n=3), "the edges name 2 workers"),
        (lambda: from_edges(["ab", "bc"]), "'ab' is no edge"),
        (lambda: from_edges({0: [1], 1: [2]}), "0 is no edge"),
        (lambda: from_edges(np.array([1, 2])), "1 is no edge"),
        (lambda: ring(4).neighbours(4), "worker is 4; the workers are 0 … 3"),
        (lambda: ring(4).neighbours(-1), "worker is -1"),
        (lambda: from_edges([(0, 1)], lengths=[1.0, 2.0]), "2 lengths for 1 edges"),
        (lambda: from_adjacency(np.ones((2, 3))), "must be square"),
        (lambda: from_adjacency([[0, 1], [0, 0]], directed=False), "not symmetric"),
        (lambda: from_networkx(nx.Graph()), "no nodes"),
        (lambda: Topology(torch.tensor(2.5), torch.empty(2, 0)), "n is tensor\\(2.5"),
        (lambda: from_edges([(10**12, 1)]), "beyond 2147483648 workers.*renumbered"),
        (lambda: ring(10**20), "beyond 2147483648 workers"),
        (lambda: circulant(6, [1.5]), "an offset is 1.5; it must be an integer"),
        (lambda: from_edges([(0, 1), (2, None)]), "missing label"),
        (lambda: from_edges(np.array([[0, np.nan]])), "missing label"),
        (lambda: from_edges({(0, 1)}, lengths=[1.0]), "a set, whose order says nothing"),
        (lambda: from_edges(torch.tensor([[0, 1, 2], [1, 2, 0]])), "from_edges\\(edge_index.T\\)"),
        (lambda: from_edges([(0, 1)], lengths=[math.nan]), "edge \\(0, 1\\) is nan km long"),
        (lambda: from_edges([(0, 1)], lengths=[-1.0]), "edge \\(0, 1\\) is -1.0 km long"),
        (lambda: from_adjacency([[0, math.nan], [1, 0]]), "A\\[0, 1\\] is nan"),
        (lambda: from_adjacency("ring"), "'ring' is not an adjacency matrix"),
        (lambda: from_adjacency([[0, 1], [1]]), "rows of equally many numbers"),
        (lambda: from_networkx([(0, 1)]), "list is no networkx graph"),
        (lambda: from_data(nx.path_graph(2)), "Graph is no homogeneous"),
        (lambda: from_data(Data(edge_index=torch.tensor([[0, 1], [1, 2], [2, 0]]), num_nodes=3)), "\\(3, 2\\)"),
        (lambda: from_data(Data(edge_index=torch.tensor([[0.0], [1.0]]), num_nodes=2)), "of integers"),
        (lambda: from_data(Data(adj_t=torch.eye(2), num_nodes=2)), "ToSparseTensor"),
        (lambda: metropolis(nx.path_graph(3)), "metropolis takes a graphs.Topology, not Graph.*from_networkx"),
        (lambda: uniform(torch.eye(3)), "uniform takes a graphs.Topology, not Tensor"),
        (lambda: push(4), "push takes a graphs.Topology, not int"),
    ],
)
def test_errors_name_the_value(make, message):
    with pytest.raises(ValueError, match=message):
        make()
