"""`python -m graphs ring n=16`: the spectral sheet of a graph as a table, its picture as a file."""

import argparse
import ast
import difflib
import inspect
import io
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import graphs
from graphs.draw import CYCLE
from graphs.properties import entries

HELP = """
  python -m graphs ring n=16
  python -m graphs geant year=2012
  python -m graphs germany50 --json
  python -m graphs compare ring torus exponential base_graph n=64

A name is a function of `graphs` that makes a topology or a schedule, or a real network (graphs.real_names()). Arguments
are key=value; `compare` gives each function those that it knows.
"""


def make(name: str, options: dict[str, Any], strict: bool = True) -> graphs.Topology | graphs.Schedule:
    """The topology or schedule that `name` makes from the options."""
    function = getattr(graphs, name, None)
    if function is None or not inspect.isfunction(function):
        try:
            return graphs.real(name)
        except ValueError as error:
            near = difflib.get_close_matches(name, graphs.__all__, 1)
            other = f"did you mean {near[0]}?" if near else "graphs has no such function, and"
            raise ValueError(f"{other} {error}") from None
    known = inspect.signature(function).parameters
    if "topology" in known or "schedule" in known or "matrices" in known:
        raise ValueError(
            f"{name} needs a graph to work on; name a topology such as ring, or a schedule such as base_graph."
        )
    unknown = [key for key in options if key not in known]
    if strict and unknown:
        raise ValueError(f"{name} takes {', '.join(known) or 'no arguments'}; it has no {unknown[0]!r}.")
    try:
        made = function(**{key: value for key, value in options.items() if key in known})
    except TypeError as error:
        raise ValueError(f"{name}: {error}; it takes {', '.join(known)}.") from error
    if not isinstance(made, (graphs.Topology, graphs.Schedule)):
        raise ValueError(f"{name} makes neither a topology nor a schedule.")
    return made


def sheet(made: graphs.Topology | graphs.Schedule) -> dict[str, Any]:
    """The numbers of a topology (with its default weights) or a schedule, ready for JSON; None where one has no meaning."""
    row: dict[str, Any] = {"workers": made.n}
    if isinstance(made, graphs.Topology) and made.directed and not made.regular:
        schedule = graphs.static(graphs.uniform(made))
    else:
        schedule = graphs.as_schedule(made)
    if isinstance(made, graphs.Topology):
        row["messages a round"] = made.messages
        row["degree"] = [int(made.in_degree.min()), int(made.in_degree.max())]
        row["connected"] = made.connected
        row["diameter"] = made.diameter if made.connected and made.n <= 5000 else None
        if made.lengths is not None:
            row["longest link, km"] = round(float(made.lengths.max()), 1)
    else:
        heard = [int((lambda r, c: (r != c).sum())(*entries(made(k))[:2])) for k in made.rounds]
        row["messages a round"] = sum(heard) / len(heard)
        row["connected"] = made.contractive
        row["period"] = made.period
        row["exact after"] = made.exact_after
    kinds = ("doubly_stochastic", "row_stochastic", "column_stochastic")
    row["weights"] = next((kind.replace("_", " ") for kind in kinds if getattr(schedule, kind)), "none")
    row["symmetric"] = schedule.symmetric
    row["contraction a round"] = graphs.contraction(schedule)
    row["gap"] = 1 - row["contraction a round"]
    W = schedule(0) if schedule.period == 1 else None
    if W is not None:
        row["gap"] = graphs.gap(W)
        if schedule.symmetric:
            row["lambda 2"], row["lambda n"], row["dominant"] = graphs.extremes(W)
        time = graphs.mixing_time(W, 1e-3) if schedule.symmetric or made.n <= 1500 else None
        row["rounds to 1e-3"] = time if time is None or math.isfinite(time) else None
        if made.n <= 1500:
            row["kemeny constant"] = _finite(graphs.kemeny_constant(W))
            for gamma in (0.0, 0.9, 0.99):
                row[f"effective neighbours, gamma {gamma:g}"] = graphs.effective_neighbours(W, gamma)
    return row


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def table(rows: dict[str, dict[str, Any]]) -> str:
    """The sheets as columns of a text table."""
    keys = list(dict.fromkeys(key for row in rows.values() for key in row))
    cells = [["", *rows]] + [[key, *(_cell(row.get(key)) for row in rows.values())] for key in keys]
    widths = [max(len(line[c]) for line in cells) for c in range(len(cells[0]))]
    lines = [
        "  ".join([line[0].ljust(widths[0]), *(x.rjust(w) for x, w in zip(line[1:], widths[1:]))]) for line in cells
    ]
    return "\n".join([lines[0], "  ".join("-" * w for w in widths), *lines[1:]])


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return str(value[0]) if value[0] == value[-1] else f"{value[0]}-{value[-1]}"
    return str(value)


