"""Tables of traffic, memory and time, from the dry run's figures."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import lightning as L
from torch import Tensor

from lightning_fcl.aggregators.rows import RowReducer
from lightning_fcl.doctor.diagnosis import Diagnosis, Table
from lightning_fcl.doctor.dry_run import STEPS, DryRun
from lightning_fcl.functional.costs import Traffic, exact_mean_bytes, link_seconds, run_traffic
from lightning_fcl.reports.tables import data_size, duration

if TYPE_CHECKING:
    from lightning_fcl.data.stream import TaskStream
    from lightning_fcl.federated.trainer import FederatedTrainer

_MIB = 1 << 20
_LOOKS = 32  # clients per task whose batches are counted
_STATE_ENTRY = 20  # bytes of a client's entry in a commit's manifest, about


def add_traffic(
    found: Diagnosis, trainer: "FederatedTrainer", stream: "TaskStream", seen: DryRun, link_mbit: Sequence[float]
) -> None:
    """Add the table of bytes, and of the seconds they take on links.

    Args:
        found: Gains a table and numbers.
        trainer: Rounds, clients per round.
        stream: Clients of each stage.
        seen: Bytes of the dry run.
        link_mbit: Speeds, megabits per second.
    """
    rounds = [(trainer.rounds_of(task), _cohort(trainer, stream, task)) for task in range(len(stream))]
    first, steady, *boundary = [Traffic(down // n, up // n) for down, up, n in seen.server.traffic]
    whole = [run_traffic(steady, clients, count) for count, clients in rounds]
    once = rounds[0][1]  # the first round of all may carry less or more than the others
    down = sum(t.down for t in whole) + (first.down - steady.down) * once
    up = sum(t.up for t in whole) + (first.up - steady.up) * once
    up += sum(one.up * len(stream.clients(task)) for one in boundary for task in range(len(stream)))
    found.numbers |= {"bytes_down": down, "bytes_up": up, "round_down": steady.down, "round_up": steady.up}
    busiest = max(clients for _, clients in rounds)
    rows = [
        ("a client in a round", data_size(steady.down), data_size(steady.up)),
        (f"a round of {busiest} clients", data_size(steady.down * busiest), data_size(steady.up * busiest)),
    ]
    rows += [("a client at a task's end", "0 B", data_size(one.up)) for one in boundary if one.up]
    rows.append((f"the run: {sum(n for n, _ in rounds)} rounds", data_size(down), data_size(up)))
    found.tables.append(Table("traffic", ("", "down", "up"), rows))
    add_links(found, steady, rounds, link_mbit)


def add_links(
    found: Diagnosis, payload: Traffic, rounds: Sequence[tuple[int, int]], link_mbit: Sequence[float]
) -> None:
    """Add the table of seconds on links.

    Args:
        found: Gains a table and numbers.
        payload: Of one client in one round.
        rounds: ``(rounds, clients)`` of each task.
        link_mbit: Speeds, megabits per second.
    """
    rows = []
    for mbit in link_mbit:
        times = [link_seconds(payload, clients, count, mbit) for count, clients in rounds]
        client, server = sum(t.client for t in times), sum(t.server for t in times)
        found.numbers |= {f"seconds_client_{mbit:g}_mbit": client, f"seconds_server_{mbit:g}_mbit": server}
        rows.append((f"{mbit:g} Mbit/s", in_words(client), in_words(server)))
    header = ("sending in the whole run", "each client its own link", "all through the server's link")
    found.tables.append(Table("links", header, rows))


def add_memory(
    found: Diagnosis, trainer: "FederatedTrainer", module: L.LightningModule, stream: "TaskStream", seen: DryRun
) -> None:
    """Add the table of memory of one process, and of bytes on disk.

    Args:
        found: Gains a table and numbers.
        trainer: Budgets and cohort.
        module: Its tensors.
        stream: Number of clients.
        seen: Bytes of the dry run.
    """
    probe, layout, clients = seen.probe, seen.probe.layout, stream.num_clients
    assert layout is not None
    cohort = max(_cohort(trainer, stream, task) for task in range(len(stream)))
    rows_kept = cohort if isinstance(trainer.chain.reducer, RowReducer) else 8
    states = seen.files["client"]
    memory = {
        "weights": ("weights and buffers", tensor_bytes([*module.parameters(), *module.buffers()])),
        "gradients": ("gradients", probe.gradient_bytes),
        "optimizer": ("optimiser state", probe.optimizer_bytes),
        "vectors": (
            "vectors of engine and server",
            exact_mean_bytes(layout.size, layout.dtype.itemsize, cohort, slab=rows_kept),
        ),
        "server": ("state of server steps and methods", seen.server.state_bytes),
        "examples": ("clients' examples, at most", int(trainer.preload_mb * _MIB)),
        "states": ("clients' states, at most", min(int(trainer.client_state_mb * _MIB), states * clients)),
    }
    if probe.sharded:
        found.add(
            "note", "memory", "the strategy cuts tensors over ranks; the table has those that a module shows whole"
        )
    commit = seen.files["commit"] + _STATE_ENTRY * clients * (states > 0)
    disk = {
        "commit": (f"a commit; the newest {trainer.keep_checkpoints} are kept", commit),
        "client": ("the state of one client", states),
        "clients": (f"states of {clients:,} clients", states * clients),
    }
    for kind, title, sizes in (
        ("memory", "memory of one process, without activations", memory),
        ("disk", "disk", disk),
    ):
        found.numbers |= {f"{kind}_{key}": size for key, (_, size) in sizes.items()}
        rows = [(name, data_size(size)) for name, size in sizes.values() if size]
        found.tables.append(Table(title, ("", "bytes"), rows))


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of all elements."""
    return sum(t.numel() * t.element_size() for t in tensors)


