from itertools import combinations

import torch
from torch import nn

from lightning_fcl.data import DRAWN_TASKS, drawn_instructions
from lightning_fcl.data.instructions import question_of
from lightning_fcl.mllm import MultimodalInstructionModule, QuestionEmbeddings
from lightning_fcl.models import TINY_LLAVA


class Letters:
    """A tokenizer of the letters a to h."""

    def __call__(self, texts, add_special_tokens):
        assert not add_special_tokens
        return {"input_ids": [[ord(letter) - ord("a") for letter in text] for text in texts]}


def test_features_by_hand():
    torch.manual_seed(0)
    embedding = nn.Embedding(8, 4, dtype=torch.float64)
    weight = embedding.weight.detach().float()
    centred = weight - weight.mean(0)
    top = torch.linalg.svd(centred).Vh[0]
    rest = centred - torch.outer(centred @ top, top)
    unit = rest / rest.norm(dim=1, keepdim=True)
    features = QuestionEmbeddings(embedding, Letters())({"prompts": ["ab", "h", ""]})
    torch.testing.assert_close(features, torch.stack([(unit[0] + unit[1]) / 2, unit[7], torch.zeros(4)]))


def test_the_papers_threshold_parts_the_drawn_tasks():
    names = tuple(DRAWN_TASKS)
    module = MultimodalInstructionModule.from_pretrained(TINY_LLAVA)
    encoder = QuestionEmbeddings.of(module)
    tokens = {}
    for name in names:
        features = encoder({"prompts": [question_of(row) for row in drawn_instructions(name, 24)]})
        tokens[name] = [features[start::2].mean(0) for start in (0, 1)]  # two clients
    within = min(torch.cosine_similarity(*pair, dim=0).item() for pair in tokens.values())
    between = max(
        torch.cosine_similarity(a, b, dim=0).item()
        for one, other in combinations(names, 2)
        for a in tokens[one]
        for b in tokens[other]
    )
    assert within > 0.93
    assert between < 0.87