def picture(made: dict[str, Any], path: Path) -> None:
    """One graph: drawn beside its spectrum and its consensus curve. Several: their consensus curves in one figure."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if len(made) == 1:
        [(name, one)] = made.items()
        figure = Figure(figsize=(14, 4.6), layout="constrained")
        FigureCanvasAgg(figure)
        left, middle, right = figure.subplots(1, 3)
        if isinstance(one, graphs.Schedule):
            mean = sum(one(k).to_dense() for k in one.rounds) / len(one.rounds)
            graphs.draw(mean, ax=left)
            graphs.plot_spectrum({f"product of {len(one.rounds)} rounds": one.product()}, ax=middle)
            graphs.plot_consensus(one, ax=right)
        else:
            W = graphs.uniform(one) if one.directed else graphs.metropolis(one)
            graphs.draw(one, ax=left)
            graphs.plot_spectrum(W, ax=middle)
            graphs.plot_consensus(W, ax=right)
        left.set_title(name)
    else:
        figure = Figure(figsize=(7, 5), layout="constrained")
        FigureCanvasAgg(figure)
        ax = figure.subplots()
        for k, (name, one) in enumerate(made.items()):
            graphs.plot_consensus(one, ax=ax)
            for line in ax.lines[:]:
                if str(line.get_label()).startswith(("bound", "below")):
                    line.remove()
            ax.lines[-1].set(label=name, color=CYCLE[k % len(CYCLE)], linestyle=("-", "--", "-.", ":")[k % 4])
        ax.legend(frameon=False)
    figure.savefig(path, dpi=150)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, print, save; 2 and one paragraph on an error."""
    parser = argparse.ArgumentParser(
        "python -m graphs", epilog=HELP, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="+", metavar="NAME | key=value")
    parser.add_argument("--json", action="store_true", help="print JSON and save no figure")
    parser.add_argument(
        "--figure", metavar="FILE", help="where to save the figure (default: the names, in this folder)"
    )
    parser.add_argument("--no-figure", action="store_true", help="save no figure")
    given = parser.parse_args(arguments)
    names = [word for word in given.names if "=" not in word]
    try:
        options = dict(_option(word) for word in given.names if "=" in word)
        several = names[:1] == ["compare"]
        names = names[1:] if several else names
        if not names or (len(names) > 1 and not several):
            raise ValueError("name one graph, as in `python -m graphs ring n=16`, or several after `compare`.")
        made = {name: make(name, options, strict=not several) for name in names}
        rows = {name: sheet(one) for name, one in made.items()}
        if given.json:
            print(json.dumps(rows if several else next(iter(rows.values())), indent=2))
            return 0
        print(table(rows))
        if not several:
            [(name, one)] = made.items()
            W = (
                one(0)
                if isinstance(one, graphs.Schedule)
                else graphs.uniform(one)
                if one.directed
                else graphs.metropolis(one)
            )
            if not isinstance(one, graphs.Schedule) or one.period == 1:
                print("\n" + graphs.advise(W))
        if not given.no_figure:
            size = f"-{options['n']}" if "n" in options else ""
            path = Path(given.figure or "-".join(name.replace("/", "-") for name in names) + size + ".png")
            if max(one.n for one in made.values()) > 2000:
                print("\nno figure beyond 2000 workers")
            else:
                picture(made, path)
                print(f"\nfigure: {path}")
    except (ValueError, OSError) as error:
        print(f"error: {error}")
        return 2
    return 0


def _option(word: str) -> tuple[str, Any]:
    key, value = word.split("=", 1)
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return key, {"true": True, "false": False}.get(value.lower(), value)


if __name__ == "__main__":
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a console without λ gets question marks
    raise SystemExit(main())
