"""Methods that need logits, features or extra layers: mixins that stand left of the user's LightningModule."""

from lightning_fcl.mixins.base import LossTermsMixin as LossTermsMixin
from lightning_fcl.mixins.base import StepOutputs as StepOutputs
from lightning_fcl.mixins.dual_branch import DualBranchMixin as DualBranchMixin
from lightning_fcl.mixins.embedding_forward import EmbeddingForwardMixin as EmbeddingForwardMixin
from lightning_fcl.mixins.subspace_routing import SubspaceRoutingMixin as SubspaceRoutingMixin
