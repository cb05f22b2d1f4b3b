"""Runs side by side: one table and one figure, mean ± standard error over seeds, from the records on disk alone.

    python -m experiments.compare RUNS… x=bits y=eval/average/accuracy by=algorithm

Runs whose configs differ in nothing but the seed are repetitions of one setting. Nothing else is ever averaged
silently: a note names the runs that are incomplete, were done twice, or differ in a key that is not in `by`.
"""

import difflib
import io
import math
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments import labels, metrics, records
from experiments.figure import Curve, draw
from experiments.records import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

USAGE = """python -m experiments.compare RUNS… [option=value …] [key=value …]

RUNS          folders, searched for runs at any depth: runs/latest, a sweep's folder, one run
x=round       axes of the figure: round, epoch, samples, bits, megabytes, seconds, simulated, or any metric
y=…           metrics of the table and the figure (default eval/average/accuracy, or what the runs have)
by=algorithm  config keys that tell curves apart, dots allowed: by=algorithm,topology or by=task.batch
target=0.9    adds what it took to reach this value of the first y: rounds, and each x
plot=…        metrics in the figure, where they are not all of y
out=…         the figure, .png, .svg or .pdf (default compare.png in the first folder); out=null for none
format=text   or markdown, or csv
xscale=auto   or linear, or log; yscale= alike
key=value     any other key selects runs by their config: topology=ring n=16 seed=0,1,2
--list        prints the metrics, axes and config keys that the runs offer

Several keys are separated by commas. An example:
    python -m experiments.compare runs/latest x=megabytes,round by=algorithm,topology target=0.9 \\
        y=eval/average/accuracy,eval/mean/accuracy,eval/worst/accuracy,consensus/distance
"""

_OPTIONS = ("x", "y", "by", "target", "plot", "out", "format", "xscale", "yscale")


@dataclass(frozen=True)
class Stat:
    """A mean over runs, its standard error (NaN for one run), how many runs have the value, and of how many."""

    mean: float
    error: float
    n: int
    of: int

    @classmethod
    def over(cls, values: Iterable[float | None]) -> "Stat":
        """Of the values that are there.

        >>> Stat.over([1.0, 3.0, None])
        Stat(mean=2.0, error=1.0, n=2, of=3)
        """
        every = list(values)
        there = [float(v) for v in every if v is not None]
        if not there:
            return cls(math.nan, math.nan, 0, len(every))
        mean = sum(there) / len(there)
        spread = len(there) > 1 and all(map(math.isfinite, there))
        return cls(
            mean, statistics.stdev(there) / math.sqrt(len(there)) if spread else math.nan, len(there), len(every)
        )

    def __str__(self) -> str:
        if not self.n:
            return "–"
        text = _number(self.mean, self.error)
        return text if self.n == self.of else f"{text} ({self.n}/{self.of})"


@dataclass
class Comparison:
    """What `compare` returns.

    Attributes:
        rows: the table: "label" → str, "runs" → int, and every other column → `Stat`.
        curves: label → (x, y) → `Curve`.
        notes: sentences that belong under the table.
        figure: a matplotlib figure, or None.
    """

    rows: list[dict[str, Any]]
    curves: dict[str, dict[tuple[str, str], Curve]]
    notes: list[str]
    figure: "Figure | None" = None
    by: str = ""

    def table(self, format: str = "text") -> str:
        """The rows as aligned "text", as "markdown", or as "csv" with mean, error and count in columns of their own."""
        if format not in ("text", "markdown", "csv"):
            raise ValueError(f"format={format} is not one of text, markdown, csv")
        columns = [c for c in self.rows[0] if c not in ("label", "runs")]
        if format == "csv":
            head = ["label", "runs", *(f"{c}{part}" for c in columns for part in ("", " s.e.", " n"))]
            body = [
                [r["label"], r["runs"], *(v for c in columns for v in (r[c].mean, r[c].error, r[c].n))]
                for r in self.rows
            ]
            return "\n".join(",".join(_quoted(v) for v in line) for line in [head, *body])
        head = [self.by, "runs", *columns]
        body = [[r["label"], str(r["runs"]), *(str(r[c]) for c in columns)] for r in self.rows]
        if format == "markdown":
            lines = [head, ["---", *("---:" for _ in head[1:])], *body]
            return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
        stacked = [name.split("\n") for name in _stack(head)]
        deep = max(map(len, stacked))
        heads = [[(parts + [""] * (deep - len(parts)))[k] for parts in stacked] for k in range(deep)]
        width = [max(len(line[k]) for line in [*heads, *body]) for k in range(len(head))]
        lines = [
            "  ".join(
                cell.ljust(w) if k == 0 else cell.rjust(w) for k, (cell, w) in enumerate(zip(line, width))
            ).rstrip()
            for line in [*heads, ["─" * w for w in width], *body]
        ]
        return "\n".join(lines)


