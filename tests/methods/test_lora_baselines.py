"""O-LoRA, M-LoRA, MoELoRA and the two means of LoRA pairs, in the real loop."""

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_fcl.aggregators import Chain, FedAvg, LoRAMean, MLoRA, RoundStats, SubspaceRouter, TaskSubspaces
from lightning_fcl.callbacks import OLoRA
from lightning_fcl.exceptions import MisconfigurationError
from lightning_fcl.functional import moe_lora
from lightning_fcl.models import MoELoRALinear, SubspaceLinear, add_experts, subspace_layers
from tests.helpers.subspaces import LitNet, make_net, subspace_stream, task_data
from tests.helpers.toy import toy_trainer


def fit(run_dir, net=None, tasks=2, **options):
    net = make_net() if net is None else net
    trainer = toy_trainer(run_dir, **{"rounds": 2, "local_epochs": 2, **options})
    report = trainer.fit(net, subspace_stream(tasks=tasks, examples=80))
    return report, net, trainer


def overlap(net):
    """Mean size of the products of the last task's rows with the first's."""
    banks = [layer.bank[0] for layer in subspace_layers(net).values()]
    return torch.stack([(down[1] @ down[0].T).abs().mean() for down in banks]).mean().item()


# -- O-LoRA -----------------------------------------------------------------------------------------------------------


def test_o_lora_brings_its_router_and_turns_subspaces_apart(tmp_path):
    _, apart, trainer = fit(tmp_path / "a", callbacks=[OLoRA(0.05)])
    assert isinstance(trainer.chain.router, TaskSubspaces)
    assert trainer.method == "O-LoRA"
    _, free, _ = fit(tmp_path / "b", callbacks=[OLoRA(0.0)])
    assert overlap(apart) < 0.3 * overlap(free)
    assert apart.subspace_tasks == (0, 1)


def test_o_lora_trains_on_top_of_the_frozen_subspaces(tmp_path):
    """Its forward pass in task 1 is base + frozen subspace 0 + the new one; frozen means to the last bit."""
    seen = []

    class Look(OLoRA):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if trainer.task == 1 and trainer.round == 1 and not seen:
                layer = pl_module.body[0]
                x = torch.randn(5, layer.base.in_features)
                a, b = layer.bank
                slots = [2.0 * x @ down.T @ up.T for down, up in zip(a, b, strict=True)]
                new = 2.0 * x @ layer.lora_A.T @ layer.lora_B.T
                torch.testing.assert_close(layer(x), layer.base(x) + slots[0] + new)  # slot 1 is its own last round
                seen.append(layer.bank[0][0].clone())

    _, net, _ = fit(tmp_path, callbacks=[Look(0.1)])
    assert torch.equal(net.body[0].bank[0][0], seen[0])


def test_o_lora_in_a_stock_trainer(tmp_path):
    net, scores = make_net(), []
    quiet = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False)
    checks = DataLoader(task_data(0, 60, 1), batch_size=60)
    for task in range(2):
        loader = DataLoader(task_data(task, 160, 0), batch_size=10)
        trainer = L.Trainer(max_epochs=8, accelerator="cpu", callbacks=[OLoRA(0.1)], **quiet)
        trainer.fit(net, loader, checks)
        scores.append(trainer.validate(net, checks, verbose=False)[0]["val_acc"])
        layer = net.body[0]
        assert len(layer.bank[0]) == task + 1
        assert not layer.lora_B.any()  # a fresh one
    assert layer.bank[1].any()
    assert scores[0] > 0.7  # what was frozen speaks


def test_o_lora_needs_subspaces(tmp_path):
    class Plain(LitNet):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(10, 16)

    with pytest.raises(MisconfigurationError, match=r"`TaskSubspaces` needs|`OLoRA` needs"):
        fit(tmp_path, net=Plain(), callbacks=[OLoRA()])
    with pytest.raises(MisconfigurationError, match="`strength`"):
        OLoRA(-1.0)


# -- M-LoRA -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("merge", "coefficient"), [("products", None), ("products", 0.6), ("factors", None)])
def test_m_lora_evaluates_the_merge(tmp_path, merge, coefficient):
    _, apart, _ = fit(tmp_path / "a", aggregator=TaskSubspaces())
    _, net, trainer = fit(tmp_path / "b", aggregator=MLoRA(merge, coefficient))
    assert trainer.method == "M-LoRA"
    x = torch.randn(4, 10)
    for name, layer in subspace_layers(apart).items():
        a, b = layer.bank
        if merge == "products":
            c = 0.5 if coefficient is None else coefficient
            wanted = c * sum(up @ down for down, up in zip(a, b, strict=True))
        else:
            wanted = (0.6 * b.sum(0)) @ (0.6 * a.sum(0))
        merged = subspace_layers(net)[name]
        found = sum(up @ down for down, up in zip(*merged.bank, strict=True))
        torch.testing.assert_close(found, wanted)
    with net.routed((x, None)), torch.no_grad():
        body = net.body[0]
        first = torch.nn.functional.linear(x, body.base.weight + 2.0 * sum(map(torch.matmul, *body.bank[::-1])))
        torch.testing.assert_close(body(x), first + body.base.bias)


