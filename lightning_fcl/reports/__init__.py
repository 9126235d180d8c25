"""From a run folder to figures and one self-contained page; tables over many runs."""

from lightning_fcl.reports.comparison import Comparison as Comparison
from lightning_fcl.reports.comparison import compare as compare
from lightning_fcl.reports.event_figures import event_figures as event_figures
from lightning_fcl.reports.event_figures import rounds_to_score as rounds_to_score
from lightning_fcl.reports.published import FEDADB_SILO as FEDADB_SILO
from lightning_fcl.reports.published import FEDCMM_PHEME as FEDCMM_PHEME
from lightning_fcl.reports.published import SPECIAL_DIGIT10 as SPECIAL_DIGIT10
from lightning_fcl.reports.published import PublishedTable as PublishedTable
from lightning_fcl.reports.published_fcit import FCIT as FCIT
from lightning_fcl.reports.published_fedcmm import FEDCMM as FEDCMM
from lightning_fcl.reports.rounds import class_table as class_table
from lightning_fcl.reports.rounds import curve_figures as curve_figures
from lightning_fcl.reports.rounds import round_scores as round_scores
from lightning_fcl.reports.rounds import save_figures as save_figures
from lightning_fcl.reports.rounds import speed_up as speed_up
from lightning_fcl.reports.run_report import RunReport as RunReport
from lightning_fcl.reports.run_report import installed_versions as installed_versions