def compare(
    runs: str | Path | Sequence[str | Path],
    x: str | Sequence[str] = "round",
    y: str | Sequence[str] | None = None,
    by: str | Sequence[str] = "algorithm",
    target: float | None = None,
    where: Mapping[str, str] | None = None,
    plot: str | Sequence[str] | None = None,
    figure: bool = True,
    xscale: str = "auto",
    yscale: str = "auto",
) -> Comparison:
    """Table and figure of all runs under some folders; options as in ``python -m experiments.compare --help``.

    The table holds for each group the final value of every y, the best of the first y over the run, the final x (what
    the run cost), and with a target the first evaluation at which the first y is at it or beyond: no interpolation.
    Raises ValueError where there are no runs, or for a key that no run has, with the keys that come near.
    """
    every, notes = find(runs)
    chosen = labels.choices(every)
    found = _selected(every, where or {}, chosen)
    found, more = _once(found)
    notes += more
    xs, bys = _keys(x), _keys(by)
    ys = [_metric(key, found) for key in (_keys(y) if y is not None else _default(found))]
    xs = [_metric(key, found) for key in xs]
    plotted = [_metric(key, found) for key in _keys(plot)] if plot is not None else ys
    for key in bys:
        _check_config_key(key, every)
    groups = _groups(found, bys, chosen)
    rows, curves, looks, incomplete = [], {}, {}, 0
    for words, members in groups.items():
        label = " ".join(words)
        broken = [r for r in members if not r.complete]
        incomplete += len(broken)
        if len(broken) < len(members):  # a curve must not look further, or a mean steadier, than it is
            members, fate, name = [r for r in members if r.complete], "left out", label
        else:
            fate, name = "shown as far as it came", f"{label} (round {', '.join(r.progress for r in broken)})"
        notes += [f"{label}: {r.folder} is {r.status['status']}, round {r.progress}, {fate}" for r in broken]
        notes += labels.mixed(label, members, bys, chosen)
        rows.append({"label": name, "runs": len(members), **_columns(members, xs, ys, target)})
        looks[name] = (words[0], " ".join(words[1:]))
        curves[name] = {(a, b): _curve(members, a, b) for a in xs for b in dict.fromkeys([*plotted, *ys])}
    result = Comparison(rows, curves, notes, by=",".join(bys))
    if figure:
        counts = sorted({row["runs"] for row in rows})
        many = "–".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
        title = "one run each" if counts == [1] else f"mean ± standard error over {many} runs"
        title += f"; {incomplete} incomplete" if incomplete else ""
        rule = target if plotted[:1] == ys[:1] else None
        result.figure = draw(curves, xs, plotted, title, rule, xscale, yscale, looks)
    return result


