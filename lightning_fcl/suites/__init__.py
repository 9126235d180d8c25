"""Suites: every method on one stream with a paper's protocol, over seeds, in one table."""

from lightning_fcl.suites.methods import METHODS as METHODS
from lightning_fcl.suites.methods import Method as Method
from lightning_fcl.suites.protocols import SUITES as SUITES
from lightning_fcl.suites.run import Sizes as Sizes
from lightning_fcl.suites.run import run_suite as run_suite
from lightning_fcl.suites.suite import Suite as Suite
