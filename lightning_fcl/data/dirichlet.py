"""Partitioners that draw shares from a Dirichlet: label skew, quantity skew, and label skew over few classes."""

from dataclasses import KW_ONLY, dataclass

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from lightning_fcl.data.labels import IntArray
from lightning_fcl.data.partition import Examples, Partitioner, check_at_least
from lightning_fcl.exceptions import DatasetError


@dataclass(frozen=True)
class LabelDirichlet(Partitioner):
    r"""Label skew: each class is shared among the clients by one Dirichlet draw.

    .. math:: p_k \sim \mathrm{Dirichlet}(\alpha \mathbf{1}_K) \quad \text{for each class } k

    Classes in ascending order: shuffle the class; draw its shares; if ``balance``, set the share of each client that
    already holds N / K examples or more to zero and renormalise; cut at the floors of the cumulative shares.

    Args:
        alpha: Concentration, above 0; small is skewed, large is even.
        balance: Stop filling a client that holds its even share N / K, so that sizes stay comparable. ``False`` is the
            plain draw, in which sizes are skewed as well.
        min_examples: Fewest examples per client.

    Source: Lee et al., "Preservation of the Global Knowledge by Not-True Distillation in Federated Learning", NeurIPS
    2022, LDA split of the code (https://arxiv.org/abs/2106.03097); the plain draw is that of Hsu et al., 2019
    (https://arxiv.org/abs/1909.06335), read per class over clients.

    Deviation: one draw and a repair (``min_examples``) in the place of drawing again until every client has ten
    examples. If no open client has a share left (tiny ``alpha``), one open client at random takes the class.
    """

    alpha: float = 0.5
    _: KW_ONLY
    balance: bool = True
    min_examples: int = 1

    def __post_init__(self) -> None:
        _check_alpha(self.alpha)

    @override
    def __call__(self, examples: Examples, clients: int, rng: np.random.Generator) -> IntArray:
        owner = np.empty(len(examples), dtype=np.int64)
        held = np.zeros(clients, dtype=np.int64)
        for label in np.unique(examples.labels):
            members = rng.permutation(np.flatnonzero(examples.labels == label))
            shares = rng.dirichlet(np.full(clients, self.alpha))
            if self.balance:
                shares = _only(held < len(examples) / clients, shares, rng)
            sizes = _cut(shares, len(members))
            owner[members] = np.repeat(np.arange(clients), sizes)
            held += sizes
        return owner


@dataclass(frozen=True)
class QuantityDirichlet(Partitioner):
    r"""Quantity skew: client sizes are one Dirichlet draw, labels stay mixed.

    .. math:: (n_1, \dots, n_K) / N \sim \mathrm{Dirichlet}(\alpha \mathbf{1}_K)

    Args:
        alpha: Concentration, above 0; small is skewed, large is even.
        min_examples: Fewest examples per client.

    Source: the data split of the FCIT benchmark's code (github.com/Ghy0501/FCIT at 9b10259).

    Deviation: no example is thrown away (sizes are floors of the cumulative shares, not of each share), and a repair
    (``min_examples``) takes the place of drawing again.
    """

    alpha: float = 1.0
    _: KW_ONLY
    min_examples: int = 1

    def __post_init__(self) -> None:
        _check_alpha(self.alpha)

    @override
    def __call__(self, examples: Examples, clients: int, rng: np.random.Generator) -> IntArray:
        sizes = _cut(rng.dirichlet(np.full(clients, self.alpha)), len(examples))
        return rng.permutation(np.repeat(np.arange(clients), sizes))


@dataclass(frozen=True)
class ExtendedDirichlet(Partitioner):
    r"""Few classes per client, then each class shared among its holders by one Dirichlet draw.

    Clients in random order take the classes that the fewest clients hold so far (ties at random), so the numbers of
    holders differ by at most one. Each holder of a class gets one example of it; the rest follows the shares.

    Args:
        classes_per_client: Classes that each client holds, C.
        alpha: Concentration of the shares within a class, above 0.
        min_examples: Fewest examples per client.

    Source: Li & Lyu, "Convergence Analysis of Sequential Federated Learning on Heterogeneous Data", NeurIPS 2023,
    appendix on the extended Dirichlet strategy (https://arxiv.org/abs/2311.03154).

    Deviation: classes are dealt greedily and one example per holder is set aside, in the place of drawing again
    until all clients have enough. The repair (``min_examples``) may give a client a class more.
    """

    classes_per_client: int = 2
    _: KW_ONLY
    alpha: float = 0.5
    min_examples: int = 1

    def __post_init__(self) -> None:
        check_at_least("classes_per_client", self.classes_per_client, 1)
        _check_alpha(self.alpha)

    @override
    def __call__(self, examples: Examples, clients: int, rng: np.random.Generator) -> IntArray:
        classes = np.unique(examples.labels)
        self._check(len(classes), clients)
        held = np.zeros((clients, len(classes)), dtype=bool)
        for client in rng.permutation(clients):
            ties = rng.random(len(classes))
            held[client, np.lexsort((ties, held.sum(axis=0)))[: self.classes_per_client]] = True
        owner = np.empty(len(examples), dtype=np.int64)
        for column, label in enumerate(classes):
            members = rng.permutation(np.flatnonzero(examples.labels == label))
            holders = rng.permutation(np.flatnonzero(held[:, column]))
            first = np.arange(len(holders)) < len(members)  # one each, as far as they go
            rest = _cut(rng.dirichlet(np.full(len(holders), self.alpha)), len(members) - int(first.sum()))
            owner[members] = np.repeat(holders, first + rest)
        return owner

    def _check(self, classes: int, clients: int) -> None:
        if not classes / clients <= self.classes_per_client <= classes:
            raise DatasetError(
                f"`classes_per_client` must be at most the {classes} classes of the task, and large enough that "
                f"{clients} clients hold them all, got {self.classes_per_client}."
            )


def _check_alpha(alpha: float) -> None:
    if not 0 < alpha < float("inf"):
        raise ValueError(f"`alpha` must be above 0 and finite, got {alpha}. For even shares use partition='iid'.")


def _only(open_: NDArray[np.bool_], shares: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.float64]:
    """Shares of the open clients alone, summing to 1."""
    shares = np.where(open_, shares, 0.0)
    if not shares.any():
        shares[rng.choice(np.flatnonzero(open_))] = 1.0
    return shares / float(shares.sum())


def _cut(shares: NDArray[np.float64], size: int) -> IntArray:
    """Sizes between the floors of the cumulative shares; the last client with a share takes the rest."""
    ends = np.floor(np.cumsum(shares) * size).astype(np.int64)
    ends[np.flatnonzero(shares)[-1] :] = size  # the cumulative sum may end at 1 - 1e-16
    return np.diff(np.minimum(ends, size), prepend=0)