def find(runs: str | Path | Sequence[str | Path]) -> tuple[list[Run], list[str]]:
    """All runs under the folders, each once, in the order of their paths, and a sentence for each that is unusable."""
    folders = [Path(f) for f in ([runs] if isinstance(runs, (str, Path)) else runs)]
    found, notes = {}, []
    for folder in folders:
        if not folder.exists():
            raise ValueError(f"{folder} does not exist: give folders that hold runs, such as runs/latest.")
        inside = {p.parent.resolve(): p.parent for name in (records.METRICS, records.RUN) for p in folder.rglob(name)}
        for resolved, path in sorted(inside.items(), key=lambda item: _natural(item[0])):
            try:
                run = records.read(path)
            except ValueError as error:
                notes.append(f"{path}: left out: {error}")
                continue
            if run.rows and run.config:
                found[resolved] = run
            else:
                reason = str(run.status.get("reason") or "no evaluation on record").strip().splitlines()[-1]
                notes.append(f"{path}: {run.status['status']}, left out: {reason}")
    if not found:
        where = ", ".join(map(str, folders))
        notes = [f" {note}." for note in notes[:5]]
        raise ValueError(
            f"no runs in {where}: a run's folder has a {records.METRICS} with evaluations.{''.join(notes)}"
        )
    return list(found.values()), notes


def _natural(path: Path) -> list[Any]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", str(path))]


def _selected(runs: list[Run], where: Mapping[str, str], chosen: labels.Choices) -> list[Run]:
    for key, wanted in where.items():
        _check_config_key(key, runs, options=True)
        values = [v.strip().casefold() for v in wanted.split(",")]
        has = [records.setting(labels.get(r.config, key)) for r in runs]
        names = [(labels.called(key, v, chosen).casefold(), labels.short(v).casefold()) for v in has]
        runs = [r for r, name in zip(runs, names) if not set(name).isdisjoint(values)]
        if not runs:
            raise ValueError(
                f"no run has {key}={wanted}: the runs have {key}={', '.join(dict.fromkeys(name for name, _ in names))}."
            )
    return runs


def _once(runs: list[Run]) -> tuple[list[Run], list[str]]:
    """Of runs with the same config and seed only the newest counts: they are no repetitions."""
    newest: dict[str, list[Run]] = defaultdict(list)
    for run in sorted(runs, key=lambda r: (r.complete, str(r.header.get("started", "")))):
        newest[labels.dump(records.setting(run.config, seeds=True))].append(run)
    double = [same for same in newest.values() if len(same) > 1]
    notes = [
        f"{same[-1].folder}: {len(same) - 1} older {'runs' if len(same) > 2 else 'run'} with the same config and seed "
        "left out"
        for same in double
    ]
    keep = {id(same[-1]) for same in newest.values()}
    return [r for r in runs if id(r) in keep], notes


def _groups(runs: list[Run], by: Sequence[str], chosen: labels.Choices) -> dict[tuple[str, ...], list[Run]]:
    """Runs with equal values of the `by` keys, under words (one a key) that tell them from all others."""
    parts = []
    for key in by:
        values = [records.setting(labels.get(r.config, key)) for r in runs]
        told = [k for k in by if all(labels.get(r.config, f"{key}.{k}") in (None, r.config.get(k)) for r in runs)]
        names = labels.describe(values, key, chosen, told)
        words = all(isinstance(v, (Mapping, str)) for v in values)
        parts.append([name if words else f"{key}={name}" for name in names])
    groups: dict[tuple[str, ...], list[Run]] = {}
    for run, label in zip(runs, zip(*parts)):
        groups.setdefault(label, []).append(run)
    return groups


def _columns(members: list[Run], xs: list[str], ys: list[str], target: float | None) -> dict[str, Stat]:
    first = ys[0]
    better = max if metrics.higher_is_better(first) else min
    columns = {key: Stat.over(r.rows[-1].get(key) for r in members) for key in ys}
    finite = [[v for row in r.rows if (v := row.get(first)) is not None and not math.isnan(v)] for r in members]
    columns[f"best {first}"] = Stat.over(better(v) if v else None for v in finite)
    for key in xs:
        columns.setdefault(key, Stat.over(r.rows[-1].get(key) for r in members))
    if target is not None:
        reached = [_reached(r.rows, first, target) for r in members]
        for key in dict.fromkeys(["round", *xs]):
            columns[f"{key} to {target:g}"] = Stat.over(row.get(key) if row else None for row in reached)
    return columns


