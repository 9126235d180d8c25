"""FedGELA: one fixed classifier for all clients, each class scaled by what the client has of it."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from lightning_fcl._checks import check_positive
from lightning_fcl._heads import find_head
from lightning_fcl.exceptions import MisconfigurationError
from lightning_fcl.functional.fedgela import class_scale, simplex_etf
from lightning_fcl.mixins.base import LossTermsMixin
from lightning_fcl.mixins.class_counts import count_classes, widened
from lightning_fcl.types import MethodCard


class FrameHead(nn.Linear):
    """A head that does not learn: cosine-like logits with the directions of a simplex frame.

    The weight is frozen, so it neither trains nor travels. Features are normalised over the batch first; a batch of one
    example, which has no statistics, takes the running ones.

    Args:
        in_features: Width of the features, at least ``out_features``.
        out_features: Number of classes.
        temperature: Logits are divided by it.
        seed: Seed of the frame.

    Attributes:
        scale: Factor of each logit in training mode, shape ``(out_features,)``; ``None`` for 1.
    """

    def __init__(self, in_features: int, out_features: int, temperature: float, seed: int) -> None:
        super().__init__(in_features, out_features, bias=False)
        frame = simplex_etf(out_features, in_features, torch.Generator().manual_seed(seed))
        self.weight = nn.Parameter(frame, requires_grad=False)
        self.norm = nn.BatchNorm1d(in_features)
        self.temperature = temperature
        self.scale: Tensor | None = None

    @override
    def forward(self, input: Tensor) -> Tensor:
        """Logits of features of shape ``(B, in_features)``."""
        norm = self.norm
        if self.training and len(input) == 1:
            features = F.batch_norm(input, norm.running_mean, norm.running_var, norm.weight, norm.bias, eps=norm.eps)
        else:
            features = norm(input)
        logits = F.linear(features, self.weight) / self.temperature
        return logits * self.scale if self.training and self.scale is not None else logits


class FedGELA(LossTermsMixin):
    r"""Replaces the head by one fixed frame for all clients, and scales its logits by the client's share of each class.

    .. math:: z_c = \varphi_{i,c}\,\langle m_c, \hat{h} \rangle / \tau, \quad \varphi_{i,c} = C\,n_{i,c} / n_i

    Classes that a client lacks cannot push the classifier around, and leave their room to those that it has. The scale
    acts in training mode only: evaluations, and the teachers of other mixins, see the global head with
    :math:`\varphi = 1`. Labels are counted as in :class:`~lightning_fcl.FedLMD`.

    The head (``feature_module``, or the last ``nn.Linear``) is replaced at construction, after your own ``__init__``.

    Args:
        gela_temperature: :math:`\tau > 0`.
        gela_seed: Seed of the frame; all runs that exchange weights must use the same.

    Raises:
        MisconfigurationError: If ``gela_temperature`` is out of range, or the head is no ``nn.Linear`` with at least
            two outputs and at least as many inputs; before the first batch, if there are no labels to count.

    Source: Fan et al., "Federated Learning with Bilateral Curation for Partially Class-Disjoint Data", NeurIPS 2023
    (https://arxiv.org/abs/2405.18972).

    Deviation: the temperature also divides the logits in evaluation (the authors' code leaves it out there, which
    changes the loss but no prediction). A batch of one example is normalised by running statistics.
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="FedGELA",
        acts_on="structure",
        paper="Fan et al., NeurIPS 2023",
        url="https://arxiv.org/abs/2405.18972",
        functions=("simplex_etf", "class_scale"),
        needs=("a linear head", "counts of the client's labels"),
        smoke={"gela_temperature": 0.2},
        neutral=None,
    )

    def __init__(self, *args: Any, gela_temperature: float = 0.2, gela_seed: int = 0, **kwargs: Any) -> None:
        check_positive("gela_temperature", gela_temperature)
        super().__init__(*args, **kwargs)
        self.gela_temperature = gela_temperature
        self.gela_seed = gela_seed
        self.feature_module, old = find_head(self, self.feature_module)
        if not isinstance(old, nn.Linear) or not 2 <= old.out_features <= old.in_features:
            raise MisconfigurationError(
                "FedGELA must find a head `nn.Linear` with at least two outputs and at least as many inputs, got "
                f"{old}. Widen the features, or name the head in the class attribute `feature_module`."
            )
        new = FrameHead(old.in_features, old.out_features, gela_temperature, gela_seed)
        self.set_submodule(self.feature_module, new.to(old.weight.device, old.weight.dtype))

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        head = self.find_head()
        assert isinstance(head, FrameHead)
        head.scale = class_scale(widened(count_classes(self.trainer), head.out_features)).to(head.weight)

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        head = self.find_head()
        assert isinstance(head, FrameHead)
        head.scale = None
