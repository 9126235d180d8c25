"""From a run folder to figures and one self-contained page; tables over many runs."""

from lightning_fcl.reports.compare import Comparison as Comparison
from lightning_fcl.reports.run_report import RunReport as RunReport
from lightning_fcl.reports.run_report import installed_versions as installed_versions