def _reached(rows: list[dict[str, Any]], key: str, target: float) -> dict[str, Any] | None:
    up = metrics.higher_is_better(key)
    return next((r for r in rows if (v := r.get(key)) is not None and (v >= target if up else v <= target)), None)


def _curve(members: list[Run], x: str, y: str) -> Curve:
    """Mean over runs at each round that all of them have evaluated; x is a mean too, where runs differ in it."""
    tables = [{row.get("round", i): row for i, row in enumerate(r.rows) if x in row and y in row} for r in members]
    shared = sorted(set.intersection(*(set(t) for t in tables)))
    at = [(Stat.over(t[k][x] for t in tables), Stat.over(t[k][y] for t in tables)) for k in shared]
    return Curve([a.mean for a, _ in at], [b.mean for _, b in at], [b.error for _, b in at])


def _default(runs: list[Run]) -> list[str]:
    have = [k for k in _available(runs) if k.startswith("eval/average/")]
    best = [k for k in have if metrics.higher_is_better(k)] or have
    return best[:1] or [next((k for k in _available(runs) if "/" in k), "round")]


def _available(runs: list[Run]) -> list[str]:
    return list(dict.fromkeys(k for r in runs for row in r.rows for k in row))


def _metric(key: str, runs: list[Run]) -> str:
    """The key itself, or `eval/<name>` for `eval/average/<name>`; an error with near matches where no run has it."""
    have = _available(runs)
    if key not in have and key.startswith("eval/") and f"eval/average/{key[5:]}" in have:
        return f"eval/average/{key[5:]}"
    if key not in have:
        raise ValueError(f"no run has {key!r}.{_near(key, have)} The runs have: {', '.join(have)}.")
    return key


def _check_config_key(key: str, runs: list[Run], options: bool = False) -> None:
    have = list(dict.fromkeys(k for r in runs for k in labels.paths(r.config)))
    if key not in have:
        what = f"{key!r} is neither an option nor a config key" if options else f"no run's config has the key {key!r}"
        top = ", ".join(k for k in have if "." not in k)
        raise ValueError(f"{what}.{_near(key, [*have, *_OPTIONS] if options else have)} Keys: {top}.")


def _near(key: str, have: Sequence[str]) -> str:
    near = difflib.get_close_matches(key, have, n=3, cutoff=0.5)
    near += [k for k in have if k not in near and k.endswith(key.rsplit("/", 1)[-1])][: 4 - len(near)]
    return f" Did you mean {', '.join(near)}?" if near else ""


def _keys(keys: str | Sequence[str]) -> list[str]:
    return [k.strip() for k in keys.split(",") if k.strip()] if isinstance(keys, str) else list(keys)


def _number(mean: float, error: float) -> str:
    """To the second digit of its error, and to four digits at most.

    >>> _number(0.91234, 0.0123), _number(0.91237, 0.00024), _number(3.2e-9, 1e-10), _number(300, 0)
    ('0.912 ± 0.012', '0.9124 ± 0.0002', '3.20e-09 ± 1.0e-10', '300')
    """
    if not math.isfinite(mean):
        return f"{mean}"
    if not math.isfinite(error) or error == 0:
        return f"{mean:.4g}"
    size = max(abs(mean), error)
    if size >= 1e5 or size < 1e-3:
        digits = max(1, math.floor(math.log10(size)) - math.floor(math.log10(error)) + 1)
        return f"{mean:.{digits}e} ± {error:.1e}"
    digits = max(0, min(1 - math.floor(math.log10(error)), 3 - math.floor(math.log10(size))))
    return f"{mean:.{digits}f} ± {error:.{digits}f}"


