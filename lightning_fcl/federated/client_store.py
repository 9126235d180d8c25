"""What each client keeps between rounds: in memory up to a budget, on disk beyond, versioned by round."""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_fcl.serialize import clone_tree, load_tree, save_tree, tree_bytes


class ClientStore:
    """State trees by client id.

    A state is written once per round in which it changed, under a new name: at the end of the round, or as soon as the
    changed ones outgrow the budget. Files of earlier rounds stay until no checkpoint needs them. So a killed run finds
    every client as it was at the last commit.

    Args:
        folder: Where the files live; shared by all ranks.
        budget_bytes: Memory for recently used states.
    """

    def __init__(self, folder: Path, budget_bytes: int) -> None:
        self.folder = folder
        self.budget_bytes = budget_bytes
        self.versions: dict[int, int] = {}
        self.next_version = 0
        self._cache: OrderedDict[int, tuple[int, Any]] = OrderedDict()
        self._cached_bytes = 0
        self._changed: dict[int, Any] = {}  # not on disk yet
        self._changed_bytes = 0
        self._written: set[int] = set()  # on disk under the next version
        self._handed_out: dict[int, tuple[Any, list[Any]]] = {}  # holds the state, so that its ids stay its own
        self._crowded: set[int] = set()  # clients that may have a file which nobody needs
        self._swept = False  # whether what earlier processes left behind has been looked for

    def get(self, client: int) -> Any:
        """The client's state at the last commit, or ``None`` if it never had one."""
        version = self.versions.get(client)
        if version is None:
            return None
        cached = self._cache.get(client)
        if cached is not None and cached[0] == version:
            self._cache.move_to_end(client)
            state = cached[1]
        else:
            state = load_tree(self._path(client, version))
            self._keep(client, version, state)
        self._handed_out[client] = state, _fingerprint(state)
        return state

    def put(self, client: int, state: Any) -> None:
        """Take the client's state after its job; unchanged states cost nothing."""
        _, before = self._handed_out.pop(client, (None, None))
        if _fingerprint(state) == before:
            return
        self._drop_changed(client)
        self._changed[client] = clone_tree(state)  # callbacks may hand out tensors that they go on writing into
        self._changed_bytes += tree_bytes(state)
        if self._changed_bytes > self.budget_bytes:
            self._write_changed()

    def discard(self, *clients: int) -> None:
        """Take back what jobs of this round did to clients' states: they failed, or the server used nothing of them."""
        for client in clients:
            self._handed_out.pop(client, None)
            self._drop_changed(client)
            self._drop_cached(client)
            self._written.discard(client)  # the file has no version then, and goes with the next pruning

    def flush(self) -> dict[int, int]:
        """Write what is left to write, and begin the next version.

        Returns:
            The new version of each client that this rank wrote since the last flush.
        """
        self._write_changed()
        new = dict.fromkeys(sorted(self._written), self.next_version)
        self._written.clear()
        self.next_version += 1
        return new

    def _write_changed(self) -> None:
        for client, state in self._changed.items():
            path = self._path(client, self.next_version)
            path.parent.mkdir(parents=True, exist_ok=True)
            save_tree(state, path)
            self._keep(client, self.next_version, state)
            self._written.add(client)
        self._changed.clear()
        self._changed_bytes = 0

    def touch(self, clients: Iterable[int]) -> None:
        """Note that jobs of these clients, on whatever rank, may have written files; :meth:`prune` looks there."""
        self._crowded.update(clients)

    def prune(self, keep: Sequence[Mapping[int, int]]) -> None:
        """Delete files that no checkpoint refers to.

        Only folders of clients that were touched, or of which several files were needed the last time, are opened: a
        commit must not cost a look at every client that ever took part. The first call looks at all.

        Args:
            keep: Versions by client that are still needed: those of each checkpoint that is kept, and the newest ones.
        """
        folders = (
            [self._folder(client) for client in sorted(self._crowded)] if self._swept else self.folder.glob("client_*")
        )
        self._swept, self._crowded = True, set()
        for folder in folders:
            client = int(folder.name.partition("_")[2])
            needed = {self._path(client, versions[client]) for versions in keep if client in versions}
            for path in folder.glob("*.safetensors"):
                if path not in needed:
                    path.unlink(missing_ok=True)
            if len(needed) > 1:
                self._crowded.add(client)

    def _keep(self, client: int, version: int, state: Any) -> None:
        self._drop_cached(client)
        self._cache[client] = (version, state)
        self._cached_bytes += tree_bytes(state)
        while self._cached_bytes > self.budget_bytes and self._cache:
            self._drop_cached(next(iter(self._cache)))

    def _drop_cached(self, client: int) -> None:
        _, state = self._cache.pop(client, (0, None))
        self._cached_bytes -= tree_bytes(state)

    def _drop_changed(self, client: int) -> None:
        self._changed_bytes -= tree_bytes(self._changed.pop(client, None))

    def _folder(self, client: int) -> Path:
        return self.folder / f"client_{client:06d}"

    def _path(self, client: int, version: int) -> Path:
        return self._folder(client) / f"round_{version:06d}.safetensors"


def _fingerprint(state: Any) -> list[Any]:
    """Identity and write count of every tensor, and every plain value: equal only if nothing was changed."""
    if isinstance(state, Tensor):
        return [(id(state), state._version)]
    if isinstance(state, dict):
        return [entry for key, value in state.items() for entry in (key, *_fingerprint(value))]
    if isinstance(state, list | tuple):
        return [entry for value in state for entry in _fingerprint(value)]
    return [state]
