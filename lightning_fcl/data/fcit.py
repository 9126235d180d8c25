"""The FCIT benchmark's scenarios as streams, on drawn pictures or on instruction files of your own."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from lightning_fcl.data.dirichlet import LabelDirichlet, QuantityDirichlet
from lightning_fcl.data.drawn_instructions import DRAWN_TASKS, drawn_instructions
from lightning_fcl.data.instructions import InstructionDataset, as_list, read_instructions
from lightning_fcl.data.schedule import Schedule
from lightning_fcl.data.stream import TaskStream
from lightning_fcl.exceptions import DatasetError

Pair: TypeAlias = tuple[InstructionDataset, InstructionDataset]
FCIT_PRESET = {"clients": 50, "clients_per_round": 5, "rounds": 10}
"""Clients, clients per round and rounds per stage of the benchmark."""
GROUPS = ("general", "chart", "math", "other")
REAL_GROUPS = {"general": ("imagenette", "easyvqa"), "math": ("iconqa", "puzzlevqa"), "other": ("nlvr", "scienceqa")}
HET = {  # of the benchmark: what the clients of a round train on in each stage
    "task": (
        (1, 2, 4, 5, 6),
        (3, 4, 5, 7, 7),
        (0, 2, 3, 4, 5),
        (0, 0, 1, 3, 7),
        (1, 2, 4, 4, 5),
        (0, 3, 5, 7, 7),
        (2, 2, 5, 7, 7),
        (5, 5, 5, 6, 6),
    ),
    "capability": ((0, 1, 1, 3, 3), (0, 2, 2, 2, 3), (1, 2, 2, 3, 3), (0, 0, 0, 1, 1)),
}


def fcit_stream(
    scenario: Literal["hom", "het"] = "hom",
    setting: Literal["task", "capability"] = "task",
    *,
    beta: float = 1.0,
    skew: Literal["quantity", "label"] = "quantity",
    clients: int = 50,
    data_dir: str | Path | None = None,
    tasks: Sequence[str] | None = None,
    groups: Mapping[str, Sequence[str]] | None = None,
    train_size: int = 1000,
    test_size: int = 200,
    batch_size: int = 32,
    seed: int = 0,
) -> TaskStream:
    """One of the FCIT benchmark's streams.

    Args:
        scenario: ``"hom"``: all clients train on the same set in a stage. ``"het"``: in each stage a fifth of the
            clients trains on each of five listed sets; the stages of :meth:`TaskStream.stages` where the benchmark's
            list does not fit the number of sets.
        setting: ``"task"``: a set per task. ``"capability"``: a set per group of tasks.
        beta: Concentration of the Dirichlet draw that shares a set among clients; the benchmark has 0.5, 1 and 5.
        skew: ``"quantity"``: sizes are skewed (the benchmark). ``"label"``: answers are.
        clients: Number of clients.
        data_dir: Folder with a folder per task that holds ``train`` and ``test`` (``.jsonl`` or ``.json``); without it,
            drawn pictures.
        tasks: Names of the tasks, in order; by default the first eight drawn ones (all twelve in the capability
            setting), or the folders of ``data_dir``.
        groups: Names of the tasks of each group, in order; by default those of the drawn tasks.
        train_size: Training examples of each task: so many drawn, or the first ones of a file.
        test_size: Test examples of each task.
        batch_size: Examples per batch; a batch is a list of rows.
        seed: Seeds the pictures and the shares.

    Returns:
        The stream; ``names`` are the tasks or groups.

    Raises:
        DatasetError: If data is missing or malformed, or cannot be shared as asked.
        ValueError: If an argument is unknown or out of range.
        MissingExtraError: If scikit-learn or Pillow is not installed (extras ``recipes`` and ``mllm``).

    Source: Guo et al., "Federated Continual Instruction Tuning", ICCV 2025 (https://arxiv.org/abs/2503.12897), and its
    code (github.com/Ghy0501/FCIT at 9b10259).

    Deviation: in the heterogeneous scenario the benchmark lists sets by position in a round; here a client keeps its
    set for a stage, and a round samples among them. Order of the groups: that of the drawn tasks.
    """
    for name, value, known in (
        ("scenario", scenario, ("hom", "het")),
        ("setting", setting, ("task", "capability")),
        ("skew", skew, ("quantity", "label")),
    ):
        if value not in known:
            raise ValueError(f"`{name}` must be {known[0]!r} or {known[1]!r}, got {value!r}.")
    sets = instruction_sets(data_dir, tasks, train_size=train_size, test_size=test_size, seed=seed, setting=setting)
    if setting == "capability":
        sets = _grouped(sets, groups or (_DRAWN_GROUPS if data_dir is None else REAL_GROUPS))
    stream = TaskStream.domains(
        sets,
        clients=clients,
        partition=(QuantityDirichlet if skew == "quantity" else LabelDirichlet)(beta),
        seed=seed,
        batch_size=batch_size,
        collate_fn=as_list,
    )
    table = HET[setting]
    listed = len(sets) == len(table)  # the benchmark lists as many stages as it has sets
    return stream.stages(_spread(table, clients, seed) if scenario == "het" and listed else scenario)


def instruction_sets(
    data_dir: str | Path | None = None,
    tasks: Sequence[str] | None = None,
    *,
    train_size: int = 1000,
    test_size: int = 200,
    seed: int = 0,
    setting: Literal["task", "capability"] = "task",
) -> dict[str, Pair]:
    """Training and test set of each task, drawn or read; arguments as in :func:`fcit_stream`.

    Raises:
        DatasetError: If data is missing or malformed.
    """
    if data_dir is None:
        names = list(tasks or (DRAWN_TASKS if setting == "capability" else list(DRAWN_TASKS)[:8]))
        return {name: _drawn(name, train_size, test_size, seed) for name in names}
    folder = Path(data_dir)
    found = _found(folder)
    names = list(tasks or found)
    if not names or not set(names) <= set(found):
        raise DatasetError(
            f"`data_dir` must hold train.jsonl in a folder for each of {names or 'the tasks'}, got {found} in "
            f"{str(folder)!r}. Is the folder right?"
        )
    return {
        name: (_read(folder / name, "train", train_size), _read(folder / name, "test", test_size)) for name in names
    }


def unseen_sets(
    names: Collection[str], data_dir: str | Path | None = None, *, test_size: int = 200, seed: int = 0
) -> dict[str, InstructionDataset]:
    """Test set of each task that a stream leaves out, to see what training did to tasks that nobody trained on.

    Args:
        names: ``names`` of the stream: tasks, or groups, which stand for all their tasks.
        data_dir: As in :func:`fcit_stream`, like the rest.
        test_size: Questions of each task.
        seed: Seeds the pictures.

    Raises:
        DatasetError: If data is malformed.
    """
    groups = _DRAWN_GROUPS if data_dir is None else REAL_GROUPS
    seen = {task for name in names for task in (name, *groups.get(name, ()))}
    if data_dir is None:
        return {
            name: InstructionDataset(drawn_instructions(name, test_size, part="test", seed=seed))
            for name in DRAWN_TASKS
            if name not in seen
        }
    folder = Path(data_dir)
    return {name: _read(folder / name, "test", test_size) for name in _found(folder) if name not in seen}


def _found(folder: Path) -> list[str]:
    """Names of the tasks in a folder."""
    return sorted({file.parent.name for suffix in ("json", "jsonl") for file in folder.glob(f"*/train.{suffix}")})


def _drawn(name: str, train_size: int, test_size: int, seed: int) -> Pair:
    train = drawn_instructions(name, train_size, seed=seed)
    return InstructionDataset(train), InstructionDataset(drawn_instructions(name, test_size, part="test", seed=seed))


def _read(folder: Path, part: str, limit: int) -> InstructionDataset:
    file = next(
        (f for f in (folder / f"{part}.jsonl", folder / f"{part}.json") if f.is_file()), folder / f"{part}.jsonl"
    )
    return InstructionDataset(read_instructions(file, limit=limit))


def _grouped(sets: Mapping[str, Pair], groups: Mapping[str, Sequence[str]]) -> dict[str, Pair]:
    if missing := [name for names in groups.values() for name in names if name not in sets]:
        raise DatasetError(f"`groups` must name tasks that there are ({', '.join(sets)}), got {missing[0]!r}.")
    return {group: _joined([sets[name] for name in names]) for group, names in groups.items()}


def _joined(pairs: Sequence[Pair]) -> Pair:
    train, test = ([row for pair in pairs for row in pair[part].rows] for part in (0, 1))
    return InstructionDataset(train), InstructionDataset(test)


def _spread(table: Sequence[Sequence[int]], clients: int, seed: int) -> Schedule:
    """By stage and client, the set at the client's position in a random order of the clients."""
    order = np.random.default_rng([seed, clients]).permutation(clients)
    return tuple(tuple((row[int(place) % len(row)],) for place in order) for row in table)


_DRAWN_GROUPS: dict[str, list[str]] = {
    group: [task.name for task in DRAWN_TASKS.values() if task.group == group] for group in GROUPS
}


def general_rows(size: int, *, seed: int = 0) -> list[dict[str, Any]]:
    """Questions that the shipped tiny model was taught to answer, to see what it still can after the stream.

    Args:
        size: Number of questions.
        seed: Seeds the pictures; handwritten digits are those that were not trained on.

    Raises:
        MissingExtraError: If scikit-learn is not installed (extra ``recipes``).
    """
    from lightning_fcl.data.base_skills import lesson

    rng = np.random.default_rng([seed, 7])
    rows: list[dict[str, Any]] = []
    while len(rows) < size:
        picture, turns, _ = lesson(rng, "test", ["so"])
        turns = [turn for turn in turns if turn[0] != "repeat"]
        skill, question, answer = turns[int(rng.integers(len(turns)))]
        conversation = [{"from": "human", "value": f"<image>\n{question}"}, {"from": "gpt", "value": answer}]
        rows.append({"id": f"general-{len(rows)}", "image": picture, "task": skill, "conversations": conversation})
    return rows
