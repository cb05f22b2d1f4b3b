"""Real networks: every file loads, lengths and places are kept, names are found (graphs/real.py)."""

import json

import pytest

from graphs import abilene, arpanet, geant, nsfnet, real, real_names


def test_well_known_networks():
    assert [arpanet(year).n for year in (1969, 1970, 1971, 1972)] == [4, 9, 18, 29]
    assert [geant(year).n for year in (2001, 2009, 2010, 2012)] == [27, 34, 37, 37]
    assert nsfnet().connected
    assert {"NYCMng", "SNVAng"} <= set(abilene().names)
    assert 2000 < float(abilene().lengths.max()) < 2500  # Sunnyvale or Los Angeles to the next hop
    assert abilene().positions[:, 0].max() < 0  # west of Greenwich


def test_networks_without_geography_have_unit_lengths():
    assert set(real("atlanta").lengths.tolist()) == {1.0}


def test_names_are_found_in_any_case_or_refused():
    assert real("geant2012") == real("Geant2012") == real("topozoo/Geant2012")
    with pytest.raises(ValueError, match="'Atlantis' is unknown"):
        real("Atlantis")
    with pytest.raises(ValueError, match="no map of ARPANET in 1968"):
        arpanet(1968)


def test_a_folder_of_ones_own_comes_first(tmp_path, monkeypatch):
    (tmp_path / "topohub" / "mine").mkdir(parents=True)
    data = {
        "nodes": [{"id": 7, "name": "B", "pos": [1, 2]}, {"id": 3, "name": "A", "pos": [0, 0]}],
        "edges": [{"source": 7, "target": 3, "dist": 12.5}],
    }
    (tmp_path / "topohub" / "mine" / "pair.json").write_text(json.dumps(data))
    monkeypatch.setenv("GOSSIP_DATA", str(tmp_path))
    assert real_names() == ["mine/pair"]
    t = real("pair")
    assert t.names == ("A", "B")
    assert t.lengths.tolist() == [12.5, 12.5]
    assert t.positions.tolist() == [[0, 0], [1, 2]]


@pytest.mark.slow
def test_every_network_loads():
    for name in real_names():
        t = real(name)
        assert t.n > 1
        assert t.lengths.shape == (t.messages,)
