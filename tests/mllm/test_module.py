import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_fcl import FedAvg, FederatedTrainer
from lightning_fcl.aggregators import SubspaceRouter
from lightning_fcl.data.fcit import fcit_stream
from lightning_fcl.data.instructions import InstructionDataset, as_list
from lightning_fcl.exceptions import MisconfigurationError, MissingExtraError
from lightning_fcl.functional import fisher_diagonal
from lightning_fcl.mixins import SubspaceRoutingMixin
from lightning_fcl.mllm import LoRA, MultimodalInstructionModule, answer_log_likelihood
from lightning_fcl.mllm.lora import FEED_FORWARD
from lightning_fcl.mllm.module import warm_cosine
from lightning_fcl.models import add_subspaces
from tests.helpers.families import make_family
from tests.mllm.test_families import ROWS


def make(**options):
    torch.manual_seed(0)
    return MultimodalInstructionModule(*make_family("llava"), **{"max_new_tokens": 2, "lr": 1e-2, **options})


def trainable(module):
    return {name for name, parameter in module.named_parameters() if parameter.requires_grad}


def test_lora_sits_in_the_feed_forward_layers_of_the_language_model_alone():
    names = trainable(make())
    assert len(names) == 2 * 2 * 3  # two factors, two layers, three projections
    assert all("language_model" in name and ".mlp." in name and "lora_" in name for name in names)


def test_target_rank_projector_and_no_lora():
    module = make(lora=LoRA(rank=2, target=r".*vision_tower.*\.q_proj"), train_projector=True)
    names = trainable(module)
    assert {name for name in names if "lora_" not in name} == {
        f"model.base_model.model.model.multi_modal_projector.linear_{i}.{kind}"
        for i in (1, 2)
        for kind in ("weight", "bias")
    }
    factors = [p for name, p in module.named_parameters() if "lora_A" in name]
    assert {p.shape[0] for p in factors} == {2}
    assert trainable(make(lora=None)) == set()


def test_the_loss_is_the_mean_over_the_answers_tokens():
    module = make().eval()
    batch = module.on_before_batch_transfer(ROWS, 0)
    module.log = lambda *args, **kwargs: None
    logits = module(batch)[:, :-1].log_softmax(dim=-1)
    labels = batch["labels"][:, 1:]
    spoken = labels != -100
    by_hand = -logits[spoken].gather(1, labels[spoken][:, None]).mean()
    torch.testing.assert_close(module.training_step(batch, 0), by_hand)


