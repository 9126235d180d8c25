"""Methods that need logits, features or extra layers: mixins that stand left of the user's LightningModule."""

import lightning_fcl.callbacks  # noqa: F401  (first: it imports models, whose presets are made of mixins)
from lightning_fcl.mixins.base import LossTermsMixin as LossTermsMixin
from lightning_fcl.mixins.base import StepOutputs as StepOutputs
from lightning_fcl.mixins.dual_branch import DualBranchMixin as DualBranchMixin
from lightning_fcl.mixins.embedding_forward import EmbeddingForwardMixin as EmbeddingForwardMixin
from lightning_fcl.mixins.feddecorr import FedDecorr as FedDecorr
from lightning_fcl.mixins.fedgela import FedGELA as FedGELA
from lightning_fcl.mixins.fedlmd import FedLMD as FedLMD
from lightning_fcl.mixins.fedntd import FedNTD as FedNTD
from lightning_fcl.mixins.flwf2t import FLwF2T as FLwF2T
from lightning_fcl.mixins.lwf import LwF as LwF
from lightning_fcl.mixins.moon import MOON as MOON
from lightning_fcl.mixins.multimodal_forward import MultimodalForwardMixin as MultimodalForwardMixin
from lightning_fcl.mixins.subspace_routing import SubspaceRoutingMixin as SubspaceRoutingMixin
