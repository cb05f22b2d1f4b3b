"""Pictures and the command: they appear, labels do not overlap, JSON says what the table says (graphs/draw.py, files, main)."""

import json

import matplotlib
import networkx as nx
import numpy as np
import pytest
import scipy.io
import scipy.sparse
import torch
from matplotlib.collections import LineCollection

matplotlib.use("Agg")

from graphs import (  # noqa: E402
    complete,
    draw,
    exponential,
    from_edges,
    from_file,
    from_networkx,
    geant,
    germany50,
    metropolis,
    one_peer_exponential,
    path,
    plot_consensus,
    plot_spectrum,
    ring,
    star,
    torus,
    uniform,
)
from graphs.__main__ import main  # noqa: E402


@pytest.fixture(autouse=True)
def _close():
    yield
    import matplotlib.pyplot as plt

    plt.close("all")


@pytest.mark.parametrize(
    "topology",
    [ring(1), ring(8), star(32), torus(8, 16), exponential(8), geant(), germany50(), from_edges([(0, 1)], n=4)],
)
def test_labels_touch_neither_each_other_nor_leave_their_dot(topology):
    ax = draw(topology, labels=True)
    ax.figure.canvas.draw()
    boxes = [text.get_window_extent() for text in ax.texts if text.get_text()]
    assert len(boxes) >= min(topology.n, 20) * 0.8
    for k, a in enumerate(boxes):
        for b in boxes[:k]:
            assert a.x0 >= b.x1 - 1 or b.x0 >= a.x1 - 1 or a.y0 >= b.y1 - 1 or b.y0 >= a.y1 - 1


def test_arrows_only_where_one_way_and_negative_weights_stand_out():
    assert len(draw(exponential(8)).patches) == 16  # ±4 is the same edge both ways
    assert not draw(ring(8)).patches
    W = metropolis(ring(3)).to_dense()
    W[0, 1] = W[1, 0] = -0.5
    grey, red = (c for c in draw(W).collections if isinstance(c, LineCollection))
    assert len(grey.get_segments()) == 2
    assert len(red.get_segments()) == 1
    assert grey.get_linestyles() != red.get_linestyles()
    one_way = draw(uniform(ring(5, directed=True)))
    assert len(one_way.patches) == 5


def test_spectrum_and_consensus_draw_what_they_say():
    ax = plot_spectrum({"ring": metropolis(ring(8)), "path": metropolis(path(8))})
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["ring: SLEM 0.8047", "path: SLEM 0.9493"]
    assert plot_spectrum(uniform(exponential(8))).get_xlabel() == "real part"
    x0 = torch.arange(8.0)
    ax = plot_consensus(ring(8), x0, 20, measured=[5.25, 3.0])
    assert [line.get_label().split(",")[0] for line in ax.lines] == ["predicted", "bound", "measured"]
    assert ax.lines[0].get_ydata()[0] == pytest.approx(5.25)
    assert len(plot_consensus(one_peer_exponential(8), x0, 2).lines) == 1


def test_zeros_are_drawn_and_marked_on_the_logarithmic_axis():  # PLOT-02
    for mixing, x0, measured in [
        (complete(4), None, None),
        (ring(4), torch.ones(4), None),
        (ring(4), None, [1.0, 0.0]),
    ]:
        ax = plot_consensus(mixing, x0, 3, measured=measured)
        ax.figure.canvas.draw()
        assert ax.lines[-1].get_label().endswith(", or 0")
        floor = ax.lines[-1].get_ydata()[0]
        assert all(1e-17 < floor <= y for line in ax.lines for y in line.get_ydata())


def test_eigenvalues_beyond_one_are_inside_the_axes_and_sizes_must_agree():
    ax = plot_spectrum(torch.tensor([[2.0, -1.0], [-1.0, 2.0]]))
    assert ax.get_ylim()[1] > 3
    with pytest.raises(ValueError, match="W mixes 8 workers and the topology has 4"):
        draw(ring(4), metropolis(ring(8)))


def test_the_command_prints_a_sheet_and_saves_the_figure(tmp_path, capsys):
    figure = tmp_path / "ring.png"
    assert main(["ring", "n=16", "--figure", str(figure)]) == 0
    out = capsys.readouterr().out
    assert "0.949253" in out
    assert "D² is not safe" in out
    assert figure.read_bytes()[:4] == b"\x89PNG"
    assert main(["base_graph", "n=6", "k=1", "--figure", str(tmp_path / "b.png")]) == 0
    assert main(["compare", "ring", "exponential", "base_graph", "n=8", "--figure", str(tmp_path / "c.png")]) == 0
    assert "exact after" in capsys.readouterr().out
    assert (tmp_path / "c.png").stat().st_size > 5000


