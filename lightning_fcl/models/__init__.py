"""Small networks for tests, recipes and the field's benchmarks, and a plain LightningModule around them."""

from lightning_fcl.models.classifier import ImageClassifier as ImageClassifier
from lightning_fcl.models.embedding_generator import EmbeddingGenerator as EmbeddingGenerator
from lightning_fcl.models.embedding_generator import fit_generator as fit_generator
from lightning_fcl.models.lenet import LeNet as LeNet
from lightning_fcl.models.moe_lora import MoELoRALinear as MoELoRALinear
from lightning_fcl.models.moe_lora import add_experts as add_experts
from lightning_fcl.models.presets import DualImageClassifier as DualImageClassifier
from lightning_fcl.models.presets import image_classifier as image_classifier
from lightning_fcl.models.prompt_encoders import ImageMean as ImageMean
from lightning_fcl.models.prompt_encoders import PromptEmbeddings as PromptEmbeddings
from lightning_fcl.models.prompt_encoders import TextEncoder as TextEncoder
from lightning_fcl.models.resnet import ResNet18 as ResNet18
from lightning_fcl.models.smallconv import SmallConvNet as SmallConvNet
from lightning_fcl.models.subspace_files import load_subspaces as load_subspaces
from lightning_fcl.models.subspace_files import save_subspaces as save_subspaces
from lightning_fcl.models.subspace_lora import SubspaceLinear as SubspaceLinear
from lightning_fcl.models.subspace_lora import add_subspaces as add_subspaces
from lightning_fcl.models.subspace_lora import subspace_layers as subspace_layers
from lightning_fcl.models.tiny_llava import TINY_LLAVA as TINY_LLAVA
from lightning_fcl.models.two_tower import EventClassifier as EventClassifier
from lightning_fcl.models.two_tower import LitTwoTower as LitTwoTower
from lightning_fcl.models.two_tower import LowRankLinear as LowRankLinear
from lightning_fcl.models.two_tower import TwoTower as TwoTower
from lightning_fcl.models.two_tower import event_log_likelihood as event_log_likelihood
from lightning_fcl.models.two_tower import pretrain_towers as pretrain_towers
