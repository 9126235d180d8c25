"""Subspaces as files: a PEFT adapter folder for each, which PEFT itself opens, and the tokens that tell them apart."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fcl._imports import optional_import
from lightning_fcl.exceptions import CheckpointError, MisconfigurationError
from lightning_fcl.models.subspace_lora import SubspaceLinear, subspace_layers
from lightning_fcl.serialize import load_tree, save_tree

ROUTER = "router.safetensors"
_WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."  # how PEFT names what it wraps
_SAMPLES = 64


def save_subspaces(module: Any, folder: str | Path) -> list[Path]:
    """Write each subspace of a module as a PEFT adapter, and what the router knows beside them.

    ``subspace_00/`` and so on hold ``adapter_config.json`` (written by PEFT) and ``adapter_model.safetensors``;
    ``PeftModel.from_pretrained(base, folder / "subspace_00")`` opens one on the model that the subspace layers were put
    into. ``router.safetensors`` holds the identity tokens, how they were made, and samples of the frozen weights.

    Args:
        module: A :class:`~lightning_fcl.mixins.SubspaceRoutingMixin` with subspaces installed. Names in the adapters
            start at its child ``model`` if that holds all subspace layers, else at the module itself.
        folder: Made if it does not exist.

    Returns:
        The adapter folders.

    Raises:
        MisconfigurationError: If the module has no subspaces to save.
        MissingExtraError: If PEFT is not installed.
    """
    layers = subspace_layers(module)
    if not getattr(module, "num_subspaces", 0):
        raise MisconfigurationError("`module` must have subspaces installed, got none. Train with a router first.")
    root = _root(module, layers)
    folder = Path(folder)
    paths = []
    for slot in range(module.num_subspaces):
        path = folder / f"subspace_{slot:02d}"
        path.mkdir(parents=True, exist_ok=True)
        _save_adapter({name.removeprefix(root): layer for name, layer in layers.items()}, slot, path, module)
        paths.append(path)
    router = {
        "tokens": module.subspace_tokens,
        "tasks": list(module.subspace_tasks),
        "encoder": module.routing_features,
        "base": _samples(layers, root),
    }
    save_tree(router, folder / ROUTER)
    return paths


def load_subspaces(module: Any, folder: str | Path) -> None:
    """Install what :func:`save_subspaces` wrote.

    Args:
        module: A :class:`~lightning_fcl.mixins.SubspaceRoutingMixin` with the same subspace layers over the same base.
        folder: As given to :func:`save_subspaces`.

    Raises:
        FileNotFoundError: If there is no such folder.
        CheckpointError: If the subspaces belong to another base model or other layers, or the tokens to another
            encoder.
    """
    from safetensors.torch import load_file

    folder, layers = Path(folder), subspace_layers(module)
    router = load_tree(folder / ROUTER)
    root = _root(module, layers)
    _check_base(router["base"], _samples(layers, root), folder)
    if router["encoder"] != (own := module.routing_features):
        raise CheckpointError(
            f"the tokens in {str(folder)!r} were made from {router['encoder']}, but this module compares {own}. Use "
            "the same `routing_encoder` and `routing_source`."
        )
    slots = []
    for path in sorted(folder.glob("subspace_*")):
        tensors = load_file(path / _WEIGHTS)
        slots.append({_own_name(name, root): tensor for name, tensor in tensors.items()})
    try:
        module.install_subspaces(slots, router["tokens"], tasks=router["tasks"])
    except (KeyError, ValueError) as error:
        raise CheckpointError(f"{str(folder)!r} does not fit this module's subspace layers: {error}") from error


def _root(module: nn.Module, layers: dict[str, SubspaceLinear]) -> str:
    return "model." if all(name.startswith("model.") for name in layers) else ""


def _save_adapter(layers: dict[str, SubspaceLinear], slot: int, path: Path, module: Any) -> None:
    from safetensors.torch import save_file

    peft = optional_import("peft", extra="mllm")
    first = next(iter(layers.values()))
    if any((layer.rank, layer.scaling) != (first.rank, first.scaling) for layer in layers.values()):
        raise MisconfigurationError("subspace layers must share rank and scaling to be saved as one PEFT adapter.")
    model = getattr(module, "model", module)
    config = peft.LoraConfig(
        r=first.rank,
        lora_alpha=first.scaling * first.rank,  # PEFT divides by the rank of one adapter
        lora_dropout=getattr(first.dropout, "p", 0.0),
        target_modules=sorted(layers),
        inference_mode=True,
        base_model_name_or_path=getattr(getattr(model, "config", None), "_name_or_path", "") or None,
    )
    config.save_pretrained(str(path))
    tensors = {}
    for name, layer in layers.items():
        assert layer.bank is not None
        for factor, part in zip("AB", layer.bank, strict=True):
            tensors[f"{_PREFIX}{name}.lora_{factor}.weight"] = part[slot].detach().cpu().contiguous()
    save_file(tensors, path / _WEIGHTS, metadata={"format": "pt"})


def _own_name(name: str, root: str) -> str:
    return root + name.removeprefix(_PREFIX).removesuffix(".weight")


def _samples(layers: dict[str, SubspaceLinear], root: str) -> dict[str, Tensor]:
    """A few elements of each frozen weight, spread over it."""
    found = {}
    for name, layer in layers.items():
        flat = layer.base.weight.detach().flatten()
        found[name.removeprefix(root)] = flat[:: max(1, len(flat) // _SAMPLES)][:_SAMPLES].float().cpu()
    return found


def _check_base(saved: dict[str, Tensor], own: dict[str, Tensor], folder: Path) -> None:
    """Allow for another precision, not for another model."""
    if saved.keys() != own.keys():
        strange = sorted(saved.keys() ^ own.keys())[:3]
        raise CheckpointError(f"{str(folder)!r} was made for other layers than this module's; differing: {strange}")
    for name, tensor in saved.items():
        if tensor.shape != own[name].shape or not torch.allclose(tensor, own[name], rtol=0.02, atol=1e-4):
            raise CheckpointError(
                f"{str(folder)!r} was made for another base model: {name} has other frozen weights. Load the base that "
                "the subspaces were trained on."
            )
