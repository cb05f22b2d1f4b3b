"""Figures and tables say what was measured: seeds are averaged, everything else is told apart or reported."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from experiments import compare as command
from experiments import records
from experiments.compare import Stat, compare

ROOT = Path(__file__).parents[1]
KEYS = "eval/average/accuracy,eval/mean/accuracy,eval/worst/accuracy,consensus/distance"


def config(seed=0, algorithm="DPSGD", topology="ring", **more) -> dict:
    settings = {"_target_": f"gossip.{algorithm}", "optimizer": {"lr": 0.1}, **more}
    graph = {"_target_": f"graphs.{topology}", "n": 16}
    return {"n": 16, "seed": seed, "algorithm": settings, "topology": graph, "task": {"seed": seed}, "track": "off"}


def write(
    folder: Path, setting: dict, rounds: int = 50, stop: int | None = None, gain=0.0, cost=1e6, choices=None, **odd
) -> Path:
    """A run whose accuracy climbs with the round to 0.8 + gain + seed/100, and which sends `cost` bits a round."""
    record = records.Writer(folder, records.header(setting, choices=choices or {}), planned=rounds)
    for k in range(0, (stop or rounds) + 1, 10):
        reached = (0.8 + gain + setting["seed"] / 100) * k / rounds
        row = {"round": k, "bits": cost * k, "megabytes": cost * k / 8e6, "seconds": k * (1 + setting["seed"])}
        row |= {
            "eval/average/accuracy": reached,
            "eval/mean/accuracy": reached * 0.9,
            "eval/worst/accuracy": reached / 2,
        }
        record.log(row | {"eval/average/loss": 2 - reached, "consensus/distance": 0.0 if k == 0 else 10 / k**3} | odd)
    if stop is None:
        record.finish()
    return folder


@pytest.fixture
def sweep(tmp_path):
    number = 0
    for algorithm, cost, gain in (("DPSGD", 1e6, 0.1), ("Choco", 2e4, 0.05), ("AllReduce", 9e5, 0.12)):
        for topology in ("ring", "torus"):
            for seed in (0, 1, 2):
                more = {"compressor": {"_target_": "gossip.TopK", "ratio": 0.01}} if algorithm == "Choco" else {}
                extra = 0.02 * (topology == "torus")
                write(tmp_path / str(number), config(seed, algorithm, topology, **more), gain=gain + extra, cost=cost)
                number += 1
    return tmp_path


def test_seeds_are_averaged_and_settings_are_told_apart(sweep):
    result = compare(sweep, x="megabytes,round", y=KEYS, by="algorithm,topology", target=0.9)
    names = [row["label"] for row in result.rows]
    assert names == [f"{a} {t}" for a in ("DPSGD", "Choco", "AllReduce") for t in ("ring", "torus")]
    first = result.rows[0]
    assert first["runs"] == 3
    assert first["eval/average/accuracy"] == Stat(pytest.approx(0.91), pytest.approx(0.01 / math.sqrt(3)), 3, 3)
    assert first["eval/worst/accuracy"].mean == pytest.approx(0.455)
    assert first["best eval/average/accuracy"].mean == pytest.approx(0.91)
    assert first["megabytes"].mean == pytest.approx(6.25)
    assert first["round to 0.9"] == Stat(50, 0, 3, 3)
    assert result.rows[2]["megabytes to 0.9"].n == 0
    assert result.notes == []
    curve = result.curves["DPSGD ring"]["round", "eval/average/accuracy"]
    assert curve.x == [0, 10, 20, 30, 40, 50]
    assert curve.y[-1] == pytest.approx(0.91)
    assert curve.error[-1] == pytest.approx(0.01 / math.sqrt(3))


@pytest.mark.parametrize(
    ("there", "names"), [(0, ["Choco TopK", "Choco Sign"]), (1, ["Choco TopK TopK", "Choco Sign Sign"])]
)
def test_a_compressor_is_named_once_unless_the_algorithm_has_another(tmp_path, there, names):
    for kind in ("TopK", "Sign"):
        own = {"_target_": f"gossip.{kind}", "ratio": 0.1}
        setting = config(algorithm="Choco", compressor=own) | {"compressor": own | {"ratio": 0.1 + there}}
        write(tmp_path / kind, setting)
    assert sorted(row["label"] for row in compare(tmp_path, by="algorithm,compressor").rows) == sorted(names)


def test_one_algorithm_on_several_graphs_has_several_colours(sweep):
    figure = compare(sweep, where={"algorithm": "Choco"}, by="algorithm,topology").figure
    assert len({line.get_color() for line in figure.axes[0].get_lines()}) == 2


def test_the_target_counts_the_runs_that_reach_it(tmp_path):
    for seed in (0, 5):
        write(tmp_path / str(seed), config(seed))
    row = compare(tmp_path, x="bits", target=0.82).rows[0]
    assert str(row["round to 0.82"]) == "50 (1/2)"
    assert row["bits to 0.82"].mean == 5e7
    row = compare(tmp_path, x="bits", y="eval/average/loss", target=1.5, figure=False).rows[0]
    assert row["round to 1.5"].mean == 35
    assert row["best eval/average/loss"].mean == pytest.approx(1.175)


def test_an_average_over_more_than_seeds_is_reported(sweep):
    (note, *_) = compare(sweep, by="algorithm", figure=False).notes
    assert note.startswith("DPSGD averages runs that differ in more than the seed (topology._target_: ")
    assert "graphs.ring, graphs.torus): name such a key in by=" in note


def test_settings_of_one_algorithm_are_never_merged(tmp_path):
    for k, (name, ratio) in enumerate((("TopK", 0.01), ("TopK", 0.1), ("Sign", None))):
        inner = {"_target_": f"gossip.{name}"} | ({"ratio": ratio} if ratio else {})
        write(tmp_path / str(k), config(0, "Choco", compressor=inner))
    write(tmp_path / "9", config(0))
    labels = [row["label"] for row in compare(tmp_path, figure=False).rows]
    assert labels == ["Choco TopK ratio=0.01", "Choco TopK ratio=0.1", "Choco Sign", "DPSGD"]
    write(tmp_path / "8", config(0, "Choco", compressor={"_target_": "gossip.RandK", "ratio": 0.5}, gamma=0.3))
    labels = [
        row["label"] for row in compare(tmp_path, where={"algorithm.compressor": "sign,randk"}, figure=False).rows
    ]
    assert labels == ["Choco Sign", "Choco RandK"]
    labels = [row["label"] for row in compare(tmp_path, by="algorithm.compressor.ratio", figure=False).rows]
    assert labels == [f"algorithm.compressor.ratio={v}" for v in ("0.01", "0.1", "None", "0.5")]


def test_components_are_called_what_they_were_chosen_as(tmp_path):
    """Several files of a group make one class; only what differs between runs of one choice is told besides."""
    clock = {"_target_": "gossip.Asynchronous", "geometric": False, "wait": True, "bound": None}
    swarm, topk = clock | {"geometric": True, "wait": False}, {"_target_": "gossip.TopK", "ratio": 0.1}
    runs = [({}, "lockstep"), (clock, "asynchronous"), (swarm, "swarm"), (swarm | {"bound": 3}, "swarm")]
    for k, (value, name) in enumerate(runs):
        setting = config(0, "Choco", compressor=topk) | {"clock": value, "compressor": topk}
        write(tmp_path / str(k), setting, choices={"clock": name, "compressor": "topk", "algorithm": "choco"})
    labels = ["lockstep", "asynchronous", "swarm", "swarm bound=3"]
    assert [row["label"] for row in compare(tmp_path, by="clock", figure=False).rows] == labels
    (row,) = compare(tmp_path, by="clock", where={"clock": "lockstep"}, figure=False).rows
    assert (row["label"], row["runs"]) == ("lockstep", 1)
    assert compare(tmp_path, where={"clock": "swarm"}, figure=False).rows[0]["runs"] == 2
    with pytest.raises(ValueError, match="clock=swam: the runs have clock=lockstep, asynchronous, swarm"):
        compare(tmp_path, where={"clock": "swam"})
    (note,) = compare(tmp_path, by="algorithm", figure=False).notes
    assert "(clock: asynchronous, lockstep, swarm; clock.bound: 3, None): name such a key" in note
    write(tmp_path / "9", config(0, "Choco", compressor={"_target_": "gossip.Sign"}) | {"clock": {}})
    labels = [row["label"] for row in compare(tmp_path, by="algorithm.compressor", figure=False).rows]
    assert labels == ["topk", "Sign"]  # of a record that does not tell, the class
    assert compare(tmp_path, where={"clock": "lockstep"}, figure=False).rows[0]["runs"] == 1


def test_runs_are_selected_by_config(sweep):
    rows = compare(sweep, where={"topology": "torus", "seed": "0,2"}, figure=False).rows
    assert [r["runs"] for r in rows] == [2, 2, 2]
    with pytest.raises(ValueError, match="no run has topology=star: the runs have topology=ring, torus"):
        compare(sweep, where={"topology": "star"})
    with pytest.raises(ValueError, match="'tagret' is neither an option nor a config key. Did you mean target"):
        compare(sweep, where={"tagret": "0.9"})


def test_incomplete_runs_are_named_and_left_out(tmp_path):
    write(tmp_path / "a", config(0))
    write(tmp_path / "b", config(1), stop=10)
    write(tmp_path / "c", config(0, "Choco"), stop=20)
    records.write_status(tmp_path / "d", {"status": "incompatible", "reason": "row 3 of W(0) sums to 1.2, not 1"})
    result = compare(tmp_path)
    assert [(r["label"], r["runs"]) for r in result.rows] == [("DPSGD", 1), ("Choco (round 20/50)", 1)]
    text = "\n".join(result.notes)
    assert f"{tmp_path / 'd'}: incompatible, left out: row 3 of W(0) sums to 1.2, not 1" in text
    assert f"DPSGD: {tmp_path / 'b'} is running, round 10/50, left out" in text
    assert f"Choco: {tmp_path / 'c'} is running, round 20/50, shown as far as it came" in text
    assert result.figure is not None
    assert "2 incomplete" in result.figure.get_suptitle()


def test_a_run_done_twice_is_no_second_seed(tmp_path):
    for name, gain in (("a", 0.0), ("b", 0.1)):
        write(tmp_path / name, config(0), gain=gain)
        lines = (tmp_path / name / records.METRICS).read_text().splitlines()
        head = json.loads(lines[0]) | {"started": f"2026-01-0{1 + (name == 'b')}"}
        (tmp_path / name / records.METRICS).write_text("\n".join([json.dumps(head), *lines[1:]]) + "\n")
    result = compare(tmp_path, figure=False)
    assert result.rows[0]["runs"] == 1
    assert result.rows[0]["eval/average/accuracy"].mean == pytest.approx(0.9)
    assert result.notes == [f"{tmp_path / 'b'}: 1 older run with the same config and seed left out"]


def test_a_broken_record_does_not_hide_the_others(tmp_path):
    write(tmp_path / "a", config(0))
    broken = write(tmp_path / "b", config(1)) / records.METRICS
    broken.write_text(broken.read_text().replace('"round": 20', '"round" 20'))
    result = compare(tmp_path, figure=False)
    assert result.rows[0]["runs"] == 1
    assert "line 4 is no JSON object" in result.notes[0]


def test_unknown_keys_name_what_is_near_and_what_there_is(sweep):
    with pytest.raises(
        ValueError, match=r"no run has 'eval/averge/accuracy'. Did you mean eval/average/accuracy.*consensus/distance"
    ):
        compare(sweep, y="eval/averge/accuracy")
    with pytest.raises(ValueError, match=r"no run has 'byts'. Did you mean bits"):
        compare(sweep, x="byts")
    with pytest.raises(
        ValueError, match=r"no run's config has the key 'algoritm'. Did you mean algorithm.* Keys: n, seed"
    ):
        compare(sweep, by="algoritm")
    with pytest.raises(ValueError, match="no runs in .*metrics.jsonl"):
        compare(
            sweep.parent / "test_compare_empty" if (sweep.parent / "test_compare_empty").mkdir() else ROOT / "graphs"
        )
    with pytest.raises(ValueError, match="does not exist: give folders"):
        compare(sweep / "none")


def test_eval_name_is_short_for_the_average_model(sweep):
    assert "eval/average/accuracy" in compare(sweep, y="eval/accuracy", figure=False).rows[0]


def test_links_are_followed_once(sweep, tmp_path_factory):
    home = tmp_path_factory.mktemp("runs")
    (home / "latest").symlink_to(sweep)
    (home / "today").symlink_to(sweep)
    assert len(command.find([home / "latest", home / "today"])[0]) == 18


def test_tables_in_text_markdown_and_csv(sweep):
    result = compare(sweep, x="megabytes", y=KEYS, by="algorithm,topology", target=0.9, figure=False)
    text = result.table().splitlines()
    assert len({len(line) for line in text if "─" in line}) == 1
    assert text[3].split()[:5] == ["DPSGD", "ring", "3", "0.9100", "±"]
    assert max(map(len, text)) < 170
    markdown = result.table("markdown").splitlines()
    assert markdown[0].startswith("| algorithm,topology | runs | eval/average/accuracy |")
    assert {line.count("|") for line in markdown} == {markdown[0].count("|")}
    csv = result.table("csv").splitlines()
    assert csv[0].startswith("label,runs,eval/average/accuracy,eval/average/accuracy s.e.,eval/average/accuracy n,")
    assert csv[1].split(",")[:2] == ["DPSGD ring", "3"]
    assert float(csv[1].split(",")[2]) == pytest.approx(0.91)
    with pytest.raises(ValueError, match="format=html"):
        result.table("html")


def test_curves_of_unequal_seconds_average_both_axes(tmp_path):
    for seed in (0, 1):
        write(tmp_path / str(seed), config(seed))
    curve = compare(tmp_path, x="seconds", figure=False).curves["DPSGD"]["seconds", "eval/average/accuracy"]
    assert curve.x == [0, 15, 30, 45, 60, 75]


def panels(result):
    assert result.figure is not None
    return [axes for axes in result.figure.axes if axes.get_xlabel()]


def test_axes_are_logarithmic_where_it_helps_and_zeros_are_marked(sweep):
    result = compare(sweep, x="megabytes,round", y="eval/average/accuracy,consensus/distance", by="algorithm")
    accuracy_mb, accuracy_round, consensus_mb, _ = panels(result)
    assert (accuracy_mb.get_xscale(), accuracy_round.get_xscale()) == ("log", "linear")
    assert (accuracy_mb.get_yscale(), consensus_mb.get_yscale()) == ("linear", "log")
    assert "without 0" in accuracy_mb.get_xlabel()
    assert "zeros at the lower edge" in consensus_mb.get_xlabel()
    assert all(v > 0 for line in consensus_mb.lines for v in line.get_ydata())
    linear = panels(compare(sweep, x="megabytes", y="consensus/distance", xscale="linear", yscale="linear"))[0]
    assert (linear.get_xscale(), linear.get_yscale()) == ("linear", "linear")
    with pytest.raises(ValueError, match="scale 'cubic'"):
        compare(sweep, xscale="cubic")


def test_all_zeros_and_what_diverged_can_be_drawn(tmp_path):
    write(tmp_path / "a", config(0), **{"consensus/distance": 0.0})
    write(tmp_path / "b", config(0, "Choco"), **{"consensus/distance": math.nan, "eval/average/loss": math.inf})
    result = compare(tmp_path, y="consensus/distance,eval/average/loss", yscale="log")
    assert panels(result)[0].get_yscale() == "linear"
    assert str(result.rows[1]["consensus/distance"]) == "nan"
    assert str(result.rows[1]["best consensus/distance"]) == "–"
    result.figure.savefig(tmp_path / "x.png")


def test_curves_differ_in_color_and_dash(tmp_path):
    for k in range(16):
        write(tmp_path / str(k), config(0, n_steps=k))
    (panel,) = panels(compare(tmp_path, by="algorithm.n_steps"))
    assert len({(line.get_color(), str(line.get_linestyle()), line.is_dashed()) for line in panel.lines}) >= 14


def test_with_two_keys_colour_is_the_first_and_dash_the_second(sweep):
    (panel,) = panels(compare(sweep, by="algorithm,topology"))
    assert len({line.get_color() for line in panel.lines}) == 3
    assert len({line.get_linestyle() for line in panel.lines}) == 2


def test_the_command_prints_the_table_and_writes_the_figure_without_a_display(sweep):
    code = (
        "import sys; from experiments import compare; status = compare.main(sys.argv[1:]);sys.exit(status or "
        "'matplotlib.pyplot' in sys.modules)"
    )
    arguments = ["x=bits,round", f"y={KEYS}", "by=algorithm", "topology=ring", "target=0.9"]
    environment = {k: v for k, v in os.environ.items() if k not in ("DISPLAY", "MPLBACKEND")}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, str(sweep), *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert f"figure: {sweep / 'compare.png'}" in done.stdout
    assert (sweep / "compare.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["x=bits"], "no folder is given"),
        (["{}", "target=high"], "target=high is no number"),
        (["{}", "out=figure.gif"], "out=figure.gif ends in .gif: use .png, .svg or .pdf"),
        (["{}", "format=html"], "format=html is not one of text"),
        (["{}", "--verbose"], "--verbose is no option"),
        (["{}/none"], "does not exist"),
        (["{}", "seed=0", "seed=1"], "seed= is given twice: separate several values by commas, seed=0,1"),
        (["{}", "y="], "y= is empty"),
        (["{}", "topology=ring", "out=/dev/null/figure.png"], "the figure cannot be written"),
    ],
)
def test_bad_arguments_are_one_line(sweep, capsys, arguments, words):
    assert command.main([a.format(sweep) for a in arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert words in error
    assert error.count("\n") == 1


def test_help_listing_and_vector_figures(sweep, capsys):
    assert command.main(["--help"]) == 0
    assert "key=value" in capsys.readouterr().out
    assert command.main([]) == 2
    capsys.readouterr()
    assert command.main([str(sweep), "--list"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("18 runs\naxes:    round, bits, megabytes, seconds\nmetrics: eval/average/accuracy")
    assert "seed (3 values)" in out
    for ending in ("svg", "pdf"):
        assert command.main([str(sweep), "topology=ring", f"out={sweep}/figures/a.{ending}", "format=markdown"]) == 0
        assert (sweep / "figures" / f"a.{ending}").stat().st_size > 1000
    capsys.readouterr()
    assert command.main([str(sweep), "topology=ring", "out=null", "format=csv"]) == 0
    assert "figure:" not in capsys.readouterr().out
