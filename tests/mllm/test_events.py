"""A LLaVA-like model that names events: what it is asked, its belief in each name, and rehearsal in three families."""

import pytest
import torch

from lightning_fcl import TSGA, EmbeddingReplay, FederatedTrainer, ModalityEWC
from lightning_fcl.callbacks import parameter_groups
from lightning_fcl.data import drawn_events, event_questions, event_stream
from lightning_fcl.exceptions import DatasetError, MisconfigurationError

transformers = pytest.importorskip("transformers")

from lightning_fcl.functional import Rehearsal  # noqa: E402
from lightning_fcl.mllm import EventInstructionModule, LoRA, answer_log_likelihood  # noqa: E402
from tests.helpers.families import make_family  # noqa: E402

KINDS = ["llava", "smolvlm", "qwen2_vl"]


@pytest.fixture(scope="module")
def posts():
    return event_questions(drawn_events(6, 2, size=28))


def make(kind, posts, **options):
    torch.manual_seed(0)
    return EventInstructionModule(*make_family(kind), names=posts.names, max_new_tokens=2, **options).eval()


def batch_of(module, posts, count=4):
    return module.collator([posts.train[index] for index in range(0, 6 * count, 6)])


def test_questions_hold_text_picture_and_name(posts):
    plain = drawn_events(6, 2, size=28)
    row = posts.train[7]
    asked, told = (turn["value"] for turn in row["conversations"])
    assert told == plain.names[plain.train[7][2]] == posts.names[posts.train.labels[7]]
    assert asked == f"<image>\n{plain.texts['train'][7]}\nWhich event is it?"
    assert row["image"].shape == (28, 28, 3)
    assert abs(row["image"].transpose(2, 0, 1) / 127.5 - 1 - plain.train[7][0].numpy()).max() < 0.005
    with pytest.raises(DatasetError, match=r"`posts` must hold the texts of each set, got none of \['train', 'test'\]"):
        event_questions(plain._replace(texts={}))


@pytest.mark.parametrize("kind", KINDS)
def test_lora_is_in_all_modalities_which_are_found_by_name(posts, kind):
    module = make(kind, posts)
    groups = parameter_groups(name for name, p in module.named_parameters() if p.requires_grad)
    assert set(groups) == {"vision", "language", "projector"}


@pytest.mark.parametrize("kind", KINDS)
def test_beliefs_of_embeddings_are_the_likelihoods_of_names(posts, kind):
    """With as many words as the prompt has, and one before the image, it is the model's own forward pass."""
    module = make(kind, posts)
    row = posts.train[0]
    prompt = module.collator.prompts([row])
    words = int((prompt["input_ids"] != module.multimodal_model.config.image_token_id).sum())
    module.text_length, module.tokens_before_image = (
        words,
        int((prompt["input_ids"][0] == module.multimodal_model.config.image_token_id).nonzero()[0]),
    )
    logits = module.forward_embeddings(*module.embeddings_of(module.collator([row])))
    for number in (0, 3):
        turns = [row["conversations"][0], {"from": "gpt", "value": posts.names[number]}]
        whole = module.collator([{**row, "conversations": turns}])
        if kind == "qwen2_vl":  # its positions have three axes, which embeddings alone do not tell
            assert logits[0, number].isfinite()
            continue
        torch.testing.assert_close(logits[0, number], answer_log_likelihood(module, whole)[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_rehearsal_teaches_the_language_model_alone(posts, kind):
    module = make(kind, posts)
    embeddings = tuple(one.detach() for one in module.embeddings_of(batch_of(module, posts)))
    assert len({len(one) for one in embeddings}) == 1
    assert embeddings[1].shape[1] == 32
    module.rehearsal = Rehearsal(embeddings, torch.full((4, 7), 1 / 7), 1.0)
    module.loss_terms(None, None)["replay"].backward()
    moved = {name for name, p in module.named_parameters() if p.grad is not None and p.grad.any()}
    assert moved
    assert set(parameter_groups(moved)) == {"language"}


def test_labels_are_the_events_numbers_and_strange_answers_are_refused(posts):
    module = make("llava", posts)
    batch = batch_of(module, posts)
    assert module.targets_of(batch).tolist() == [0, 1, 2, 3]
    batch["answers"][2] = "a whale"
    with pytest.raises(MisconfigurationError, match=r"`names` must hold every answer, got posts of \['a whale'\]"):
        module.targets_of(batch)
    with pytest.raises(MisconfigurationError, match="`names` must be two or more that differ"):
        EventInstructionModule(*make_family("llava"), names=["a", "a"])
    with pytest.raises(MisconfigurationError, match="`text_length` must be at least 2, got 1"):
        EventInstructionModule(*make_family("llava"), names=["a", "b"], text_length=1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:There is a performance drop", "ignore:fisher_diagonal runs sample by sample")
def test_fedcmm_trains_it(posts, tmp_path):
    module = make("llava", posts, lora=LoRA(rank=2, dropout=0.0, target=r".*(q_proj|linear_1)"))
    parts = [ModalityEWC(0.03, normalise="per_group", log_likelihood=answer_log_likelihood), EmbeddingReplay(budget=6)]
    trainer = FederatedTrainer(
        rounds=1,
        clients_per_round=2,
        run_dir=tmp_path,
        accelerator="cpu",
        devices=1,
        aggregator=TSGA(),
        callbacks=parts,
        score="val_acc",
        enable_progress_bar=False,
    )
    report = trainer.fit(module, event_stream(posts, clients=2, partition="iid", tasks=(4, 3), batch_size=4))
    assert report.accuracy.shape == (2, 2)
    assert "loss/replay" in (tmp_path / "metrics.csv").read_text()
