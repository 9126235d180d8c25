"""DISCO's dynamic knowledge organisation: the server keeps one subspace per task that it finds by itself."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import lightning as L
import torch
from torch import Tensor
from typing_extensions import override

from lightning_fcl._match import NameRule, name_matcher
from lightning_fcl.aggregators.router import Probe, Route, Router
from lightning_fcl.exceptions import FCLError, MisconfigurationError
from lightning_fcl.functional.identity_token import identity_token, token_cosines, update_token
from lightning_fcl.functional.subspace_routing import Routing, route_tokens
from lightning_fcl.models.subspace_lora import subspace_layers
from lightning_fcl.types import MethodCard, Params

_TOKEN = "identity token"


class SubspaceRouter(Router):
    r"""Routes every client to the LoRA subspace whose identity token resembles its own, or opens a new one.

    A round has two phases: clients send the mean feature of their instructions (a few kilobytes), the server compares
    it with the subspaces' tokens by one rule (:func:`~lightning_fcl.functional.route_tokens`), and only then a client
    gets the weights of its one subspace. Each subspace is averaged over its own clients, and its token is the running
    mean of theirs:

    .. math:: i^\star = \arg\max_i \cos(\mu_k, g_i), \quad \text{matched iff } \cos(\mu_k, g_{i^\star}) \ge \tau

    The log holds ``cosine/<i>/<j>`` for every pair of subspaces and ``round/slots``, their number. The module must be a
    :class:`~lightning_fcl.mixins.SubspaceRoutingMixin` with :func:`~lightning_fcl.models.add_subspaces` layers, which
    evaluates with all subspaces.

    Args:
        threshold: :math:`\tau`, a cosine. .9 fits the paper's CLIP encoder; for another one ask
            :func:`~lightning_fcl.functional.propose_threshold`.
        capacity: Most subspaces there may be; ``None`` for no limit.
        at_capacity: What happens to a client that matches none when all are taken: ``"nearest"`` trains the most
            similar one (logged), ``"skip"`` leaves the client out of the round, ``"raise"`` ends the run.
        shared: Trainable tensors beside the subspaces (a projector, a head), which all tasks share.

    Raises:
        MisconfigurationError: If an argument is out of range; before the first round, if the module has no subspaces
            or trains anything else that ``shared`` does not name.

    Source: Guo et al., "Federated Continual Instruction Tuning", ICCV 2025, dynamic knowledge organisation
    (https://arxiv.org/abs/2503.12897).

    Deviation: as :func:`~lightning_fcl.functional.route_tokens`: the server decides in every round, with one threshold.
    Subspaces are made when they are needed. The published code also trains the projector; here it is frozen unless
    ``shared`` names it.
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="DISCO",
        acts_on="server",
        paper="Guo et al., Federated Continual Instruction Tuning, ICCV 2025",
        url="https://arxiv.org/abs/2503.12897",
        functions=("identity_token", "route_tokens", "update_token", "activation_factors", "subspace_lora"),
        needs=("subspace layers", "identity features"),
        smoke={"threshold": 0.9},
    )

    def __init__(
        self,
        threshold: float = 0.9,
        *,
        capacity: int | None = None,
        at_capacity: Literal["nearest", "skip", "raise"] = "nearest",
        shared: NameRule = (),
    ) -> None:
        if not -1 <= threshold <= 1:
            raise MisconfigurationError(f"`threshold` must be a cosine in [-1, 1], got {threshold}.")
        if capacity is not None and capacity < 1:
            raise MisconfigurationError(f"`capacity` must be at least 1 or None, got {capacity}.")
        if at_capacity not in ("nearest", "skip", "raise"):
            raise MisconfigurationError(f'`at_capacity` must be "nearest", "skip" or "raise", got {at_capacity!r}.')
        self.threshold = threshold
        self.capacity = capacity
        self.at_capacity = at_capacity
        self.shared = shared

    @override
    def setup(self, pl_module: L.LightningModule, travelling: Collection[str]) -> None:
        check_subspaces(pl_module, travelling, self.shared, type(self).__name__)
        if not hasattr(pl_module, "identity_features"):
            raise MisconfigurationError(
                "`module` must say what its inputs ask for, but has no `identity_features(batch)`. Put "
                "`SubspaceRoutingMixin` in front of its base class."
            )

    @override
    def probe(self, pl_module: L.LightningModule, batches: Iterable[Any]) -> dict[str, Tensor]:
        encode: Callable[[Any], Tensor] = pl_module.identity_features  # type: ignore[assignment]
        features = [encode(batch) for batch in batches]
        if not features:
            raise FCLError("the client has no instructions to make an identity token of")
        return {_TOKEN: identity_token(torch.cat(features))}

    @override
    def init(self) -> dict[str, Any]:
        return {"tokens": None, "counts": []}

    @override
    def route(self, probes: Sequence[Probe], num_slots: int, state: Any, *, task: int) -> dict[int, Route]:
        bank: Tensor | None = state["tokens"]
        size = _expected_size(bank, probes)
        fitting = [probe for probe in probes if len(probe.tensors[_TOKEN]) == size]
        routes = {
            probe.client: Route(None, f"its identity token has {len(probe.tensors[_TOKEN])} numbers, the others {size}")
            for probe in probes
            if probe not in fitting
        }
        if not fitting:
            return routes
        tokens = torch.stack([probe.tensors[_TOKEN] for probe in fitting])
        counts = torch.tensor([probe.num_examples for probe in fitting])
        bank = tokens[:0] if bank is None else bank
        routing = route_tokens(tokens, counts, bank, self.threshold, self.capacity)
        routes.update({probe.client: self._route(routing, k, num_slots) for k, probe in enumerate(fitting)})
        return routes

    def _route(self, routing: Routing, k: int, num_slots: int) -> Route:
        slot, cosines = int(routing.slots[k]), routing.cosines[k]
        if not routing.forced[k]:
            return Route(slot, f"open subspace {slot}" if slot >= num_slots else "")
        near = f" (the nearest is {int(cosines.argmax())} at cosine {float(cosines.max()):.3f})" if num_slots else ""
        full = f"matches no subspace{near} and all {self.capacity} are taken"
        if self.at_capacity == "raise":
            raise FCLError(f"a client {full}. Raise `capacity`, lower `threshold`, or set `at_capacity`.")
        return Route(slot, f"{full}: forced into {slot}") if self.at_capacity == "nearest" else Route(None, full)

    @override
    def reset(self, pl_module: L.LightningModule) -> None:
        for layer in subspace_layers(pl_module).values():
            layer.reset_parameters()

    @override
    def update(
        self, members: Mapping[int, Sequence[Probe]], state: Any, logs: dict[str, float], *, task: int
    ) -> dict[str, Any]:
        tokens = [] if state["tokens"] is None else list(state["tokens"])
        counts = list(state["counts"])
        for slot, probes in sorted(members.items()):
            total = sum(probe.num_examples for probe in probes)
            mean = sum(probe.num_examples * probe.tensors[_TOKEN].double() for probe in probes) / total
            assert isinstance(mean, Tensor)
            if slot == len(tokens):
                tokens, counts = [*tokens, torch.zeros_like(mean, dtype=torch.float32)], [*counts, 0.0]
            tokens[slot], counts[slot] = update_token(tokens[slot], counts[slot], mean, total)
        bank = torch.stack(tokens)
        cosines = token_cosines(bank, bank).tolist()
        logs.update({f"cosine/{i}/{j}": cosines[i][j] for j in range(len(bank)) for i in range(j)})
        return {"tokens": bank, "counts": counts}

    @override
    def install(self, pl_module: L.LightningModule, slots: Sequence[Params], state: Any) -> None:
        install: Callable[..., None] = pl_module.install_subspaces  # type: ignore[assignment]
        install(slots, state["tokens"])


