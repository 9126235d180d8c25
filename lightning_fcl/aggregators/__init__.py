"""Server-side rules: reducers merge the clients' updates, server steps apply the merged update."""

from lightning_fcl.aggregators.base import Gather as Gather
from lightning_fcl.aggregators.base import Reducer as Reducer
from lightning_fcl.aggregators.base import RoundStats as RoundStats
from lightning_fcl.aggregators.base import ServerStep as ServerStep
from lightning_fcl.aggregators.chain import Chain as Chain
from lightning_fcl.aggregators.fedavg import FedAvg as FedAvg
from lightning_fcl.aggregators.lora_mean import LoRAMean as LoRAMean
from lightning_fcl.aggregators.router import Probe as Probe
from lightning_fcl.aggregators.router import Route as Route
from lightning_fcl.aggregators.router import Router as Router
from lightning_fcl.aggregators.server_proximal import ServerProximal as ServerProximal
from lightning_fcl.aggregators.subspace_router import SubspaceRouter as SubspaceRouter
from lightning_fcl.aggregators.task_subspaces import MLoRA as MLoRA
from lightning_fcl.aggregators.task_subspaces import TaskSubspaces as TaskSubspaces
from lightning_fcl.aggregators.tsga import TSGA as TSGA
