"""Pictures: the graph with its weights, the spectrum of W, and consensus predicted, bounded and measured. Needs matplotlib.

Colours are Okabe and Ito's, told apart by the colour-blind; line styles repeat what colours say.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from graphs import cayley
from graphs.convert import from_adjacency
from graphs.predict import consensus_bound, predict_consensus
from graphs.properties import checked, offence
from graphs.schedules import Schedule, as_schedule
from graphs.spectral import gap, slem, spectrum
from graphs.topology import Topology
from graphs.weights import metropolis, uniform

__all__ = ["draw", "layout", "plot_consensus", "plot_spectrum"]

BLUE, ORANGE, GREEN, RED, BLACK, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#222222", "#8c8c8c"
CYCLE = (BLUE, RED, GREEN, ORANGE, "#CC79A7", "#56B4E9", BLACK)
STYLES = ("-", "--", "-.", ":")


def _axes(ax: Any, size: tuple[float, float]) -> Any:
    if ax is not None:
        return ax
    import matplotlib.pyplot as plt

    return plt.subplots(figsize=size, layout="constrained")[1]


def layout(topology: Topology) -> np.ndarray:
    """(n, 2) places for drawing: the known positions, a circle for circulant graphs, else Kamada–Kawai from a circle."""
    n = topology.n
    turn = 2 * np.pi * np.arange(n) / n
    circle = np.stack([np.sin(turn), np.cos(turn)], 1)
    if topology.positions is not None:
        spots = topology.positions.numpy().copy()
        if np.abs(spots[:, 1]).max() <= 90:
            # a degree of longitude is shorter away from the equator
            spots[:, 0] *= np.cos(np.radians(spots[:, 1].mean()))
        return spots
    if n <= 3 or not topology.messages or cayley.group(uniform(topology)) == (n,):
        return circle
    import networkx as nx

    graph = topology.to_networkx().to_undirected()
    start = dict(enumerate(circle))
    if n <= 300 and nx.is_connected(graph):
        spots = nx.kamada_kawai_layout(graph, pos=start)
    else:
        spots = nx.spring_layout(graph, pos=start, seed=0)
    return np.array([spots[worker] for worker in range(n)])


def draw(mixing: Any, W: Any = None, *, ax: Any = None, labels: bool | None = None) -> Any:
    """The graph: workers as dots, messages as lines whose width is their weight, arrows where one way only.

    Args:
        mixing: a `Topology`, or a matrix W, whose non-zero entries are the edges.
        W: weights for the widths (default: Metropolis, or uniform if directed). Negative ones are red and dashed.
        ax: matplotlib axes; a new figure by default.
        labels: worker numbers or names; by default where there are at most 40. A label that finds no free place is left out.

    Returns the axes.
    """
    if not isinstance(mixing, Topology):
        W = checked(mixing)
        topology = from_adjacency((W.to_dense().t() != 0).fill_diagonal_(False))
    else:
        topology = mixing
    if W is None:
        W = metropolis(topology) if not topology.directed else uniform(topology)
    W = checked(W)
    if W.shape[0] != topology.n:
        raise ValueError(f"W mixes {W.shape[0]} workers and the topology has {topology.n}; give both the same n.")
    weight = W.to_dense()[topology.target, topology.source].numpy()
    ax = _axes(ax, (6, 6))
    spots, n = layout(topology), topology.n
    i, j = topology.edge_index.numpy()
    one_way = {(a, b) for a, b in zip(i.tolist(), j.tolist())}
    top = np.abs(weight).max() if len(weight) else 1.0
    dot = float(np.clip(1200 / n, 18, 220))
    from matplotlib.collections import LineCollection
    from matplotlib.patches import FancyArrowPatch

    both = np.array([(b, a) in one_way for a, b in zip(i.tolist(), j.tolist())], dtype=bool)
    keep = both & (i < j)
    crowd = float(np.clip(60 / max(1, len(weight)), 0.35, 1.0))
    for sign, colour, style in ((1, GREY, "solid"), (-1, RED, "dashed")):
        here = keep & (np.sign(weight) == sign)
        lines = np.stack([spots[i[here]], spots[j[here]]], 1)
        widths = 0.3 + (2.7 if both.all() else 1.5) * min(1.0, (50 / n) ** 0.5) * np.abs(weight[here]) / max(top, 1e-12)
        ax.add_collection(
            LineCollection(
                list(lines), linewidths=widths, colors=colour, linestyles=style, zorder=1, alpha=0.4 + 0.6 * crowd
            )
        )
    if (~both).any():
        for a, b, w in zip(i[~both], j[~both], weight[~both]):
            arrow = FancyArrowPatch(
                tuple(spots[a]),
                tuple(spots[b]),
                arrowstyle="-|>",
                mutation_scale=4 + 8 * crowd,
                shrinkA=np.sqrt(dot) / 2,
                shrinkB=np.sqrt(dot) / 2,
                color=GREY if w >= 0 else RED,
                linewidth=(0.3 + 1.5 * abs(w) / max(top, 1e-12)) * (0.5 + crowd / 2),
                alpha=0.4 + 0.6 * crowd,
                zorder=1,
            )
            ax.add_patch(arrow)
    alone = np.isin(np.arange(n), topology.isolated)
    ax.scatter(*spots[~alone].T, s=dot, color=BLUE, edgecolors="white", linewidths=0.6, zorder=2)
    ax.scatter(*spots[alone].T, s=dot, facecolors="white", edgecolors=RED, linewidths=1.2, zorder=2)
    ax.set_aspect("equal")
    ax.set_axis_off()
    ax.margins(0.12)
    if labels if labels is not None else n <= 40:
        _label(ax, spots, topology, dot)
    return ax


def _label(ax: Any, spots: np.ndarray, topology: Topology, dot: float) -> None:
    """Each label at the first of eight places around its dot, outward first, that touches no dot and no label; else none."""
    ax.autoscale_view()
    figure = ax.figure
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()
    points = ax.transData.transform(spots)
    radius = np.sqrt(dot) / 2 * figure.dpi / 72
    inside = topology.names is None and dot > 100
    taken: list[tuple[float, float, float, float]] = []
    if not inside:
        taken = [(x - radius, y - radius, x + radius, y + radius) for x, y in points]
    turns = np.pi / 4 * np.array([0, 4, 2, 6, 1, 3, 7, 5])
    away = points - points.mean(0)
    outward = np.arctan2(away[:, 1], away[:, 0])
    for worker in np.argsort(-topology.degree.numpy(), kind="stable"):
        text = topology.names[worker] if topology.names is not None else str(worker)
        if inside:
            ax.text(*spots[worker], text, ha="center", va="center", fontsize=7, color="white", zorder=3)
            continue
        mark = ax.text(0, 0, text, fontsize=7, color=BLACK, zorder=3, va="center", ha="center")
        box = mark.get_window_extent(renderer)
        w, h = box.width / 2 + 1, box.height / 2
        for turn in sorted(turns, key=lambda turn: -round(float(np.cos(turn - outward[worker])), 3)):
            x = points[worker][0] + np.cos(turn) * (radius + w + 1)
            y = points[worker][1] + np.sin(turn) * (radius + h + 1)
            frame = (x - w, y - h, x + w, y + h)
            if not any(frame[0] < c and a < frame[2] and frame[1] < d and b < frame[3] for a, b, c, d in taken):
                taken.append(frame)
                mark.set_position(ax.transData.inverted().transform((x, y)))
                break
        else:
            mark.remove()


def plot_spectrum(W: Any, *, ax: Any = None) -> Any:
    """Eigenvalues: falling curves on [−1, 1] if all matrices are symmetric, else points in the unit disc; SLEM in the legend.

    Args:
        W: a matrix, or several as {name: matrix}.
        ax: matplotlib axes; a new figure by default.
    """
    named = {"W": W} if not isinstance(W, Mapping) else W
    named = {name: checked(M) for name, M in named.items()}
    ax = _axes(ax, (6, 4.5))
    flat = all(offence(M, "symmetric") is None for M in named.values())
    for k, (name, M) in enumerate(named.items()):
        values, colour = spectrum(M).numpy(), CYCLE[k % len(CYCLE)]
        label = f"{name}: SLEM {slem(M):.4f}"
        if flat:
            place = np.linspace(0, 1, len(values)) if len(values) > 1 else np.zeros(1)
            marker = "o" if len(values) <= 64 else None
            ax.plot(place, values, STYLES[k % 4], color=colour, marker=marker, markersize=3, linewidth=1.2, label=label)
        else:
            ax.scatter(values.real, values.imag, s=18, color=colour, marker="osD^v"[k % 5], alpha=0.8, label=label)
    if flat:
        ax.axhline(0, color=GREY, linewidth=0.6)
        drawn = np.concatenate([(-1, 1), *(line.get_ydata() for line in ax.lines)])
        ends = drawn.min() - 0.05, drawn.max() + 0.05
        ax.set(xlabel="rank of the eigenvalue / n", ylabel="eigenvalue of W", ylim=ends)
    else:
        turn = np.linspace(0, 2 * np.pi, 200)
        ax.plot(np.cos(turn), np.sin(turn), color=GREY, linewidth=0.8)
        ax.set(xlabel="real part", ylabel="imaginary part", xlim=(-1.1, 1.1), ylim=(-1.1, 1.2 + 0.16 * len(named)))
        ax.set(xticks=(-1, -0.5, 0, 0.5, 1), yticks=(-1, -0.5, 0, 0.5, 1))
        ax.set_aspect("equal")
    ax.legend(frameon=False, loc="best" if flat else "upper center")
    return ax


def plot_consensus(mixing: Any, x0: Any = None, rounds: int = 100, *, measured: Any = None, ax: Any = None) -> Any:
    """The consensus distance (1/n) Σ‖x_i − x̄‖² per round: exact prediction, SLEM bound, and what was measured.

    Args:
        mixing: topology, matrix or schedule. The bound is drawn where it holds: symmetric and static.
        x0: the start, (n, …); by default normal numbers from a fixed seed.
        rounds: the length of the prediction.
        measured: a sequence of measured distances from round 0 on, drawn as dots.
        ax: matplotlib axes; a new figure by default.
    """
    schedule: Schedule = as_schedule(mixing)
    if x0 is None:
        x0 = torch.from_numpy(np.random.RandomState(0).standard_normal((schedule.n, 16)))
    ax = _axes(ax, (6, 4.5))
    curve = predict_consensus(schedule, x0, rounds).numpy()
    floor = 1e-16 * (float(curve[0]) or 1.0)  # zero has no place on a logarithmic axis
    below = bool((curve < floor).any())

    def shown(values: np.ndarray) -> np.ndarray:
        return np.clip(values, floor, 1e250)

    ax.semilogy(shown(curve), color=BLUE, linewidth=1.6, label="predicted, exact")
    if schedule.static and schedule.symmetric and schedule.doubly_stochastic:
        bound = consensus_bound(schedule(0), x0, rounds).numpy()
        ax.semilogy(shown(bound), "--", color=RED, linewidth=1.2, label=f"bound, gap {gap(schedule(0)):.3g}")
    if measured is not None:
        dots = torch.as_tensor(measured, dtype=torch.float64).detach().cpu().numpy()
        step = max(1, len(dots) // 40)
        below |= bool((dots < floor).any())
        ax.semilogy(
            np.arange(len(dots))[::step], shown(dots)[::step], "o", color=BLACK, markersize=3.5, label="measured"
        )
    if below:
        ax.axhline(floor, color=GREY, linewidth=0.6, linestyle=":", label=f"below {floor:.0e}, or 0")
    ax.set(xlabel="round", ylabel=r"consensus distance $\frac{1}{n}\sum_i \|x_i-\bar x\|^2$")
    ax.legend(frameon=False)
    return ax
