"""The shared types: what a tree of parameters is, what a client sends back, what a method card says."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor

Params: TypeAlias = Mapping[str, Tensor]
"""Tensors by dotted name, as ``dict(module.named_parameters())`` gives them."""

Metrics: TypeAlias = dict[str, float]
"""Logged numbers by tag."""


@dataclass(frozen=True, kw_only=True)
class ClientUpdate:
    """What one client sends to the server after one job.

    Args:
        client: Id of the client that trained.
        task: Task (stage) of the job, counted from 0.
        round: Round inside the task, counted from 0.
        num_examples: Training examples behind the update; the weight of a sample-weighted mean.
        tensors: The client's new values (not deltas) of every tensor that travels, by dotted name.
        metrics: Means over the job of what the client logged.
        extra: What callbacks attached by ``upload``, keyed by the callback's ``state_key``.
        flat: The same values as one vector in the layout's order when they are known to be untouched; else ``None``.
    """

    client: int
    task: int
    round: int
    num_examples: float
    tensors: Params
    metrics: Metrics = field(default_factory=dict)
    extra: dict[str, dict[str, Any]] = field(default_factory=dict)
    flat: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class MethodCard:
    """What a method says about itself; docs and the conformance tests read it from the class.

    Args:
        name: The field's name of the method, e.g. ``"EWC"``.
        acts_on: One of ``"gradient"``, ``"loss"``, ``"weights"``, ``"data"``, ``"structure"``, ``"server"``.
        paper: Authors, title, venue and year.
        url: Link to the paper.
        functions: Names in :mod:`lightning_fcl.functional` that hold its maths.
        needs: What it needs beyond plain federated averaging, e.g. ``("task boundary",)``.
        smoke: Constructor arguments that the conformance tests use.
        neutral: Constructor arguments with which it must equal FedAvg, or ``None`` if there are none.
    """

    name: str
    acts_on: str
    paper: str
    url: str
    functions: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    smoke: Mapping[str, Any] = field(default_factory=dict)
    neutral: Mapping[str, Any] | None = None
