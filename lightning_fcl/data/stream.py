"""TaskStream: datasets, shared among clients, in the order in which they arrive."""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

from torch.utils.data import ConcatDataset, DataLoader
from typing_extensions import Unpack

from lightning_fcl.data.class_split import ClassOrder, class_groups, split_source
from lightning_fcl.data.labels import matched
from lightning_fcl.data.partition import check_at_least
from lightning_fcl.data.plan import PartitionPlan
from lightning_fcl.data.planning import LoaderOptions, StreamOptions, check_agrees, draw_plan
from lightning_fcl.data.pooling import cumulative, joint, pooled
from lightning_fcl.data.schedule import ScheduleLike
from lightning_fcl.data.sources import Batching, as_source, as_sources
from lightning_fcl.data.split import Partition
from lightning_fcl.data.stream_labels import StreamLabels, checked_index
from lightning_fcl.exceptions import DatasetError


class TaskStream(StreamLabels):
    """Training sets shared among clients, and one evaluation set for each, in the order in which they arrive.

    Most users call :meth:`from_datasets`, :meth:`domains` or :meth:`split_classes`, and then perhaps :meth:`stages` to
    let clients train on different tasks at the same time. The constructor itself rebuilds a stream from a saved plan:
    ``TaskStream(train, test, plan=PartitionPlan.load("plan.json"))``.

    A *stage* is a row of the score matrix: what happens between two evaluations. A *column* is an evaluation set.
    Stage j is task j unless :meth:`stages` says otherwise.

    Args:
        train: Training sets: map-style datasets (any object with ``__len__`` and ``__getitem__``), or DataLoaders,
            which lend dataset, batch size, collate function, workers and ``drop_last``, but not their shuffle.
        test: Evaluation sets, one per training set, of the same kinds.
        plan: Who owns which examples, and who trains when.
        batch_size: Examples per training batch; the last one may be smaller.
        eval_batch_size: Examples per evaluation batch; by default ``batch_size``.
        shuffle: Train in a new order each epoch, drawn from torch's global generator as a plain
            ``DataLoader(shuffle=True)`` does.
        drop_last: Drop the last training batch of an epoch if it is incomplete, unless it is the client's only one:
            BatchNorm cannot train on one example. No evaluation batch is dropped.
        collate_fn: Makes a batch of a list of examples; by default torch's.
        num_workers: Loading processes per DataLoader; 0 loads in the training process.

    Raises:
        DatasetError: If a dataset is iterable-style or empty, or the sets do not fit the plan.

    Example:
        >>> data = [([0.0, 1.0], label) for label in (0, 1, 2)] * 4
        >>> stream = TaskStream.from_datasets([data, data], [data, data], clients=4, names=["dawn", "dusk"])
        >>> stream
        TaskStream(2 stages, 4 clients, names=('dawn', 'dusk'), partition='IID(min_examples=1)')
        >>> stream.num_examples(task=0, client=3), stream.seen(task=0)
        (3, (0,))
    """

    def __init__(
        self,
        train: Sequence[Any],
        test: Sequence[Any],
        *,
        plan: PartitionPlan,
        batch_size: int = 32,
        eval_batch_size: int | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
    ) -> None:
        self.plan = plan
        self.shuffle = shuffle
        self._batching = Batching(
            batch_size=batch_size, collate_fn=collate_fn, num_workers=num_workers, drop_last=drop_last
        )
        self._eval_batching = replace(self._batching, batch_size=eval_batch_size or batch_size)
        self._train = as_sources(train, "train")
        self._labels = {}
        self._test = as_sources(test, "test")
        sizes = tuple(map(len, self._train))
        check_at_least("batch_size", batch_size, 1)
        check_at_least("eval_batch_size", batch_size if eval_batch_size is None else eval_batch_size, 1)
        check_at_least("num_workers", num_workers, 0)
        if len(self._test) != len(self._train):
            raise DatasetError(f"`test` must hold one set per training set ({len(sizes)}), got {len(self._test)}.")
        if sizes != plan.sizes:
            raise DatasetError(f"`plan` must be made for `train` of sizes {list(sizes)}, got {list(plan.sizes)}.")

    @classmethod
    def from_datasets(
        cls,
        train: Sequence[Any],
        test: Sequence[Any],
        *,
        clients: int | None = None,
        partition: Partition = "iid",
        seed: int = 0,
        names: Sequence[str] | None = None,
        labels: Sequence[Any] | None = None,
        plan: PartitionPlan | None = None,
        **options: Unpack[LoaderOptions],
    ) -> "TaskStream":
        """One task per training set, each shared among all clients.

        Args:
            train: Training sets, one per task; datasets or DataLoaders.
            test: Evaluation sets, one per task.
            clients: Number of clients.
            partition: How a training set is shared. By name, with default settings: ``"iid"``, ``"label_dirichlet"``,
                ``"quantity_dirichlet"``, ``"extended_dirichlet"``, ``"shards"``, ``"by_domain"``. With settings of your
                own: ``LabelDirichlet(alpha=0.1)``, ``NaturalClients(ids)``, or any function from ``(examples, clients,
                rng)`` to one client number per example.
            seed: Seeds the partition; each task draws its own.
            names: Names of the tasks; by default ``"task_0"``, ``"task_1"``, ...
            labels: Labels of each training set, if they cannot be found in the data (``.targets``, ``.labels``, the
                last tensor of a TensorDataset, a label column, or the last entry of each example).
            plan: A plan in the place of ``clients``, ``partition``, ``seed`` and ``names``.
            **options: How batches are made, from ``batch_size`` to ``num_workers``, as in the class.

        Raises:
            DatasetError: If the data cannot be shared as asked.
        """
        sources = as_sources(train, "train")
        if labels is not None:
            if len(labels) != len(sources):
                raise DatasetError(f"`labels` must hold one list per task ({len(sources)}), got {len(labels)}.")
            sources = tuple(s.with_labels(labels[i], f"labels[{i}]") for i, s in enumerate(sources))
        if plan is None:
            plan = draw_plan(sources, clients=clients, partition=partition, seed=seed, names=names)
        else:
            check_agrees(plan, clients=clients, names=names)
        return cls(sources, test, plan=plan, **options)

    @classmethod
    def domains(cls, domains: Mapping[str, tuple[Any, Any]], **options: Unpack[StreamOptions]) -> "TaskStream":
        """One task per domain: the same classes, seen differently.

        Args:
            domains: Training and evaluation set of each domain by its name, in the order of the tasks.
            **options: As in :meth:`from_datasets`.

        Raises:
            DatasetError: If the data cannot be shared as asked.
        """
        if not isinstance(domains, Mapping) or not domains:
            raise DatasetError(f"`domains` must map names to (train, test), got {type(domains).__name__}.")
        train, test = zip(*domains.values(), strict=True)
        return cls.from_datasets(train, test, names=list(domains), **options)

    @classmethod
    def split_classes(
        cls,
        train: Any,
        test: Any,
        *,
        tasks: int | Sequence[int],
        class_order: ClassOrder = "sorted",
        labels: tuple[Any, Any] = (None, None),
        names: Sequence[str] | None = None,
        **options: Unpack[StreamOptions],
    ) -> "TaskStream":
        """One task per group of classes of one dataset (class-incremental); labels keep their numbers.

        Args:
            train: The training set; a dataset or a DataLoader.
            test: The evaluation set.
            tasks: Number of tasks, or the number of classes of each task.
            class_order: ``"sorted"``, ``"random"`` (by ``seed``), or all classes in the order wanted.
            labels: Labels of ``train`` and ``test``, if they cannot be found in the data.
            names: Names of the tasks.
            **options: As in :meth:`from_datasets`.

        Raises:
            DatasetError: If the classes cannot be cut so, or the data cannot be shared as asked.
        """
        train_source = as_source(train, "train").with_labels(labels[0], "labels[0]")
        test_source = as_source(test, "test").with_labels(labels[1], "labels[1]")
        found = train_source.examples().labels
        seed = plan.seed if (plan := options.get("plan")) else options.get("seed", 0)
        groups = class_groups(found, tasks, order=class_order, seed=seed)
        return cls.from_datasets(
            split_source(train_source.with_labels(found, "train"), groups, "train"),
            split_source(test_source, groups, "test"),
            names=names,
            **options,
        )

    def stages(self, schedule: ScheduleLike = "hom", *, lag: float = 0.0) -> "TaskStream":
        """The same data, owned by the same clients, in another order.

        Args:
            schedule: ``"hom"``: all clients train on task j in stage j. ``"het"``: different clients train on different
                tasks in the same stage; each client sees each task once. Or a table by stage and client of task
                numbers: an int, a tuple of several, or ``()`` to sit out.
            lag: Share of the clients, in [0, 1), that are one stage behind all along. In stage 0 they train on stage
                0, there being nothing older, and on it again in stage 1.

        Returns:
            A new stream; random choices follow the plan's seed.

        Raises:
            ValueError: If the schedule or the lag is malformed.
        """
        return self._with(self.plan.with_schedule(schedule, lag=lag))

    def pooled(self) -> "TaskStream":
        """The same tasks, owned by one client: sequential fine-tuning, the lower bound without a federation.

        Returns:
            A new stream; use ``clients_per_round=1``.

        Raises:
            DatasetError: If clients train on different sets in a stage.
        """
        return self._with(pooled(self.plan))

    def joint(self) -> "TaskStream":
        """All tasks of all clients in one stage of one client: centralised training, the upper bound.

        The evaluation sets stay apart, so the score matrix has one row.

        Returns:
            A new stream; use ``clients_per_round=1``. Sets are joined in the order of the tasks, and shuffled as one.
        """
        return self._with(joint(self.plan))

    def cumulative(self) -> "TaskStream":
        """Every client keeps what it had: in each stage it trains on all of its data so far, the federated bound."""
        return self._with(cumulative(self.plan))

    def _with(self, plan: PartitionPlan) -> "TaskStream":
        stream = copy(self)
        stream.plan = plan
        return stream

    def __len__(self) -> int:
        """Number of stages."""
        return len(self.plan.schedule)

    def __repr__(self) -> str:
        plan = self.plan
        return (
            f"TaskStream({len(self)} stages, {plan.clients} clients, names={plan.names}, partition={plan.partition!r})"
        )

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the columns."""
        return self.plan.names

    @property
    def num_clients(self) -> int:
        """Number of clients, with or without data."""
        return self.plan.clients

    def clients(self, task: int) -> list[int]:
        """Sorted ids of the clients that have data in stage ``task``."""
        return list(self.plan.owners[checked_index("task", task, len(self))])

    def num_examples(self, task: int, client: int) -> int:
        """Training examples of ``client`` in stage ``task``."""
        return sum(len(self.plan.parts[source][client]) for source in self._sources_of(task, client))

    def train_loader(self, task: int, client: int) -> DataLoader[Any]:
        """A fresh DataLoader over the examples of ``client`` in stage ``task``.

        Args:
            task: Stage, counted from 0.
            client: Id of a client with data in that stage.

        Returns:
            A plain DataLoader over a ``Subset``. With ``shuffle`` it draws from torch's global generator.

        Raises:
            DatasetError: If the client has no data in that stage.
        """
        sources = [s for s in self._sources_of(task, client) if len(self.plan.parts[s][client])]
        if not sources:
            raise DatasetError(f"`client` must have data in stage {task}, got {client}, which has none.")
        parts = [self._train[s].take(self.plan.parts[s][client]) for s in sources]
        batching = parts[0].batching(self._batching)
        if any(part.batching(self._batching) != batching for part in parts):
            raise DatasetError(
                f"`train` sets {sources} must be batched alike, since client {client} trains on them together in stage "
                f"{task}. Give datasets, or DataLoaders of the same batch size, collate function and workers."
            )
        data = parts[0].dataset if len(parts) == 1 else ConcatDataset([part.dataset for part in parts])
        return batching.loader(data, shuffle=self.shuffle)

    def eval_loader(self, column: int) -> DataLoader[Any]:
        """A fresh DataLoader over evaluation set ``column``, in the set's own order."""
        source = self._test[checked_index("column", column, len(self._test))]
        batching = replace(source.batching(self._eval_batching), drop_last=False)
        return batching.loader(source.dataset, shuffle=False)

    def client_eval_loader(self, task: int, client: int) -> DataLoader[Any]:
        """A fresh DataLoader over evaluation examples in the class shares of ``client`` in stage ``task``.

        Args:
            task: Stage, counted from 0.
            client: Id of a client with data in that stage.

        Returns:
            As many examples of the evaluation sets of the client's tasks as its shares of classes allow, in the sets'
            own order; clients share them.

        Raises:
            DatasetError: If an example holds no single integer label.
        """
        parts = []
        for source in self._sources_of(task, client):
            wanted = self._labels_of(source)[self.plan.parts[source][client]]
            parts.append(self._test[source].take(matched(wanted, self._test[source].examples().labels)))
        batching = replace(parts[0].batching(self._eval_batching), drop_last=False)
        data = parts[0].dataset if len(parts) == 1 else ConcatDataset([part.dataset for part in parts])
        return batching.loader(data, shuffle=False)

    def summary(self) -> dict[str, Any]:
        """What a run's configuration keeps of the stream: plain types only."""
        plan = self.plan
        batchings = [source.batching(self._batching) for source in self._train]
        return {
            "stages": len(self),
            "clients": plan.clients,
            "names": list(plan.names),
            "partition": plan.partition,
            "seed": plan.seed,
            "train_examples": list(plan.sizes),
            "eval_examples": [len(source) for source in self._test],
            "batch_size": [batching.batch_size for batching in batchings],
            "drop_last": [batching.drop_last for batching in batchings],
            "shuffle": self.shuffle,
            "deviation": plan.deviation,
            "plan": plan.hash,
        }