def test_the_command_speaks_json(capsys):
    assert main(["geant", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["workers"] == 37
    assert row["gap"] == pytest.approx(0.0234886, abs=1e-6)
    assert main(["compare", "ring", "star", "n=8", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == {"ring", "star"}
    assert main(["ring", "n=1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["gap"] == 1
    assert main(["erdos_renyi", "n=6", "p=0.0", "allow_disconnected=true", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["gap"] == 0
    assert row["connected"] is False


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["torus", "n=7"], "n is 7"),
        (["ring", "m=7"], "it has no 'm'"),
        (["ring"], "missing"),
        (["Atlantis"], "unknown"),
        (["metropolis", "n=4"], "needs a graph"),
        (["n=4"], "name one graph"),
        (["ring", "star", "n=4"], "after `compare`"),
        (["slem"], "slem"),
    ],
)
def test_the_command_refuses_in_one_line(words, message, capsys):
    assert main(words) == 2
    out = capsys.readouterr().out
    assert message in out
    assert out.count("\n") == 1


def test_a_figure_that_cannot_be_saved_is_an_error_in_one_line(tmp_path, capsys):
    assert main(["ring", "n=4", "--figure", str(tmp_path / "none" / "x.png")]) == 2
    assert "error: [Errno 2] No such file" in capsys.readouterr().out


def test_files_of_every_kind(tmp_path):
    t = from_edges([(0, 1), (1, 2), (2, 3)], lengths=[1.0, 2.5, 3.0])
    (tmp_path / "a.txt").write_text("# km\n0 1 1.0\n1,2,2.5\n\n2\t3\t3\n")
    assert from_file(tmp_path / "a.txt") == t
    nx.write_graphml(nx.petersen_graph(), tmp_path / "p.graphml")
    assert from_file(tmp_path / "p.graphml") == from_networkx(nx.petersen_graph())
    A = nx.to_numpy_array(nx.path_graph(4))
    np.save(tmp_path / "a.npy", A)
    scipy.sparse.save_npz(tmp_path / "a.npz", scipy.sparse.csr_array(A))
    scipy.io.mmwrite(tmp_path / "a.mtx", scipy.sparse.coo_array(A))
    for name in ("a.npy", "a.npz", "a.mtx"):
        assert from_file(tmp_path / name) == path(4)
    (tmp_path / "names.csv").write_text("Oslo,Bern\nBern,Rome\n")
    assert from_file(tmp_path / "names.csv", directed=True).names == ("Oslo", "Bern", "Rome")
    places = from_edges([(3, 0), (0, 1), (1, 2)])
    nx.write_edgelist(nx.Graph([(3, 0, {"weight": 2}), (0, 1), (1, 2)]), tmp_path / "nx.edgelist")  # 3 0 {'weight': 2}
    for name, text in [
        ("titles.csv", "source,target\n3,0\n0,1\n1,2\n"),
        ("excel.csv", '\ufeff"a","b"\n"3","0"\n"0","1"\n"1","2"\n'),
    ]:
        (tmp_path / name).write_text(text, encoding="utf-8")
    for name in ("nx.edgelist", "titles.csv", "excel.csv"):
        assert from_file(tmp_path / name) == places
    (tmp_path / "towns.csv").write_text("From,To,km\nNew York,Oslo,5900\n")
    assert from_file(tmp_path / "towns.csv").names == ("New York", "Oslo")
    (tmp_path / "zoo.gml").write_text(
        'graph [ node [ id 1 label "None" ] node [ id 0 label "None" ] edge [ source 0 target 1 ] ]'
    )
    assert from_file(tmp_path / "zoo.gml") == path(2)
    (tmp_path / "few.edges").write_text("0 1\n")
    assert from_file(tmp_path / "few.edges", n=4).isolated == (2, 3)
    for name, text, message in [
        ("b.txt", "0 1 2 3\n", "line 1"),
        ("c.txt", "0 1 far\n", "is no number"),
        ("d.txt", "0 1 2\n1 2\n", "1 of 2 lines"),
        ("e.doc", "0 1\n", "ends in '.doc'"),
        ("f.csv", ",source,target\n0,0,1\n1,1,2\n", "line 1:  . source . target is no edge"),
        ("g.graphml", "0 1\n", "g.graphml is not read by networkx"),
    ]:
        (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match=message):
            from_file(tmp_path / name)
    with pytest.raises(ValueError, match="is no file"):
        from_file(tmp_path / "none.txt")