def check_subspaces(pl_module: L.LightningModule, travelling: Collection[str], shared: NameRule, rule: str) -> None:
    """Raise MisconfigurationError unless all that travels are subspaces and what ``shared`` names."""
    layers = subspace_layers(pl_module)
    if not layers or not hasattr(pl_module, "install_subspaces"):
        raise MisconfigurationError(
            f"`{rule}` needs a `SubspaceRoutingMixin` with subspace layers, got {type(pl_module).__name__}. Call "
            "`add_subspaces(model, targets)` in its constructor."
        )
    own = {f"{name}.lora_{factor}" for name in layers for factor in "AB"}
    match = name_matcher(shared)
    if stray := [name for name in travelling if name not in own and not match(name)]:
        raise MisconfigurationError(
            f"`{rule}` keeps weights per subspace, but {', '.join(stray[:3])} would travel too. Freeze parameters, "
            "leave buffers out by `share_buffers=False`, or name either in `shared=` to average it over all clients."
        )
    if missing := sorted(own - set(travelling)):
        raise MisconfigurationError(
            f"`payload` must let all subspaces travel, but leaves out {', '.join(missing[:3])}."
        )


def _expected_size(bank: Tensor | None, probes: Sequence[Probe]) -> int:
    if bank is not None:
        return bank.shape[1]
    sizes = Counter(len(probe.tensors[_TOKEN]) for probe in probes)
    return max(sizes, key=lambda size: (sizes[size], -size), default=0)
