"""A schedule answers "what was W at round k?": a pure function of k with a period and computed properties."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from graphs.properties import Incompatible, aperiodic, checked, csr, matrix, offence, solid, strongly_connected
from graphs.topology import Topology, sized, whole
from graphs.weights import metropolis, uniform

__all__ = ["Schedule", "as_schedule", "cycle", "one_peer_exponential", "static"]

REMEMBERED = 64  # matrices kept by a schedule that never repeats


@dataclass(frozen=True, eq=False)
class Schedule:
    """W as a function of the round: `schedule(k)` is the mixing matrix of round k, (n, n) float64, dense or sparse COO.

    Args:
        n: workers.
        make: k → W. Pure: called again with the same k it gives the same matrix.
        period: schedule(k) is the same tensor object as schedule(k + period); None if the rounds never repeat.
        horizon: how many rounds the properties look at when there is no period.
        moment: () → E[Wᵀ(I − J)W] of one random round, (n, n), where a closed form is known; `contraction` reads it.

    The properties are computed from the matrices of one period (or of the first `horizon` rounds) and cached;
    `offence(name)` says who breaks one. Tolerance 1e-7, see `graphs.properties`. The schedules of this package can be
    pickled, and so sent to other processes.

    >>> from graphs import metropolis, ring
    >>> s = static(metropolis(ring(4)))
    >>> s.doubly_stochastic, s.symmetric, s.static, s.contractive, s(7) is s(0)
    (True, True, True, True, True)
    """

    n: int
    make: Callable[[int], Tensor]
    period: int | None = 1
    horizon: int = 64
    moment: Callable[[], Tensor] | None = None
    _known: dict[int, Tensor] = field(default_factory=dict, repr=False)

    def __call__(self, k: int) -> Tensor:
        k = whole("the round k", k, 0)
        if self.period is not None:
            k %= self.period
        W = self._known.get(k)
        if W is None:
            W = self.make(k)
            if self.period is None and len(self._known) >= REMEMBERED:
                self._known.pop(next(iter(self._known)))
            self._known[k] = W
        return W

    def __getstate__(self) -> dict[str, Any]:
        # matrices are made again where it arrives
        return {"_known": {}} | {name: getattr(self, name) for name in ("n", "make", "period", "horizon", "moment")}

    @property
    def rounds(self) -> range:
        """The rounds that the properties look at: one period, or the first `horizon`."""
        return range(self.horizon if self.period is None else self.period)

    @cached_property
    def digest(self) -> str:
        """A hash of the matrices of a period, or of the first 64 rounds: equal for schedules that mix alike.

        >>> from graphs import metropolis, path, ring
        >>> ring(4).n == path(4).n, static(metropolis(ring(4))).digest == static(metropolis(path(4))).digest
        (True, False)
        """
        digest = hashlib.blake2b(digest_size=8)
        for k in range(min(self.period or 64, 64)):
            W = self(k)
            coo = (W if W.is_sparse else W.to_sparse_coo()).coalesce()
            digest.update(coo.indices().numpy().tobytes() + coo.values().numpy().tobytes())
        return digest.hexdigest()

    def offence(self, name: str) -> str | None:
        """None if the property holds, else a sentence naming the round, the offender and its value.

        Properties: those of `graphs.properties.offence`, "static" and "contractive".

        >>> static(torch.tensor([[0.9, 0.3], [0.1, 0.7]])).offence("doubly_stochastic")
        'row 0 of W(0) sums to 1.2, not 1'
        """
        if name not in self._offences:
            if name == "static":
                found = next((f"W({k}) differs from W(0)" for k in self.rounds if not _equal(self(k), self(0))), None)
            elif name == "contractive":
                found = self._standstill()
            else:
                found = next(filter(None, (offence(self(k), name, f"W({k})") for k in self.rounds)), None)
            self._offences[name] = found
        return self._offences[name]

    @cached_property
    def _offences(self) -> dict[str, str | None]:
        return {}

    @property
    def row_stochastic(self) -> bool:
        """Every W sends a constant to itself: rows sum to one."""
        return self.offence("row_stochastic") is None

    @property
    def column_stochastic(self) -> bool:
        """Every W preserves the sum: columns sum to one."""
        return self.offence("column_stochastic") is None

    @property
    def doubly_stochastic(self) -> bool:
        """Rows and columns sum to one: the average is preserved and agreed upon."""
        return self.offence("doubly_stochastic") is None

    @property
    def symmetric(self) -> bool:
        """Every W equals its transpose."""
        return self.offence("symmetric") is None

    @property
    def nonnegative(self) -> bool:
        """No W has a negative weight."""
        return self.offence("nonnegative") is None

    @property
    def static(self) -> bool:
        """All rounds use the same W."""
        return self.offence("static") is None

    @property
    def contractive(self) -> bool:
        """Repeating the period drives every disagreement to zero and lets every worker's data reach all: strongly
        connected and aperiodic (with negative weights: second largest modulus below one)."""
        return self.offence("contractive") is None

    def map(self, change: Callable[[Tensor], Tensor]) -> "Schedule":
        """The schedule of change(W) for the W of every round, with the same period."""
        return Schedule(self.n, partial(_changed, self, change), self.period, self.horizon)

    def product(self, rounds: int | None = None) -> Tensor:
        """W(L−1) ⋯ W(1) W(0), dense (n, n): what L rounds do; L defaults to the rounds the properties look at."""
        P = torch.eye(self.n, dtype=torch.float64)
        for k in range(len(self.rounds) if rounds is None else rounds):
            P = self(k) @ P
        return P

    @cached_property
    def exact_after(self) -> int | None:
        """The fewest rounds from 0 whose product is exactly 11ᵀ/n (to 1e-12), or None: finite-time averaging.

        Judged on four random vectors, which no other product averages except with probability zero. None, too, for a
        schedule that never repeats.

        >>> one_peer_exponential(8).exact_after, one_peer_exponential(6).exact_after
        (3, None)
        """
        x = torch.from_numpy(np.random.RandomState(0).standard_normal((self.n, 4)))
        mean = x.mean(0)
        if self.n == 1:
            return 0
        if self.period is None:
            return None
        for k in self.rounds:
            x = self(k) @ x
            if float((x - mean).abs().max()) < 1e-12:
                return k + 1
        return None

    def _standstill(self) -> str | None:
        if self.n == 1:
            return None
        if not self.nonnegative:
            from graphs.spectral import slem

            rate = slem(self.product() if len(self.rounds) > 1 else self(0))
            return (
                None
                if rate < 1
                else f"the second largest modulus over {_rounds(self.rounds)} is {rate:.10g}, not below 1"
            )
        patterns = [solid(csr(self(k))) for k in self.rounds]
        for pattern in patterns:
            pattern.data[:] = 1
        union = sum(patterns[1:], patterns[0])
        if not strongly_connected(union):
            return f"the union of {_rounds(self.rounds)} does not connect the {self.n} workers"
        if all(bool((pattern.diagonal() > 0).all()) for pattern in patterns):
            return None
        over = patterns[0]
        for pattern in patterns[1:]:
            over = pattern @ over
            over.data[:] = 1
        if not strongly_connected(over):
            return f"the product of {_rounds(self.rounds)} does not connect the {self.n} workers"
        if not aperiodic(over):
            return "the walk is periodic (bipartite, or a cycle without self weights); use graphs.lazy(W) = (W + I)/2"
        return None


def _rounds(rounds: range) -> str:
    return f"{len(rounds)} round{'s' if len(rounds) > 1 else ''}"


def _listed(matrices: Sequence[Tensor], k: int) -> Tensor:
    return matrices[k]


def _changed(schedule: Schedule, change: Callable[[Tensor], Tensor], k: int) -> Tensor:
    return change(schedule(k))


def half_from(n: int, shifts: Sequence[int], k: int) -> Tensor:
    """W of the round in which i averages its own with that of i − shifts[k]; the identity for one worker."""
    i = torch.arange(n)
    if n == 1:
        return matrix(i, i, torch.ones(1), 1)
    rows, columns = torch.cat([i, i]), torch.cat([i, (i - shifts[k]) % n])
    return matrix(rows, columns, torch.full((2 * n,), 0.5, dtype=torch.float64), n)


def _equal(A: Tensor, B: Tensor) -> bool:
    if A is B:
        return True
    difference = (A - B) if A.is_sparse == B.is_sparse else A.to_dense() - B.to_dense()
    values = difference.coalesce().values() if difference.is_sparse else difference
    return not values.numel() or float(values.abs().max()) == 0


def static(W: Any) -> Schedule:
    """The same W in every round.

    Args:
        W: (n, n), a tensor (dense or sparse), array or scipy sparse matrix; `ValueError` unless square, floating and
            finite. Kept as float64.

    >>> static(torch.eye(3)).offence("contractive")
    'the union of 1 round does not connect the 3 workers'
    """
    W = checked(W).clone()  # what the caller writes into his later has no part in the schedule
    return Schedule(W.shape[0], partial(_listed, (W,)), 1)


def cycle(matrices: Sequence[Any]) -> Schedule:
    """These matrices in turn, again and again; the period is their number.

    >>> from graphs import metropolis, path, ring
    >>> s = cycle([metropolis(ring(4)), metropolis(path(4))])
    >>> s.period, s.static, s(3) is s(1)
    (2, False, True)
    """
    Ws = [checked(W).clone() for W in matrices]
    if not Ws:
        raise ValueError("cycle([]) has no rounds; give at least one mixing matrix.")
    sizes = {W.shape[0] for W in Ws}
    if len(sizes) > 1:
        raise ValueError(f"the matrices of a cycle have sizes {sorted(sizes)}; all must mix the same n workers.")
    return Schedule(Ws[0].shape[0], partial(_listed, tuple(Ws)), len(Ws))


def one_peer_exponential(n: int) -> Schedule:
    """Round k: every worker sends to i + 2^(k mod τ) and averages what it gets with its own, τ = ⌈log₂ n⌉.

    One message per worker and round, doubly stochastic, not symmetric. Exact averaging after τ rounds, in any order,
    when n is a power of two; only approximate otherwise (n = 6: ‖P − J‖₂ = 0.2165 after 3 rounds). Source: Ying et
    al. 2021, arXiv 2110.13363; Assran et al. 2019, arXiv 1811.10792.

    >>> s = one_peer_exponential(4)
    >>> s.product(2).unique().tolist(), s.period, s.doubly_stochastic
    ([0.25], 2, True)
    """
    n = sized(n)
    shifts = [1 << k for k in range((n - 1).bit_length())]
    return Schedule(n, partial(half_from, n, shifts), max(1, len(shifts)))


def as_schedule(mixing: Any) -> Schedule:
    """What a user calls mixing, as a schedule: a `Topology`, a matrix or a `Schedule`.

    A topology gets Metropolis weights if undirected, uniform ones if directed and regular; a directed irregular one
    is refused with `Incompatible`, because no rule is right for every algorithm there. A matrix is checked (square,
    floating, finite) and used in every round.

    >>> from graphs import exponential, ring
    >>> as_schedule(ring(5)).symmetric, as_schedule(exponential(6)).symmetric
    (True, False)
    """
    if isinstance(mixing, Schedule):
        return mixing
    if not isinstance(mixing, Topology):
        if isinstance(mixing, (Tensor, np.ndarray, list, tuple)) or hasattr(mixing, "tocoo"):
            return static(mixing)
        raise ValueError(f"{mixing!r} is no mixing; give a graphs.Topology, a square matrix or a graphs.Schedule.")
    if not mixing.directed:
        return static(metropolis(mixing))
    if mixing.regular:
        return static(uniform(mixing))
    ins, outs = mixing.in_degree, mixing.out_degree
    raise Incompatible(
        f"a directed graph with in-degrees {int(ins.min())} to {int(ins.max())} and out-degrees {int(outs.min())} to "
        f"{int(outs.max())} has no weights that suit every algorithm; pass "
        "graphs.push(topology) to a push-sum algorithm (SGP), or graphs.uniform(topology) where row sums suffice."
    )
