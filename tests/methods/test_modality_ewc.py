"""MA-EWC: worked values, groups found in real model classes, exactness everywhere, and its memory."""

import math
from functools import partial

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_fcl.callbacks import EWC, ModalityEWC, parameter_groups
from lightning_fcl.exceptions import MisconfigurationError, ParamMismatchError
from lightning_fcl.functional import (
    classification_log_likelihood,
    ewc_penalty,
    fisher_diagonal,
    group_drift,
    grouped_ewc_penalty,
    grouped_ewc_penalty_grad,
    normalise_importance,
)
from lightning_fcl.serialize import load_tree
from tests.federated.test_strategies_trainer import ALL, new_net, new_stream, strategy
from tests.federated.test_strategies_trainer import PlainNet as StrategyNet
from tests.helpers.penalty import SETTINGS, InLoss, largest_difference, loader, make_trainer
from tests.helpers.toy import assert_same_bits, make_toy, state_of, toy_stream, toy_trainer

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step`")

HALVES = {"vision": "net.0.*", "language": "net.2.*"}


def f64(*values):
    return torch.tensor(values, dtype=torch.float64)


# Oracle values A-E1, A-E2, A-E3 and A-E7: importances, moves, groups.
FISHER = {"v": f64(1, 2), "l": f64(4), "p": f64(0.5)}
MOVES = {"v": f64(1, -1), "l": f64(0.5), "p": f64(2)}
GROUPS = {"vision": ["v"], "language": ["l"], "projector": ["p"]}
ORIGIN = {name: torch.zeros_like(value) for name, value in MOVES.items()}
ONES = dict.fromkeys(GROUPS, 1.0)


def test_worked_penalty():
    prices = grouped_ewc_penalty(MOVES, ORIGIN, FISHER, GROUPS, ONES)
    assert {group: price.item() for group, price in prices.items()} == {
        "vision": 1.5,
        "language": 0.5,
        "projector": 1.0,
    }
    whole = grouped_ewc_penalty(MOVES, ORIGIN, FISHER, GROUPS, dict.fromkeys(GROUPS, 500.0))
    assert sum(price.item() for price in whole.values()) == 1500.0
    gradient = grouped_ewc_penalty_grad(MOVES, ORIGIN, FISHER, GROUPS, ONES)
    assert {name: value.tolist() for name, value in gradient.items()} == {"v": [1, -2], "l": [2], "p": [1]}
    assert not any(value.any() for value in grouped_ewc_penalty_grad(MOVES, MOVES, FISHER, GROUPS, ONES).values())


@pytest.mark.parametrize(("how", "prices"), [("none", 3.0), ("global", 1.6), ("per_group", 3.125)])
def test_worked_normalisation(how, prices):
    scaled = normalise_importance(FISHER, GROUPS, how)
    assert sum(p.item() for p in grouped_ewc_penalty(MOVES, ORIGIN, scaled, GROUPS, ONES).values()) == pytest.approx(
        prices
    )


def test_worked_drift():
    drift = group_drift(MOVES, {**ORIGIN, "p": f64(4)}, GROUPS, FISHER)
    assert drift["vision"] == pytest.approx((math.sqrt(2), math.inf, math.sqrt(3)))
    assert drift["projector"] == pytest.approx((2.0, 0.5, math.sqrt(0.5 * 4)))
    assert group_drift(ORIGIN, ORIGIN, GROUPS, FISHER)["language"] == (0.0, 0.0, 0.0)
    assert math.isnan(group_drift(MOVES, ORIGIN, GROUPS)["vision"].weighted)


numbers = st.lists(st.floats(-5, 5), min_size=6, max_size=6)


@settings(max_examples=20)
@given(weights=numbers, anchor=numbers, strengths=st.tuples(*[st.floats(0, 10)] * 2))
def test_gradient_is_autograds_and_one_strength_is_plain_ewc(weights, anchor, strengths):
    tree = lambda values: {"a": f64(*values[:2]), "b": f64(*values[2:4]), "c": f64(*values[4:])}  # noqa: E731
    params, origin, fisher = tree(weights), tree(anchor), {n: t.square() for n, t in tree(weights[::-1]).items()}
    groups = {"one": ["b"], "two": ["a", "c"]}
    leaves = {name: value.clone().requires_grad_() for name, value in params.items()}
    lambdas = dict(zip(groups, strengths, strict=True))
    price = sum(grouped_ewc_penalty(leaves, origin, fisher, groups, lambdas).values())
    wanted = dict(zip(leaves, torch.autograd.grad(price, list(leaves.values())), strict=True))
    torch.testing.assert_close(grouped_ewc_penalty_grad(params, origin, fisher, groups, lambdas), wanted)
    same = grouped_ewc_penalty(params, origin, fisher, groups, dict.fromkeys(groups, strengths[0]))
    torch.testing.assert_close(sum(same.values()), ewc_penalty(params, origin, fisher, strengths[0]))


@settings(max_examples=20)
@given(values=st.lists(st.floats(0, 1e6), min_size=4, max_size=4), factor=st.floats(1e-3, 1e3))
def test_normalised_importances_have_mean_one_and_no_unit(values, factor):
    fisher = {"a": f64(*values[:3]), "b": f64(values[3])}
    groups = {"one": ["a"], "two": ["b"]}
    scaled = normalise_importance(fisher, groups)
    for value in scaled.values():
        assert value.mean().item() == pytest.approx(1.0) or not value.any()
    other = normalise_importance({"a": fisher["a"] * factor, "b": fisher["b"]}, groups)
    torch.testing.assert_close(other, scaled, rtol=1e-9, atol=1e-12)


# -- groups -----------------------------------------------------------------------------------------------------------

TEXT = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
TEXT |= {"num_key_value_heads": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
EYES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def tiny(family):
    """A random model of one family, made from its configuration, with few weights."""
    t = pytest.importorskip("transformers")
    eyes = {**EYES, "image_size": 28, "patch_size": 14}
    towers = {"vision_config": t.CLIPVisionConfig(**eyes), "text_config": t.LlamaConfig(**TEXT)}
    if family == "LLaVA":
        config = t.LlavaConfig(**towers, image_token_index=3)
        return t.LlavaForConditionalGeneration(config)
    if family == "LLaVA-NeXT":
        config = t.LlavaNextConfig(**towers, image_token_index=3)
        return t.LlavaNextForConditionalGeneration(config)
    if family == "SmolVLM":
        config = t.SmolVLMConfig(vision_config=eyes, text_config={"model_type": "llama", **TEXT}, scale_factor=1)
        return t.SmolVLMForConditionalGeneration(config)
    if family == "MiniCPM-V":
        name = "MiniCPMV4_6"
        text = {"model_type": "qwen3_5_text", **TEXT, "head_dim": 8, "layer_types": ["full_attention"]}
        config = getattr(t, f"{name}Config")(vision_config={**eyes, "insert_layer_id": 0}, text_config=text)
        return getattr(t, f"{name}ForConditionalGeneration")(config)
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
    eyes = {"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "mlp_ratio": 1, "patch_size": 14}
    if family == "Qwen2.5-VL":
        eyes |= {"intermediate_size": 16, "out_hidden_size": 16}
    name = family.replace("-", "").replace(".", "_").replace("Qwen2_5", "Qwen2_5_")
    config = getattr(t, f"{name}Config")(vision_config=eyes, text_config={**TEXT, "rope_scaling": rope})
    return getattr(t, f"{name}ForConditionalGeneration")(config)


FAMILIES = ["LLaVA", "LLaVA-NeXT", "Qwen2-VL", "Qwen2.5-VL", "MiniCPM-V", "SmolVLM"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES)
def test_groups_of_multimodal_models(family):
    module = nn.ModuleDict({"net": tiny(family)})
    groups = parameter_groups([name for name, _ in module.named_parameters()])
    assert set(groups) == {"vision", "language", "projector"}
    owner = {name: group for group, names in groups.items() for name in names}
    expected = {"language_model": "language", "text_model": "language", "vision_tower": "vision"}
    expected |= {"multi_modal_projector": "projector", "connector": "projector"}
    for name, group in owner.items():
        part = name.split(".")[2] if name.startswith("net.model.") else name.split(".")[1]
        if part == "visual":
            assert group == ("projector" if ".merger." in name else "vision"), name
        elif part in expected:
            assert group == expected[part], name
    assert owner.get("net.lm_head.weight", "language") == "language"  # it may be tied to the words' embedding


@pytest.mark.filterwarnings("ignore")
def test_groups_of_lora_factors():
    peft = pytest.importorskip("peft")
    module = peft.get_peft_model(tiny("LLaVA"), peft.LoraConfig(r=2, target_modules=["q_proj", "linear_1"]))
    groups = parameter_groups([name for name, p in module.named_parameters() if p.requires_grad])
    assert {group: len(names) for group, names in groups.items()} == {"projector": 2, "vision": 2, "language": 2}


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (None, r"got none for 'net.0.weight', .* and 1 more"),
        ({"one": "net.0.*"}, "got none for 'net.2.bias', 'net.2.weight'. Name it in a rule of `groups`"),
        ({"one": "net.*", "two": "re:^net.2"}, "got several for 'net.2.bias', 'net.2.weight'"),
    ],
)
def test_strays_are_listed_before_training(rules, message):
    names = [*(f"net.{i}.{part}" for i in (0, 2) for part in ("bias", "weight"))]
    if rules is None:
        names += ["more.weight", "last.weight"]
        message = r"got none for 'net.0.bias', 'net.0.weight', 'net.2.bias', 'net.2.weight', 'more.weight' and 1 more"
    with pytest.raises(MisconfigurationError, match=message):
        parameter_groups(names, rules)
    if rules is not None:
        with pytest.raises(MisconfigurationError, match=message):
            make_trainer([ModalityEWC(1.0, groups=rules)], max_epochs=1).fit(make_toy(), loader())


# -- exactness --------------------------------------------------------------------------------------------------------


def trained(module, **options):
    callback = ModalityEWC(groups=HALVES, **options)
    make_trainer([callback], max_epochs=1).fit(module, loader())
    return callback


def in_loss(callback):
    """The penalty that the callback stands for, with what it remembers now."""
    importance, anchor = dict(callback.importance), dict(callback.anchor)
    groups, strengths = callback.members(anchor), dict(callback.strengths)
    return lambda params: sum(grouped_ewc_penalty(params, anchor, importance, groups, strengths).values())


OPTIONS = {"strength": {"vision": 0.05, "language": 0.4}, "normalise": "per_group"}


@pytest.mark.parametrize("setting", SETTINGS)
def test_equals_the_same_penalty_in_the_loss(setting):
    module = make_toy(cls=InLoss)
    callback = trained(module, **OPTIONS)
    assert largest_difference(module, [callback], in_loss(callback), **SETTINGS[setting]) < 1e-6


@pytest.mark.distributed
def test_equals_the_penalty_in_the_loss_under_ddp(ranks):
    assert max(ranks.run(difference_under_ddp)) < 1e-6


def difference_under_ddp():
    module = make_toy(cls=InLoss)
    callback = trained(module, **OPTIONS)
    return largest_difference(module, [callback], in_loss(callback), strategy="ddp", devices=2)


PARTS = {"body": "body.*", "head": "head.*"}
STRENGTHS = {"body": 0.05, "head": 0.2}


def federated(name, run_dir):
    """Two tasks of one client on two ranks that share it, with all that could spoil a penalty."""
    from lightning_fcl.federated.trainer import FederatedTrainer

    trainer = FederatedTrainer(
        rounds=1,
        clients_per_round=1,
        local_epochs=4,
        accelerator="cpu",
        devices=2,
        parallel="model",
        strategy=strategy(name),
        accumulate_grad_batches=3,  # whole windows, else a penalty in the loss is not the same
        gradient_clip_val=0.5,
        enable_progress_bar=False,
        run_dir=run_dir,
        callbacks=[ModalityEWC(STRENGTHS, groups=PARTS, normalise="per_group")],
    )
    net = new_net(StrategyNet)
    trainer.fit(net, new_stream(2, 1))
    return {name: p.detach().clone() for name, p in net.named_parameters()}


def by_hand(strengths):
    """The same on two ranks in plain torch, with the penalty as a term of the loss."""
    from lightning_fcl.federated.sampling import client_seed

    net, stream, penalty = new_net(StrategyNet), new_stream(2, 1), None
    for task in range(2):
        batches = stream.train_loader(task, 0)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        torch.manual_seed(client_seed(0, task, 0, 0))
        for _ in range(4):
            for batch in batches:
                add_gradients(net, batch, penalty, len(batches))
            step(net, optimizer)
        groups = parameter_groups([name for name, _ in net.named_parameters()], PARTS)
        anchor = {name: p.detach().clone() for name, p in net.named_parameters()}
        fisher = fisher_diagonal(net, classification_log_likelihood, stream.train_loader(task, 0), method="loop")
        importance = normalise_importance(fisher, groups)
        penalty = partial(grouped_ewc_penalty, anchor=anchor, importance=importance, groups=groups, strengths=strengths)
    return {name: p.detach().clone() for name, p in net.named_parameters()}


def add_gradients(net, batch, penalty, window):
    """Of one micro-batch of a window: the loss on this rank's share, and a part of the penalty."""
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = (part[len(part) * rank // world : len(part) * (rank + 1) // world] for part in batch)
    loss = nn.functional.cross_entropy(net(x), y) * (len(x) * world / len(batch[0]))
    if penalty is not None:
        loss = loss + sum(penalty(dict(net.named_parameters())).values())
    (loss / window).backward()


def step(net, optimizer):
    for p in net.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
    nn.utils.clip_grad_norm_(net.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.distributed
@pytest.mark.parametrize("name", ALL)
def test_equals_the_penalty_in_the_loss_where_ranks_share_a_client(ranks, name, tmp_path):
    hand, free = ranks.run(by_hand, STRENGTHS)[0], ranks.run(by_hand, dict.fromkeys(STRENGTHS, 0.0))[0]
    for weights in ranks.run(federated, name, tmp_path / name):
        torch.testing.assert_close(weights, hand, rtol=0, atol=1e-6)
    assert max((hand[n] - free[n]).abs().max().item() for n in hand) > 1e-3


# -- in a run ---------------------------------------------------------------------------------------------------------


def fit(run_dir, callbacks, tasks=2, **options):
    module = make_toy()
    toy_trainer(run_dir, callbacks=callbacks, **options).fit(module, toy_stream(tasks=tasks))
    return state_of(module)


def test_with_one_strength_and_no_normalisation_it_is_ewc_bit_for_bit(tmp_path):
    assert_same_bits(fit(tmp_path / "a", [ModalityEWC(3.0, groups=HALVES)]), fit(tmp_path / "b", [EWC(3.0)]))


def test_a_group_of_strength_zero_is_free(tmp_path):
    module = make_toy()
    callback = trained(module, strength={"vision": 1.0, "language": 0.0})
    weights = {name: p.detach() + 1.0 for name, p in module.named_parameters()}
    pull = callback.pull(weights, callback.anchor, callback.importance)
    assert pull["net.0.weight"].any()
    assert not pull["net.2.weight"].any()


@pytest.mark.parametrize("memory", ["last", "all"])
def test_a_sleeping_client_is_two_copies_of_its_weights_on_disk(memory, tmp_path):
    options = {"client_state_mb": 0, "clients_per_round": 4}
    callback = ModalityEWC(0.01, groups=HALVES, normalise="per_group", memory=memory)
    weights = fit(tmp_path, [callback], tasks=3, **options)
    size = sum(value.numel() for value in weights.values())
    files = sorted((tmp_path / "clients").rglob("*.safetensors"))
    assert len(files) >= 4
    for file in files:
        (state,) = load_tree(file)["callbacks"].values()
        assert sum(value.numel() for tree in state.values() for value in tree.values()) == 2 * size
        assert file.stat().st_size < 2 * size * 4 + 4096


def test_importances_that_are_not_finite_stop_the_run(tmp_path):
    def broken(module, batch):
        return classification_log_likelihood(module, batch) * torch.inf

    with pytest.raises(ValueError, match="`log_likelihood` must have finite gradients, got NaN or infinity for"):
        trained(make_toy(), strength=1.0, log_likelihood=broken)
    with pytest.raises(ValueError, match="`log_likelihood` must have finite gradients"):
        fit(tmp_path, [ModalityEWC(1.0, groups=HALVES, log_likelihood=broken)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"strength": -1.0}, "`strength` must be finite"),
        ({"strength": {"vision": 1.0}}, r"`strength` must name the groups \['language', 'projector', 'vision'\], got"),
        ({"strength": {"a": 1.0, "b": 1.0}, "groups": {"a": "*"}}, r"`strength` must name the groups \['a'\], got"),
        ({"normalise": "group"}, '`normalise` must be "none", "global" or "per_group"'),
        ({"memory": "some"}, '`memory` must be "all" or "last"'),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(MisconfigurationError, match=message):
        ModalityEWC(**arguments)


@pytest.mark.parametrize("groups", [{"one": ["v", "l"]}, {"one": ["v", "l", "p"], "two": ["p"]}])
def test_functions_refuse_what_is_no_partition(groups):
    with pytest.raises(ParamMismatchError, match="`groups` must hold each parameter once"):
        grouped_ewc_penalty(MOVES, ORIGIN, FISHER, groups, dict.fromkeys(groups, 1.0))
    with pytest.raises(ValueError, match='`how` must be "none"'):
        normalise_importance(FISHER, GROUPS, "mean")
