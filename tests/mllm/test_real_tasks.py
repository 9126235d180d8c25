import os
from pathlib import Path

import pytest

from lightning_fcl import FederatedTrainer
from lightning_fcl.data import fcit_stream
from lightning_fcl.mllm import MultimodalInstructionModule
from lightning_fcl.models import TINY_LLAVA

REAL = Path(os.environ.get("FCL_DATA", "nowhere")) / "visual_instruction"


@pytest.mark.skipif(not REAL.is_dir(), reason="needs $FCL_DATA/visual_instruction")
def test_the_tiny_model_runs_on_real_questions_end_to_end():
    tasks = ["imagenette", "easyvqa", "nlvr", "scienceqa"]
    stream = fcit_stream(data_dir=REAL, tasks=tasks, clients=2, train_size=8, test_size=4, batch_size=4)
    module = MultimodalInstructionModule.from_pretrained(TINY_LLAVA, lr=2e-3, max_new_tokens=6)
    trainer = FederatedTrainer(rounds=1, clients_per_round=2, accelerator="cpu", run_dir="run")
    report = trainer.fit(module, stream)
    assert report.accuracy.shape == (4, 4)
    assert 0 <= report.summary["last"] <= 1
