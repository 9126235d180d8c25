"""Commits of a run: a folder per round, hashed, renamed into place, verified on load."""

import hashlib
import json
import os
import re
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_fcl.exceptions import CheckpointError
from lightning_fcl.serialize import flatten_tree, load_tree, write_tensors
from lightning_fcl.types import Params

FORMAT = 1
MODEL, SERVER, MANIFEST = "model.safetensors", "server.safetensors", "manifest.json"
_NAME = re.compile(r"round_(\d{6,})")


@dataclass(frozen=True)
class Checkpoint:
    """One committed round.

    Args:
        manifest: Position, tables' lengths, client versions and the run's fingerprint; plain JSON.
        model: Global tensors by dotted name.
        server: States of server steps and callbacks.
    """

    manifest: dict[str, Any]
    model: Params
    server: Any


class CheckpointFolder:
    """The ``checkpoints/`` folder of a run.

    Args:
        path: The folder.
        keep: How many commits to keep.
    """

    def __init__(self, path: Path, keep: int = 2) -> None:
        self.path = path
        self.keep = keep

    def commit(self, number: int, manifest: dict[str, Any], model: dict[str, Tensor], server: Any) -> Path:
        """Write one round so that it is there whole or not at all.

        Args:
            number: Global round.
            manifest: Plain values; gains format version and the files' hashes.
            model: Global tensors by dotted name.
            server: Tree of server states.

        Returns:
            The committed folder.

        Raises:
            CheckpointError: If the disk refuses; older commits are untouched.
        """
        final = self.path / f"round_{number:06d}"
        temporary = self.path / f".round_{number:06d}.{os.getpid()}.tmp"
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            files = {
                MODEL: ({name: tensor.cpu() for name, tensor in model.items()}, None),
                SERVER: flatten_tree(server),
            }
            hashes = {name: write_tensors(temporary / name, *what, digest=True) for name, what in files.items()}
            manifest = {"format": FORMAT, "number": number, **manifest, "files": hashes}
            (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
            _sync(temporary / MANIFEST)
            _sync(temporary)
            if final.exists():  # left behind by a run that was resumed from an earlier commit
                shutil.rmtree(final)
            temporary.rename(final)
            _sync(self.path)
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise CheckpointError(f"cannot write {str(final)!r}: {error}. Earlier commits are intact.") from error
        return final

    def prune(self) -> list[dict[str, Any]]:
        """Delete old commits and what killed runs left behind; returns the manifests that stay."""
        for leftover in self.path.glob(".round_*.tmp"):
            shutil.rmtree(leftover, ignore_errors=True)
        numbers = self.numbers()
        for number in numbers[: -self.keep]:
            shutil.rmtree(self.path / f"round_{number:06d}", ignore_errors=True)
        return [_manifest(self.path / f"round_{number:06d}") for number in numbers[-self.keep :]]

    def drop_after(self, number: int) -> None:
        """Delete commits later than ``number``: the run goes on from there."""
        for later in self.numbers():
            if later > number:
                shutil.rmtree(self.path / f"round_{later:06d}", ignore_errors=True)

    def numbers(self) -> list[int]:
        """Global rounds with a commit, ascending."""
        found = (_NAME.fullmatch(p.name) for p in self.path.glob("round_*") if p.is_dir())
        return sorted(int(match[1]) for match in found if match)

    def newest(self) -> Checkpoint:
        """The newest commit that verifies; damaged ones are named in a warning and passed over.

        Raises:
            CheckpointError: If there is none.
        """
        problems = []
        for number in reversed(self.numbers()):
            try:
                return load_checkpoint(self.path / f"round_{number:06d}")
            except CheckpointError as error:
                problems.append(str(error))
                warnings.warn(f"{error}; falling back to the commit before it", stacklevel=2)
        detail = f" Found only damaged ones: {'; '.join(problems)}." if problems else ""
        raise CheckpointError(f"`ckpt_path` must name a run with a committed round, got {str(self.path)!r}.{detail}")


def load_checkpoint(path: Path) -> Checkpoint:
    """Read and verify one committed round.

    Args:
        path: A ``round_*`` folder.

    Returns:
        Its content.

    Raises:
        CheckpointError: If a file is missing, added, damaged or of another format; the message names it.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load as load_tensors

    manifest = _manifest(path)
    expected = manifest["files"]
    present = {p.name for p in path.iterdir()}
    if set(expected) != {MODEL, SERVER}:
        raise CheckpointError(f"{str(path / MANIFEST)!r} must list {MODEL} and {SERVER}, got {sorted(expected)}")
    if present != {MANIFEST, *expected}:
        difference = sorted(present ^ {MANIFEST, *expected})
        raise CheckpointError(f"{str(path)!r} must hold exactly what its manifest lists; differing: {difference}")
    contents = {}
    for name, digest in expected.items():
        if (path / name).is_symlink():
            raise CheckpointError(f"{str(path / name)!r} must be a plain file, got a link")
        contents[name] = (path / name).read_bytes()
        if hashlib.sha256(contents[name]).hexdigest() != digest:
            raise CheckpointError(f"{str(path / name)!r} is damaged: its hash differs from the manifest's")
    try:
        return Checkpoint(manifest, load_tensors(contents[MODEL]), load_tree(path / SERVER))
    except SafetensorError as error:
        raise CheckpointError(f"{str(path / MODEL)!r} is no safetensors file: {error}") from error


def _manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        version, _ = manifest["format"], manifest["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{str(path / MANIFEST)!r} is missing or unreadable: {error}") from error
    if version != FORMAT:
        raise CheckpointError(f"{str(path)!r} has checkpoint format {version!r}; this version reads format {FORMAT}")
    assert isinstance(manifest, dict)
    return manifest


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
