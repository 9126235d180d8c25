"""A large model examined from its ``config.json`` alone, on the meta device: no weights are read or made."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from lightning_fcl._imports import optional_import
from lightning_fcl.doctor.costs import add_links
from lightning_fcl.doctor.diagnosis import Diagnosis, Table
from lightning_fcl.doctor.multimodal import check_tokens
from lightning_fcl.exceptions import FCLError, MisconfigurationError
from lightning_fcl.functional.costs import Traffic, exact_mean_bytes, run_traffic, sharded_memory
from lightning_fcl.mllm.loading import no_files
from lightning_fcl.mllm.lora import LoRA, add_lora, thaw_projector
from lightning_fcl.mllm.processor import load_processor
from lightning_fcl.reports.tables import data_size

_MASTER_AND_MOMENTS = 12  # bytes per trained weight of Adam in mixed precision, as ZeRO counts them


def estimate(
    path: str | Path,
    *,
    lora: LoRA = LoRA(),  # noqa: B008 (frozen)
    train_projector: bool = False,
    dtype: str = "bfloat16",
    devices: int = 1,
    clients_per_round: int = 5,
    rounds: int = 100,
    link_mbit: Sequence[float] = (10.0, 100.0, 1000.0),
    revision: str = "main",
    local_files_only: bool = False,
) -> Diagnosis:
    """Memory and traffic of tuning an image-and-text model with LoRA, from its configuration.

    Args:
        path: Folder with ``config.json``, or name on the Hugging Face Hub; the weights are not needed.
        lora: The adapters.
        train_projector: Train the layers between vision tower and language model as well.
        dtype: Name of the dtype of the frozen weights.
        devices: Ranks for the shares under ZeRO.
        clients_per_round: Clients per round.
        rounds: Rounds of all tasks.
        link_mbit: Speeds of links to print times for, megabits per second.
        revision: Version on the Hub.
        local_files_only: Ask nobody.

    Returns:
        Tables, and the processor's checks if its files are there. Activations are not counted.

    Raises:
        MisconfigurationError: If there is no such configuration, or an argument cannot be used.
        MissingExtraError: If transformers or peft is not installed (extra ``mllm``).
    """
    _check(dtype, devices, clients_per_round, rounds, link_mbit)
    where = {"revision": revision, "local_files_only": local_files_only}
    bare = _on_meta(path, dtype, where)
    found = Diagnosis()
    _check_processor(found, bare, path, where)
    model = add_lora(bare, lora)
    if train_projector:
        thaw_projector(model)
    weights = list(model.parameters())
    trained = [p for p in weights if p.requires_grad]
    count, all_bytes = sum(p.numel() for p in trained), sum(p.numel() * p.element_size() for p in weights)
    own = sum(p.numel() * p.element_size() for p in trained)
    found.numbers |= {"parameters": sum(p.numel() for p in weights), "trained": count, "payload": own}
    found.numbers |= {"bytes_weights": all_bytes, "bytes_trained": own}
    rows = [
        ("frozen", f"{found.numbers['parameters'] - count:,}", data_size(all_bytes - own)),
        ("trained, travels", f"{count:,}", data_size(own)),
    ]
    found.tables.append(Table(f"parameters of {path}", ("", "numbers", "bytes"), rows))
    payload = Traffic(own, own)
    run = run_traffic(payload, clients_per_round, rounds)
    found.numbers |= {"bytes_down": run.down, "bytes_up": run.up}
    sums = [
        ("a client in a round", *map(data_size, payload)),
        (f"{rounds} rounds of {clients_per_round}", *map(data_size, run)),
    ]
    found.tables.append(Table("traffic", ("", "down", "up"), sums))
    add_links(found, payload, [(rounds, clients_per_round)], link_mbit)
    vectors = exact_mean_bytes(-(-own // 4), 4, clients_per_round)
    _add_memory(found, all_bytes - own, own, count, vectors, devices)
    return found


def _check(dtype: str, devices: int, clients: int, rounds: int, link_mbit: Sequence[float]) -> None:
    if not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise MisconfigurationError(f"`dtype` must name a dtype of torch, such as 'bfloat16', got {dtype!r}.")
    for name, value in (("devices", devices), ("clients_per_round", clients), ("rounds", rounds)):
        if value < 1:
            raise MisconfigurationError(f"`{name}` must be at least 1, got {value}.")
    if any(not mbit > 0 for mbit in link_mbit):
        raise MisconfigurationError(f"`link_mbit` must hold positive speeds, got {list(link_mbit)}.")


def _on_meta(path: str | Path, dtype: str, where: dict[str, Any]) -> Any:
    transformers = optional_import("transformers", extra="mllm")
    try:
        config = transformers.AutoConfig.from_pretrained(path, **where)
        with torch.device("meta"):
            model = transformers.AutoModelForImageTextToText.from_config(config, dtype=getattr(torch, dtype))
    except (OSError, ValueError) as error:
        raise no_files(path, error) from error
    return model.requires_grad_(False)


def _check_processor(found: Diagnosis, model: Any, path: str | Path, where: dict[str, Any]) -> None:
    image = optional_import("PIL.Image", extra="mllm").new("RGB", (64, 48))
    turns = [{"from": "human", "value": "<image>\nWhat is this?"}, {"from": "gpt", "value": "It"}]
    try:
        processor = load_processor(path, **where)
    except (OSError, ValueError, ImportError, FCLError) as error:
        reason = str(error).strip().partition("\n")[0].partition(". ")[0]
        found.add("warning", "processor", f"its files cannot be read, so tokens were not checked: {reason}")
        return
    check_tokens(found, model, processor, {"image": image, "conversations": turns})


def _add_memory(found: Diagnosis, frozen: int, own: int, count: int, vectors: int, devices: int) -> None:
    rows = []
    plain = sharded_memory(frozen, own, own, 2 * own, stage=0, devices=1)
    cases = [("one process, AdamW", plain)]
    for stage in (2, 3) if devices > 1 else ():
        share = sharded_memory(frozen, own, own, _MASTER_AND_MOMENTS * count, stage=stage, devices=devices)
        cases.append((f"ZeRO-{stage}, each of {devices} ranks", share))
    for name, share in cases:
        total = sum(share) + vectors
        found.numbers["memory_" + name.partition(",")[0].lower().replace(" ", "_").replace("-", "_")] = total
        rows.append((name, *map(data_size, (*share, vectors, total))))
    header = ("memory without activations", "weights", "gradients", "optimiser", "federation", "sum")
    found.tables.append(Table("memory", header, rows))
