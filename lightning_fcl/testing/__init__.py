"""Tools for testing methods: CPU ranks on demand, DeepSpeed on CPU."""

from lightning_fcl.testing.deepspeed_cpu import CPUDeepSpeedStrategy as CPUDeepSpeedStrategy
from lightning_fcl.testing.pool import RankPool as RankPool
from lightning_fcl.testing.pool import run_on_ranks as run_on_ranks