def _stack(heads: Sequence[str]) -> list[str]:
    return [
        h.removeprefix("eval/").replace("best eval/", "best ").replace("/", "\n").replace(" to ", "\nto ")
        for h in heads
    ]


def _quoted(value: Any) -> str:
    text = f"{value:.10g}" if isinstance(value, float) else str(value)
    return f'"{text}"' if "," in text else text


def _parse(arguments: Sequence[str]) -> tuple[list[str], dict[str, str], dict[str, str]]:
    folders, options, where = [], {}, {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals or Path(argument).exists():
            folders.append(argument)
            continue
        known = key.lstrip("-") in _OPTIONS
        into, key = (options, key.lstrip("-")) if known else (where, key)
        if key in into:
            raise ValueError(f"{key}= is given twice: separate several values by commas, {key}={into[key]},{value}")
        if not value:
            raise ValueError(f"{key}= is empty: give it a value, or leave it out")
        into[key] = value
    return folders, options, where


def listing(runs: list[Run]) -> str:
    """The keys that the runs offer for x, y and by, and how many values each config key takes."""
    have = _available(runs)
    flat = [records.flat(r.config) for r in runs]
    values = {k: len({labels.dump(f.get(k)) for f in flat}) for k in dict.fromkeys(k for f in flat for k in f)}
    vary = [f"{k} ({v} values)" for k, v in values.items() if v > 1]
    return "\n".join(
        [
            f"{len(runs)} runs",
            f"axes:    {', '.join(k for k in have if k in metrics.AXES)}",
            f"metrics: {', '.join(k for k in have if k not in metrics.AXES)}",
            f"config keys that differ: {', '.join(vary) or 'none'}",
        ]
    )


def main(arguments: Sequence[str], say: Callable[[str], None] = print) -> int:
    """The command; returns its exit status."""
    if not arguments or {"-h", "--help"} & set(arguments):
        say(USAGE)
        return 0 if arguments else 2
    rest = [a for a in arguments if a not in ("--list", "list=true")]
    try:
        folders, options, where = _parse(rest)
        if not folders:
            raise ValueError("no folder is given: the first words say where the runs are, such as runs/latest.")
        if strange := [f for f in folders if f.startswith("-")]:
            raise ValueError(f"{strange[0]} is no option: options are written key=value. See --help.")
        if len(rest) < len(arguments):
            say(listing(find(folders)[0]))
            return 0
        target = options.pop("target", None)
        form, out = options.pop("format", "text"), options.pop("out", str(Path(folders[0]) / "compare.png"))
        if form not in ("text", "markdown", "csv"):
            raise ValueError(f"format={form} is not one of text, markdown, csv")
        chosen: dict[str, Any] = dict(options)
        result = compare(folders, **chosen, target=_target(target), where=where, figure=out != "null")
        say(result.table(form))
        tell = say if form != "csv" else partial(print, file=sys.stderr)  # so that the table alone can be redirected
        for note in result.notes:
            tell(f"note: {note}")
        if result.figure is not None:
            path = Path(out)
            if path.suffix not in (".png", ".svg", ".pdf"):
                raise ValueError(f"out={out} ends in {path.suffix or 'nothing'}: use .png, .svg or .pdf")
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                result.figure.savefig(path, dpi=150)
            except OSError as error:
                raise ValueError(
                    f"the figure cannot be written ({error}): say where by out=FILE, or out=null"
                ) from None
            tell(f"figure: {path}")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _target(text: str | None) -> float | None:
    try:
        return None if text in (None, "null") else float(text)
    except ValueError:
        raise ValueError(f"target={text} is no number: give the value of the first y to be reached.") from None


if __name__ == "__main__":
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a console without ± and ─ gets question marks
    sys.exit(main(sys.argv[1:]))
