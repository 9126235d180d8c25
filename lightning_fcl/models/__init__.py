"""Small networks for tests, recipes and the field's benchmarks, and a plain LightningModule around them."""

from lightning_fcl.models.classifier import ImageClassifier as ImageClassifier
from lightning_fcl.models.lenet import LeNet as LeNet
from lightning_fcl.models.resnet import ResNet18 as ResNet18
from lightning_fcl.models.smallconv import SmallConvNet as SmallConvNet