def test_bad_merges():
    for arguments, message in (({"merge": "sum"}, "`merge`"), ({"coefficient": 0.0}, "`coefficient`")):
        with pytest.raises(MisconfigurationError, match=message):
            MLoRA(**arguments)


# -- MoELoRA ----------------------------------------------------------------------------------------------------------


def test_moe_equals_the_loop_over_experts_and_tokens():
    x = torch.randn(2, 3, 5, dtype=torch.float64)
    a, b, gate = torch.randn(4, 2, 5).double(), torch.randn(4, 6, 2).double(), torch.randn(4, 5).double()
    found = moe_lora(x, a, b, gate, 2.0)
    for i in range(2):
        for j in range(3):
            token = x[i, j]
            shares = torch.softmax(torch.stack([gate[e] @ token for e in range(4)]), 0)
            wanted = 2.0 * sum(shares[e] * b[e] @ (a[e] @ token) for e in range(4))
            torch.testing.assert_close(found[i, j], wanted)
    same = moe_lora(x, a[:1].expand(4, -1, -1), b[:1].expand(4, -1, -1), gate, 2.0)
    torch.testing.assert_close(same, 2.0 * x @ a[0].T @ b[0].T)  # identical experts are one LoRA, whatever the gate


def test_moe_layer_starts_as_its_base_and_trains(tmp_path):
    class Net(LitNet):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(10, 16), nn.Tanh())
            add_experts(self, "body.0", rank=4, experts=2)

    net = make_net(Net)
    layer = net.body[0]
    x = torch.randn(3, 10)
    assert torch.equal(layer(x), layer.base(x))
    assert layer.weight is layer.base.weight
    report, _, _ = fit(tmp_path, net=net, aggregator=FedAvg())
    assert report.accuracy[0, 0] > report.baseline[0]
    assert layer.gate.grad is None or layer.lora_B.any()


def test_bad_experts():
    with pytest.raises(MisconfigurationError, match="multiple of `experts`"):
        MoELoRALinear(nn.Linear(2, 2), rank=6, experts=4)
    with pytest.raises(MisconfigurationError, match="`scaling`"):
        MoELoRALinear(nn.Linear(2, 2), rank=4, experts=4, dropout=1.0)
    with pytest.raises(MisconfigurationError, match="`rank`"):
        SubspaceLinear(nn.Linear(2, 2), rank=0)


# -- means of pairs ---------------------------------------------------------------------------------------------------


def merge_by(merge, rows, counts, rank=1):
    """Rows hold A of two numbers, B of two."""
    reducer = LoRAMean(rank, merge)
    reducer.prepare({"x.lora_A": slice(0, 2), "x.lora_B": slice(2, 4), "bias": slice(4, 5)})
    reference = torch.zeros(5, dtype=torch.float64)
    reducer.start(reference, len(rows), range(len(rows)))
    for place, (row, count) in enumerate(zip(rows, counts, strict=True)):
        reducer.add(place, row, count)
    stats = RoundStats(
        task=0, round=0, num_tasks=1, num_params=5, clients=tuple(range(len(rows))), num_examples=tuple(counts),
        total_clients=9,
    )  # fmt: skip
    return reducer.merge(lambda nodes, like=None: dict(nodes), stats), stats.logs["round/factor_gap"]


def test_means_of_factors_and_of_products():
    rows, counts = torch.randn(3, 5, dtype=torch.float64), [1.0, 2.0, 5.0]
    shares = torch.tensor(counts, dtype=torch.float64) / 8
    dense = sum(s * torch.outer(row[2:4], row[:2]) for s, row in zip(shares, rows, strict=True))
    mean = shares @ rows
    factors, gap = merge_by("factors", rows, counts)
    torch.testing.assert_close(factors, mean)
    wanted = (torch.outer(mean[2:4], mean[:2]) - dense).norm() / dense.norm()
    assert gap == pytest.approx(wanted.item())
    products, same_gap = merge_by("products", rows, counts)
    u, s, vh = torch.linalg.svd(dense)
    torch.testing.assert_close(torch.outer(products[2:4], products[:2]), s[0] * torch.outer(u[:, 0], vh[0]))
    assert products[4].item() == pytest.approx(mean[4].item())
    assert same_gap == gap
    lone, gap = merge_by("products", rows[:1], [3.0])
    torch.testing.assert_close(lone, rows[0])
    assert gap == pytest.approx(0.0, abs=1e-7)


def test_lora_means_inside_subspaces(tmp_path):
    _, _, trainer = fit(tmp_path, aggregator=Chain(SubspaceRouter(), LoRAMean(2)), tasks=2)
    header, *rows = (tmp_path / "metrics.csv").read_text().splitlines()
    column = header.split(",").index("slot/1/factor_gap")
    assert float(rows[-1].split(",")[column]) > 0
    assert trainer.method == "DISCO"


def test_lora_mean_of_another_rank(tmp_path):
    with pytest.raises(MisconfigurationError, match="`rank` must be that of the LoRA pairs"):
        fit(tmp_path, aggregator=LoRAMean(3))
    with pytest.raises(MisconfigurationError, match="`rank`"):
        LoRAMean(0)
    with pytest.raises(MisconfigurationError, match="`merge`"):
        LoRAMean(2, "sum")
