"""What a commit holds of a run, and how a run is put back to one."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_fcl.exceptions import ResumeMismatchError
from lightning_fcl.federated.checkpoint import Checkpoint
from lightning_fcl.federated.describe import differences
from lightning_fcl.federated.state import Slots

if TYPE_CHECKING:
    from lightning_fcl.federated.run import Run


def commit(run: "Run", *, final: bool) -> None:
    """Write changed client states, and the round's checkpoint if one is due.

    Args:
        run: After a unit.
        final: Whether this was the last unit; it is always committed.
    """
    state, trainer = run.state, run.trainer
    for part in run.ranks.gather_json({str(c): v for c, v in run.store.flush().items()}):
        run.store.versions.update({int(client): version for client, version in part.items()})
    run.store.touch(state.sampled)
    every = 0 if trainer.fast_dev_run else trainer.checkpoint_every
    if not every or (state.global_round % every and not final):
        return
    if trainer.is_global_zero:
        dtypes = {slot.name: slot.dtype for slot in run.engine.layout.slots}
        tensors = {**run.engine.layout.views(state.params), **state.counters}
        model = {name: tensor.to(dtypes.get(name, tensor.dtype)) for name, tensor in tensors.items()}
        run.checkpoints.commit(state.global_round, _manifest(run), model, _server_tree(run))
        kept = [{int(c): v for c, v in manifest["clients"].items()} for manifest in run.checkpoints.prune()]
        run.store.prune([run.store.versions, *kept])
    run.ranks.barrier()


def _manifest(run: "Run") -> dict[str, Any]:
    state = run.state
    return {
        "next": list(run.next),
        "global_round": state.global_round,
        "empty_rounds": state.empty_rounds,
        "bytes_up": state.bytes_up,
        "bytes_down": state.bytes_down,
        "score": run.score,
        "lengths": run.folder.lengths(),
        "clients": {str(c): v for c, v in sorted(run.store.versions.items())},
        "fingerprint": run.fingerprint,
    }


def _server_tree(run: "Run") -> dict[str, Any]:
    return {
        "steps": run.step_states,
        "callbacks": {c.state_key: c.state_dict() for c in run.trainer.server_callbacks},
        "downloads": run.jobs.downloads,
        "task_anchor": run.state.task_anchor,
        "slots": None if run.state.slots is None else vars(run.state.slots),
        "matrix": run.matrix,
        "baseline": run.baseline,
    }


def restore(run: "Run", checkpoint: Checkpoint, *, strict: bool) -> list[str]:
    """Put a new run back to a commit: weights, states, tables and position.

    Args:
        run: Not started yet.
        checkpoint: Verified.
        strict: Whether a changed configuration is an error.

    Returns:
        The differences that were let through.

    Raises:
        ResumeMismatchError: If the configuration differs and ``strict`` is set, or the tensors differ at all.
    """
    manifest, state, layout = checkpoint.manifest, run.state, run.engine.layout
    changed = differences(manifest["fingerprint"], run.fingerprint)
    if changed and strict:
        raise ResumeMismatchError(
            "this run was started with other settings (there -> here):\n  " + "\n  ".join(changed) + "\n"
            "Use the same settings, another `run_dir` (of a recipe: `--out`), or fit(..., strict_resume=False) to go "
            "on anyway."
        )
    expected = {slot.name for slot in layout.slots} | set(layout.counters)
    if difference := sorted(expected ^ set(checkpoint.model))[:3]:
        raise ResumeMismatchError(f"the checkpoint holds other tensors than the module; differing: {difference}")
    device = state.params.device
    layout.pack(checkpoint.model, state.params)
    state.counters = {name: checkpoint.model[name].to(device) for name in layout.counters}
    server = _to_device(checkpoint.server, device)
    run.step_states, run.jobs.downloads = server["steps"], server["downloads"]
    state.task_anchor, run.matrix, run.baseline = server["task_anchor"], server["matrix"].cpu(), server["baseline"]
    if server.get("slots") is not None:
        state.slots = Slots(**server["slots"])
    for callback in run.trainer.server_callbacks:
        callback.load_state_dict(server["callbacks"].get(callback.state_key, {}))
    run.next = (manifest["next"][0], manifest["next"][1])
    state.task, state.round = run.next
    for name in ("global_round", "empty_rounds", "bytes_up", "bytes_down"):
        setattr(state, name, manifest[name])
    run.score = manifest["score"]
    run.store.next_version = state.global_round
    run.store.versions = {int(client): version for client, version in manifest["clients"].items()}
    if run.trainer.is_global_zero:
        run.checkpoints.drop_after(manifest["number"])
        run.folder.cut(manifest["lengths"])
        run.folder.write_accuracy(run.stream.names, run.matrix)
    run.ranks.barrier()
    return changed


def _to_device(tree: Any, device: torch.device) -> Any:
    if isinstance(tree, Tensor):
        return tree.to(device)
    if isinstance(tree, dict):
        return {key: _to_device(value, device) for key, value in tree.items()}
    return type(tree)(_to_device(v, device) for v in tree) if isinstance(tree, list | tuple) else tree
