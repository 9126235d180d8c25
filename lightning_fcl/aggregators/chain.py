"""One rule or several as one: a router, a reducer, then server steps."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_fcl.aggregators.base import Reducer, RoundStats, ServerStep
from lightning_fcl.aggregators.fedavg import FedAvg
from lightning_fcl.aggregators.router import Router
from lightning_fcl.exceptions import FCLError, MisconfigurationError

Rule: TypeAlias = Router | Reducer | ServerStep


class Chain:
    """A reducer followed by server steps, applied left to right; behind a router, once for each of its slots.

    Args:
        rules: At most one :class:`Router`, in first place; then at most one :class:`Reducer`; the rest are
            :class:`ServerStep` objects. Without a reducer the first step's own default is used (``FedAvg()``, or the
            plain mean for ``ServerProximal``).

    Raises:
        MisconfigurationError: If a rule is of another type or stands in the wrong place.

    Example:
        >>> from lightning_fcl.aggregators import FedAvg, ServerProximal
        >>> Chain(FedAvg(weighting="uniform"), ServerProximal(0.25)).reducer.weighting
        'uniform'

    Source: the order filter, mean, step, blend follows from the four methods' definitions; a chain of delta-to-delta
    maps is what optimiser libraries call gradient transformations.
    """

    def __init__(self, *rules: Rule) -> None:
        if not rules:
            raise MisconfigurationError("`Chain` must hold at least one rule, got none. Use `FedAvg()`.")
        self.router: Router | None = rules[0] if isinstance(rules[0], Router) else None
        self.rules: tuple[Rule, ...] = rules
        rules = rules[1:] if self.router is not None else rules
        for place, rule in enumerate(rules):
            if isinstance(rule, Router):
                raise MisconfigurationError(
                    f"`Chain` must hold its router in first place, got {type(rule).__name__} behind another rule. "
                    "It decides which clients the other rules see together."
                )
            if not isinstance(rule, Reducer | ServerStep):
                found = f"the class {rule.__name__}" if isinstance(rule, type) else type(rule).__name__
                hint = " It belongs in `callbacks=`." if hasattr(rule, "on_fit_start") else ""
                raise MisconfigurationError(
                    f"`aggregator` must be a Reducer, a ServerStep or a Chain of them, got {found}.{hint}"
                )
            if isinstance(rule, Reducer) and place > 0:
                raise MisconfigurationError(
                    f"`Chain` must hold its reducer in first place, got {type(rule).__name__} in place {place}. "
                    "A reducer merges updates; after it there is only one."
                )
            if getattr(rule, "closes_chain", False) and place + 1 < len(rules):
                raise MisconfigurationError(
                    f"`Chain` must hold {type(rule).__name__} in last place, got {type(rules[place + 1]).__name__} "
                    "behind it: it has to see the delta that is applied."
                )
        self.steps: list[ServerStep] = [rule for rule in rules if isinstance(rule, ServerStep)]
        first = [rule for rule in rules if isinstance(rule, Reducer)] or [s.default_reducer() for s in self.steps[:1]]
        self.reducer: Reducer = first[0] if first else FedAvg()
        apart = [step for step in self.steps if _sends_or_shows_others(type(step))]
        if self.router is not None and apart:
            raise MisconfigurationError(
                f"`Chain` must not hold {type(apart[0]).__name__} behind a router: what it sends or shows beside the "
                "global weights is kept once, not per slot."
            )

    @property
    def uses_square_norms(self) -> bool:
        """Whether a step asks for the clients' ``square_norms``."""
        return any(step.uses_square_norms for step in self.steps)

    def init(self, params: Tensor) -> list[Any]:
        """States of the steps before the first round."""
        return [step.init(params) for step in self.steps]

    def apply(
        self, params: Tensor, delta: Tensor, stats: RoundStats, states: Sequence[Any]
    ) -> tuple[Tensor, list[Any]]:
        """Run all steps and add the result to ``params``.

        Args:
            params: Global weights, shape ``[P]``.
            delta: What the reducer returned, shape ``[P]``, float64.
            stats: The round.
            states: One per step.

        Returns:
            New global weights in the dtype of ``params``, and the new states.
        """
        if not self.steps and stats.lone is not None:
            return stats.lone.clone(), []
        new_states: list[Any] = []
        for step, state in zip(self.steps, states, strict=True):
            delta, new_state = _checked(step, step.apply(params, delta, stats, state), params)
            new_states.append(new_state)
        return (params.double() + delta).to(params.dtype), new_states

    def broadcast(self, params: Tensor, states: Sequence[Any], *, task: int) -> Tensor:
        """The weights that clients start from, in the dtype of ``params``; itself if no step changes it."""
        sent = params
        for step, state in zip(self.steps, states, strict=True):
            sent = step.broadcast(sent, state, task=task)
        return sent.to(params.dtype)

    def output(self, params: Tensor, states: Sequence[Any]) -> Tensor:
        """The weights to evaluate, in the dtype of ``params``; itself if no step changes it."""
        shown = params
        for step, state in zip(self.steps, states, strict=True):
            shown = step.output(shown, state)
        return shown.to(params.dtype)


def _sends_or_shows_others(kind: type[ServerStep]) -> bool:
    return kind.broadcast is not ServerStep.broadcast or kind.output is not ServerStep.output


def _checked(step: ServerStep, result: Any, params: Tensor) -> tuple[Tensor, Any]:
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[0], Tensor):
        raise FCLError(f"`{type(step).__name__}.apply` must return (delta, state), got {type(result).__name__}.")
    delta = result[0]
    if delta.shape != params.shape or delta.dtype != torch.float64:
        raise FCLError(
            f"`{type(step).__name__}.apply` must return a float64 delta of shape {tuple(params.shape)}, got "
            f"{delta.dtype} of shape {tuple(delta.shape)}. Rounding comes last."
        )
    return delta, result[1]


def as_chain(aggregator: "Rule | Chain | Sequence[Rule]") -> Chain:
    """``aggregator`` as a chain.

    Args:
        aggregator: One rule, a chain, or a list of rules (as a YAML file holds it).

    Returns:
        The chain.
    """
    if isinstance(aggregator, Chain):
        return aggregator
    if isinstance(aggregator, list | tuple):
        return Chain(*aggregator)
    return Chain(aggregator)  # type: ignore[arg-type]


def chain_of(aggregator: "Rule | Chain | Sequence[Rule] | None", callbacks: Sequence[Any]) -> Chain:
    """``aggregator`` with what the client callbacks do on the server behind it.

    Args:
        aggregator: As for :func:`as_chain`; ``None`` for what the callbacks bring, or the plain ``FedAvg()``.
        callbacks: Client callbacks; those with ``server_rules`` add theirs, in their order.

    Returns:
        The chain.

    Raises:
        MisconfigurationError: If two callbacks bring a reducer and the user names none.
    """
    brought = [rule for callback in callbacks for rule in getattr(callback, "server_rules", list)()]
    routers, reducers, steps = (
        [rule for rule in brought if isinstance(rule, kind)] for kind in (Router, Reducer, ServerStep)
    )
    if aggregator is None:
        return Chain(*routers, *reducers, *steps) if brought else Chain(FedAvg())
    given = as_chain(aggregator)
    if given.router is not None:
        routers = []
    behind = sorted([*given.rules, *steps], key=lambda rule: getattr(rule, "closes_chain", False))  # stable
    return Chain(*routers, *behind) if routers or steps else given
