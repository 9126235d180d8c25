"""Trees of tensors and plain values to safetensors and back; nothing is ever unpickled."""

import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_fcl.exceptions import CheckpointError

_TREE = "tree"  # key of the JSON skeleton in the file's metadata
_REF = "__tensor__"
_MAP = "__items__"  # dicts whose keys are not all strings
_TUPLE = "__tuple__"


def dump_tree(tree: Any) -> bytes:
    """Encode a tree of dicts, lists, tuples, tensors, numbers, strings, booleans and ``None``.

    Args:
        tree: What to encode. Tensors may live anywhere; they are written as contiguous CPU tensors.

    Returns:
        The bytes of a safetensors file whose metadata holds the tree's skeleton as JSON.

    Raises:
        TypeError: If a leaf is of another type, with its place in the tree.
    """
    from safetensors.torch import save  # late: `import lightning_fcl` loads nothing that Lightning does not load

    return save(*flatten_tree(tree))


def flatten_tree(tree: Any) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a tree by a short name, and the skeleton that puts them back, as safetensors' metadata."""
    tensors: dict[str, Tensor] = {}
    skeleton = _encode(tree, tensors, set(), "state")
    return tensors, {_TREE: json.dumps(skeleton, allow_nan=True)}


def save_tree(tree: Any, path: str | Path) -> None:
    """Write ``tree`` as :func:`dump_tree` encodes it to ``path`` through a temporary file and a rename."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write_tensors(temporary, *flatten_tree(tree))
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None, *, digest: bool = False
) -> str:
    """Write a safetensors file from the tensors' own memory and wait until the disk has it.

    Args:
        path: Target; its folder must exist.
        tensors: On the CPU, contiguous; no two may overlap.
        metadata: Texts for the file's header.
        digest: Hash the file while the disk writes.

    Returns:
        The SHA-256 of the file in hexadecimal digits; empty without ``digest``.

    Raises:
        OSError: If the disk refuses.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(dict(tensors), path, metadata)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    with path.open("rb") as file, ThreadPoolExecutor(1) as pool:
        found = pool.submit(hashlib.file_digest, file, "sha256") if digest else None
        os.fsync(file.fileno())
        return found.result().hexdigest() if found else ""


def load_tree(path: str | Path) -> Any:
    """Read what :func:`save_tree` wrote.

    Args:
        path: The file.

    Returns:
        The tree, with tensors on the CPU.

    Raises:
        FileNotFoundError: If there is no such file.
        CheckpointError: If the file is damaged or was not written by :func:`save_tree`.
    """
    from safetensors import safe_open

    if not Path(path).is_file():
        raise FileNotFoundError(f"`path` must be a file written by this library, got {str(path)!r}, which is not there")
    try:
        with safe_open(str(path), framework="pt") as file:
            skeleton = json.loads((file.metadata() or {})[_TREE])
            return _decode(skeleton, {key: file.get_tensor(key) for key in file.keys()})  # noqa: SIM118
    except Exception as error:
        raise CheckpointError(f"{str(path)!r} is damaged or of another kind: {error}") from error


def load_bytes(data: bytes) -> Any:
    """Inverse of :func:`dump_tree`."""
    from safetensors.torch import load as load_tensors

    size = int.from_bytes(data[:8], "little")  # the format's header: length, then JSON
    skeleton = json.loads(json.loads(data[8 : 8 + size])["__metadata__"][_TREE])
    return _decode(skeleton, load_tensors(data))


def _encode(node: Any, tensors: dict[str, Tensor], seen: set[int], where: str) -> Any:
    if isinstance(node, Tensor):
        key = str(len(tensors))
        tensor = node.detach().cpu().contiguous()
        # safetensors refuses tensors that share memory
        tensors[key] = tensor.clone() if tensor.untyped_storage().data_ptr() in seen else tensor
        seen.add(tensor.untyped_storage().data_ptr())
        return {_REF: key}
    if isinstance(node, Mapping):
        if all(isinstance(k, str) for k in node):
            return {k: _encode(v, tensors, seen, f"{where}[{k!r}]") for k, v in node.items()}
        return {
            _MAP: [
                [_encode(k, tensors, seen, where), _encode(v, tensors, seen, f"{where}[{k!r}]")]
                for k, v in node.items()
            ]
        }
    if isinstance(node, list | tuple):
        items = [_encode(item, tensors, seen, f"{where}[{i}]") for i, item in enumerate(node)]
        return {_TUPLE: items} if isinstance(node, tuple) else items
    if node is None or isinstance(node, bool | int | float | str):
        return node
    raise TypeError(
        f"`{where}` must be a tensor, number, string, bool, None or a dict, list or tuple of them, "
        f"got {type(node).__name__}. Nothing is pickled: turn it into tensors and plain values."
    )


def _decode(node: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(node, list):
        return [_decode(item, tensors) for item in node]
    if not isinstance(node, dict):
        return node
    if _REF in node:
        return tensors[node[_REF]]
    if _MAP in node:
        return {_decode(k, tensors): _decode(v, tensors) for k, v in node[_MAP]}
    if _TUPLE in node:
        return tuple(_decode(item, tensors) for item in node[_TUPLE])
    return {k: _decode(v, tensors) for k, v in node.items()}


def clone_tree(tree: Any) -> Any:
    """Deep copy of a state tree; tensors are cloned and detached."""
    if isinstance(tree, Tensor):
        return tree.detach().clone()
    if isinstance(tree, Mapping):
        return {k: clone_tree(v) for k, v in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(clone_tree(item) for item in tree)
    return tree


def tree_bytes(tree: Any) -> int:
    """Bytes of all tensors in a state tree."""
    if isinstance(tree, Tensor):
        return tree.numel() * tree.element_size()
    if isinstance(tree, Mapping):
        return sum(tree_bytes(v) for v in tree.values())
    if isinstance(tree, list | tuple):
        return sum(tree_bytes(v) for v in tree)
    return 0


def tensor_from_bytes(data: bytes) -> Tensor:
    """A uint8 tensor of shape ``[len(data)]`` that owns its memory."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
