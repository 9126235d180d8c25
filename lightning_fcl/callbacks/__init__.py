"""Methods that act on gradients, weights or structure, and callbacks that act on the server."""

from lightning_fcl.callbacks.base import ContinualCallback as ContinualCallback
from lightning_fcl.callbacks.base import ServerCallback as ServerCallback
from lightning_fcl.callbacks.class_anchors import ClassAnchors as ClassAnchors
from lightning_fcl.callbacks.client_proximal import ClientProximal as ClientProximal
from lightning_fcl.callbacks.early_stopping import RoundEarlyStopping as RoundEarlyStopping
from lightning_fcl.callbacks.embedding_replay import EmbeddingReplay as EmbeddingReplay
from lightning_fcl.callbacks.ewc import EWC as EWC
from lightning_fcl.callbacks.fault_injector import FaultInjector as FaultInjector
from lightning_fcl.callbacks.fedcurv import FedCurv as FedCurv
from lightning_fcl.callbacks.feddyn import FedDyn as FedDyn
from lightning_fcl.callbacks.fedprox import FedProx as FedProx
from lightning_fcl.callbacks.fedsol import FedSOL as FedSOL
from lightning_fcl.callbacks.gem import AGEM as AGEM
from lightning_fcl.callbacks.gem import GEM as GEM
from lightning_fcl.callbacks.modality_drift import ModalityDrift as ModalityDrift
from lightning_fcl.callbacks.modality_ewc import ModalityEWC as ModalityEWC
from lightning_fcl.callbacks.modality_groups import parameter_groups as parameter_groups
from lightning_fcl.callbacks.o_lora import OLoRA as OLoRA
from lightning_fcl.callbacks.per_class import PerClassAccuracy as PerClassAccuracy
from lightning_fcl.callbacks.personal import PersonalEvaluation as PersonalEvaluation
from lightning_fcl.callbacks.sam import FedASAM as FedASAM
from lightning_fcl.callbacks.sam import FedSAM as FedSAM
from lightning_fcl.callbacks.save_subspaces import SaveSubspaces as SaveSubspaces
from lightning_fcl.callbacks.scaffold import SCAFFOLD as SCAFFOLD
from lightning_fcl.callbacks.si import SI as SI
