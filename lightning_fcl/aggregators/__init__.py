"""Server-side rules: reducers merge the clients' updates, server steps apply the merged update."""

from lightning_fcl.aggregators.base import Gather as Gather
from lightning_fcl.aggregators.base import Reducer as Reducer
from lightning_fcl.aggregators.base import RoundStats as RoundStats
from lightning_fcl.aggregators.base import ServerStep as ServerStep
from lightning_fcl.aggregators.chain import Chain as Chain
from lightning_fcl.aggregators.fedavg import FedAvg as FedAvg
from lightning_fcl.aggregators.server_proximal import ServerProximal as ServerProximal
from lightning_fcl.aggregators.tsga import TSGA as TSGA