@pytest.mark.parametrize("collate", [as_list, None])
def test_trainer_fit_learns_and_validates(collate):
    module = make(gradient_checkpointing=True, lr=0.05)
    rows = InstructionDataset([ROWS[0]] * 4)
    loader = DataLoader(rows, batch_size=2, collate_fn=collate or module.collator)
    trainer = L.Trainer(
        max_epochs=6,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(module, loader, loader)
    assert trainer.callback_metrics["train_loss"] < 4.4  # from 4.8; all but the adapters is random
    assert trainer.callback_metrics["val_acc"] in (0.0, 1.0)
    assert trainer.predict(module, loader)[0] == module.answer([ROWS[0]]) * 2


def test_answers_are_scored_by_their_own_metric():
    module = make()
    module._answers = [("exact", "yes", "yes"), ("exact", "no", "yes"), ("iou", "[0,0,1,1]", "[0,0,1,1]")]
    assert module.score() == pytest.approx(2 / 3)


def test_a_federated_run_over_two_tasks():
    stream = fcit_stream(tasks=["odd", "tallest"], clients=2, train_size=8, test_size=4, batch_size=4)
    module = make()
    frozen = {name: p.clone() for name, p in module.named_parameters() if not p.requires_grad}
    trainer = FederatedTrainer(rounds=1, clients_per_round=2, aggregator=FedAvg(), accelerator="cpu", run_dir="run")
    report = trainer.fit(module, stream)
    assert report.accuracy.shape == (2, 2)
    assert not report.accuracy[1].isnan().any()
    assert all(torch.equal(p, frozen[name]) for name, p in module.named_parameters() if name in frozen)
    assert any(p.abs().sum() > 0 for name, p in module.named_parameters() if "lora_B" in name)


def test_bfloat16_weights_train():
    model, processor = make_family("llava")
    module = MultimodalInstructionModule(model.to(torch.bfloat16), processor, max_new_tokens=2)
    module.log = lambda *args, **kwargs: None
    batch = module.on_before_batch_transfer(ROWS, 0)
    module.training_step(batch, 0).backward()
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    assert {parameter.dtype for parameter in trained} == {torch.float32}  # adapters stay exact, as PEFT has it
    assert all(torch.isfinite(parameter.grad).all() for parameter in trained)
    assert len(module.answer(ROWS)) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"warmup": 1.0}, r"`warmup` must be a share of the steps in \[0, 1\), got 1.0"),
        ({"max_new_tokens": 0}, "`max_new_tokens` must be at least 1, got 0"),
        ({"lora": LoRA(target="nothing")}, "`target` must match the full name of a linear layer, got 'nothing'"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(MisconfigurationError, match=message):
        make(**options)


def test_bad_lora_settings():
    with pytest.raises(MisconfigurationError, match="`rank` must be at least 1, got 0"):
        LoRA(rank=0)
    with pytest.raises(MisconfigurationError, match=r"`dropout` must lie in \[0, 1\), got 1.0"):
        LoRA(dropout=1.0)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    model, processor = make_family("qwen2_vl")
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def test_from_pretrained_gives_the_same_model(saved, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    module = MultimodalInstructionModule.from_pretrained(saved, local_files_only=True, max_new_tokens=2)
    again = MultimodalInstructionModule.from_pretrained(saved, dtype="bfloat16", lora=None, max_new_tokens=2)
    assert len(module.answer(ROWS)) == 2
    assert {p.dtype for p in again.parameters()} == {torch.bfloat16}
    assert type(module.processor).__name__ == "Qwen2VLProcessor"


def test_missing_files_and_weights_are_one_clear_error(saved, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(MisconfigurationError, match=r"`path` must be a folder with a model .*got 'nobody/nothing'"):
        MultimodalInstructionModule.from_pretrained("nobody/nothing", local_files_only=True)
    (tmp_path / "half").mkdir()
    for file in saved.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / "half" / file.name).write_bytes(file.read_bytes())
    with pytest.raises(MisconfigurationError, match=r"`path` must be a folder with a model .*no file named"):
        MultimodalInstructionModule.from_pretrained(tmp_path / "half")


def test_quantised_weights_need_bitsandbytes(saved):
    with pytest.raises(MissingExtraError, match=r"bitsandbytes.*pip install 'lightning-fcl\[quantize\]'"):
        MultimodalInstructionModule.from_pretrained(saved, bits=4)
    with pytest.raises(MisconfigurationError, match="`bits` must be 4, 8 or None, got 3"):
        MultimodalInstructionModule.from_pretrained(saved, bits=3)


def test_the_learning_rate_rises_and_falls_within_a_job():
    assert [warm_cosine(step, 1, 0.03) for step in (0, 1)] == [1.0, 1.0]  # a job of one step trains at full rate
    assert [round(warm_cosine(step, 100, 0.03), 2) for step in (0, 2, 3, 100)] == [0.33, 1.0, 1.0, 0.0]
    assert warm_cosine(7, float("inf"), 0.5) == 1.0


class Routed(SubspaceRoutingMixin, MultimodalInstructionModule):
    """DISCO's module."""


def test_disco_finds_both_tasks_by_their_wording():
    torch.manual_seed(0)
    module = Routed(*make_family("llava"), lora=None, lr=1e-2, max_new_tokens=2)
    add_subspaces(module, "re:" + FEED_FORWARD, rank=2)
    stream = fcit_stream(tasks=["odd", "tallest"], clients=2, train_size=8, test_size=4, batch_size=4)
    router = SubspaceRouter(threshold=0.99)
    trainer = FederatedTrainer(rounds=1, clients_per_round=2, aggregator=router, accelerator="cpu", run_dir="run")
    report = trainer.fit(module, stream)
    assert report.accuracy.shape == (2, 2)
    assert module.num_subspaces == 2


@pytest.mark.filterwarnings("ignore:There is a performance drop", "ignore:fisher_diagonal runs sample by sample")
def test_fisher_of_whole_answers():
    module = make()
    batch = module.on_before_batch_transfer(ROWS, 0)
    logits = module.eval()(batch)[:, :-1].log_softmax(dim=-1)
    labels = batch["labels"][:, 1:]
    spoken = [sum(logits[i, t, labels[i, t]] for t in range(labels.shape[1]) if labels[i, t] >= 0) for i in (0, 1)]
    torch.testing.assert_close(answer_log_likelihood(module, batch), torch.stack(spoken))
    fisher = fisher_diagonal(module, answer_log_likelihood, [batch])
    name, weight = next((n, p) for n, p in module.named_parameters() if "lora_B" in n)
    squares = [torch.autograd.grad(one, weight, retain_graph=True)[0].square() for one in spoken]
    torch.testing.assert_close(fisher[name], sum(squares) / 2, rtol=1e-4, atol=1e-8)