def in_words(seconds: float) -> str:
    """Wall time, also below a millisecond.

    Example:
        >>> in_words(0.00042), in_words(75)
        ('0.42 ms', '1 min 15 s')
    """
    return duration(seconds) if seconds >= 0.01 or seconds == 0 else f"{1000 * seconds:.2g} ms"


def add_time(found: Diagnosis, trainer: "FederatedTrainer", stream: "TaskStream", seen: DryRun) -> None:
    """Add the estimate of time: measured in the dry run, multiplied by what the run has of it.

    Args:
        found: Gains a table and numbers.
        trainer: Rounds, epochs, evaluations.
        stream: Batches.
        seen: Seconds of the dry run.
    """
    probe, world = seen.probe, seen.choices["world_size"] if trainer.parallel == "clients" else 1
    batch, evaluation = min(probe.batch_seconds[1:] or probe.batch_seconds), min(probe.eval_seconds, default=0.0)
    other = max(0.0, min(probe.job_seconds) - STEPS * batch)
    train = 0.0
    for task in range(len(stream)):
        jobs = trainer.rounds_of(task) * -(-_cohort(trainer, stream, task) // world)
        train += jobs * (other + batch * _batches(trainer, stream, task))
    columns = [len(stream.eval_loader(column)) for column in range(len(stream.names))]
    if trainer.limit_eval_batches is not None:
        columns = [min(count, trainer.limit_eval_batches) for count in columns]
    every = trainer.eval_every
    times = sum(1 if every is None else -(-trainer.rounds_of(t) // every) for t in range(len(stream)))
    evaluate = (times + trainer.measure_baseline) * sum(columns) * evaluation / world
    found.numbers |= {"seconds_batch": batch, "seconds_train": train, "seconds_evaluate": evaluate}
    rows = [
        ("a training batch, measured", in_words(batch)),
        ("an evaluation batch, measured", in_words(evaluation)),
        ("training in the run, estimated", in_words(train)),
        ("evaluation in the run, estimated", in_words(evaluate)),
    ]
    found.tables.append(Table("time on this machine, without sending and boundary passes", ("", "seconds"), rows))


def _cohort(trainer: "FederatedTrainer", stream: "TaskStream", task: int) -> int:
    return min(trainer.clients_per_round, len(stream.clients(task)))


def _batches(trainer: "FederatedTrainer", stream: "TaskStream", task: int) -> float:
    """Mean number of batches of a client's job, over a few clients."""
    if trainer.local_steps is not None:
        return float(trainer.local_steps * trainer.accumulate_grad_batches)
    clients = stream.clients(task)
    looked = clients[:: max(1, len(clients) // _LOOKS)]
    counts = [len(stream.train_loader(task, client)) for client in looked]
    if trainer.limit_train_batches is not None:
        counts = [min(count, trainer.limit_train_batches) for count in counts]
    return trainer.local_epochs * sum(counts) / len(counts)
