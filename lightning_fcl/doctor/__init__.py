"""What a run will cost and whether it will work, before it starts; ``lightning-fcl doctor`` prints it."""

from lightning_fcl.doctor.diagnose import diagnose as diagnose
from lightning_fcl.doctor.diagnosis import Diagnosis as Diagnosis
from lightning_fcl.doctor.diagnosis import Finding as Finding
from lightning_fcl.doctor.diagnosis import Table as Table
from lightning_fcl.doctor.from_config import estimate as estimate
from lightning_fcl.doctor.multimodal import check_tokens as check_tokens
