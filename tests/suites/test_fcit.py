"""FCIT's methods on a tiny random LLaVA: what each trains, sends and brings, and one run of the flagship."""

import pytest

from lightning_fcl import FederatedTrainer
from lightning_fcl.data.fcit import fcit_stream
from lightning_fcl.federated.zero_shot import zero_shot
from lightning_fcl.models import MoELoRALinear, subspace_layers
from lightning_fcl.suites.fcit import METHODS, SERVER_STEPS, TITLES, fcit_module, fcit_rules, uplink

pytest.importorskip("transformers")
from tests.helpers.llava import save_random_llava


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_random_llava(tmp_path_factory.mktemp("llava"))


def make(folder, method="disco", **options):
    return fcit_module(method, folder, stages=4, rank=2, lr=1e-2, max_new_tokens=2, **options)


def trained(module):
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


def test_every_method_trains_lora_of_the_same_total_rank(folder):
    slot, whole, experts = (make(folder, name) for name in ("disco", "finetune", "moelora"))
    assert 4 * trained(slot) == trained(whole)
    gates = sum(m.gate.numel() for m in experts.modules() if isinstance(m, MoELoRALinear))
    assert trained(experts) - gates == trained(whole)
    names = subspace_layers(slot)
    assert len(names) == 3
    assert all("language_model" in name and ".mlp." in name for name in names)
    assert uplink(slot, 4)["here"] == 4 * trained(slot)
    assert uplink(slot, 4)["published"] > 4 * uplink(slot, 4)["here"]  # all slots and the projector


def test_each_method_has_a_title_and_what_it_brings(folder):
    assert set(METHODS) | set(SERVER_STEPS) == set(TITLES)
    module = make(folder, train_projector=True)
    for name in TITLES:
        rules = fcit_rules(name, module, threshold=0.7)
        assert bool(rules) == (name not in ("zero-shot", "joint", "finetune", "moelora"))
    router = fcit_rules("disco", module, threshold=0.7)["aggregator"].router
    assert router.threshold == 0.7
    assert router.shared
    assert all("projector" in name for name in router.shared)


@pytest.mark.slow
def test_disco_finds_the_tasks_of_a_stream_it_was_not_told(folder, tmp_path):
    stream = fcit_stream(tasks=["odd", "reach", "same"], train_size=24, test_size=6, clients=3, batch_size=8)
    module = make(folder)
    limit = module.propose_threshold([stream.eval_loader(0), stream.eval_loader(1)]).threshold
    machine = {"accelerator": "cpu", "devices": 1, "enable_progress_bar": False, "score": "val_acc"}
    rules = fcit_rules("disco", module, threshold=limit)
    trainer = FederatedTrainer(rounds=1, clients_per_round=2, run_dir=tmp_path / "run", **machine, **rules)
    base = zero_shot(
        FederatedTrainer(rounds=1, clients_per_round=1, run_dir=tmp_path / "zero", **machine), module, stream
    )
    report = trainer.fit(module, stream)
    assert module.num_subspaces == 3
    assert report.baseline.equal(base.accuracy[0])
    assert len(list((tmp_path / "run" / "adapters" / "task_02").glob("subspace_*/adapter_config.json"))) == 3
