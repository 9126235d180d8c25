"""Persistent CPU ranks for tests: processes that form one gloo group and run functions on demand."""

import gc
import importlib
import importlib.util
import inspect
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

_GRACE = 10.0  # seconds that the other ranks get to finish once one rank has failed


class RankPool:
    """Worker processes that form one gloo process group and stay alive between calls.

    Inside a worker the environment says that the processes are launched already, so
    ``Fabric(accelerator="cpu", devices=world_size, strategy=...)`` joins the group instead of starting processes.
    Workers start at the first :meth:`run`, use one intra-op thread each, and are replaced at the next :meth:`run`
    if a call killed them.

    Args:
        world_size: Number of processes, at least 1.
        timeout: Seconds that one call may take before the pool is killed; also the time limit of a collective.

    Raises:
        ValueError: If ``world_size`` is below 1 or ``timeout`` is not positive.

    Example:
        >>> with RankPool(2) as pool:  # doctest: +SKIP
        ...     pool.run(torch.distributed.get_rank)
        [0, 1]
    """

    def __init__(self, world_size: int = 2, *, timeout: float = 120.0) -> None:
        if world_size < 1:
            raise ValueError(f"`world_size` must be at least 1, got {world_size}.")
        if not timeout > 0:
            raise ValueError(f"`timeout` must be a positive number of seconds, got {timeout}.")
        self.world_size = world_size
        self.timeout = timeout
        self._ranks: list[tuple[BaseProcess, Connection]] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float | None = None) -> list[Any]:
        """Call ``fn(*args)`` on every rank at once.

        Args:
            fn: Function at the top level of a module. Test modules work: they are found by their file.
            args: Arguments, the same on each rank; anything that pickles.
            timeout: Seconds this call may take; by default the pool's own limit.

        Returns:
            The results, one per rank, in rank order.

        Raises:
            ValueError: If ``fn`` cannot be found by name in its module, as with a lambda.
            TimeoutError: If a rank did not answer in time. The pool is killed; the next call starts a fresh one.
            RuntimeError: If a rank died without an answer. The pool is killed too.
            Exception: What ``fn`` raised on the lowest failing rank; its notes hold the rank and the traceback.
        """
        job = pickle.dumps(_Job.of(fn)), pickle.dumps(args)
        if not self._ranks:
            self._start()
        for _, pipe in self._ranks:
            pipe.send(job)
        answers = self._collect(self.timeout if timeout is None else timeout)
        for rank, answer in sorted(answers.items()):
            if isinstance(answer, _Failure):
                raise answer.revive(rank)
        return [answers[rank] for rank in range(self.world_size)]

    def close(self) -> None:
        """Stop the workers; a later :meth:`run` starts new ones."""
        for _, pipe in self._ranks:
            if not pipe.closed:
                pipe.close()  # a worker that finds its pipe closed leaves its group and exits
        for process, _ in self._ranks:
            process.join(_GRACE)
        self._kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> None:
        context = get_context("spawn")
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            place = _Place(rank, self.world_size, str(Path(self._folder.name) / "store"), self.timeout)
            process = context.Process(target=_serve, args=(place, theirs), daemon=True, name=f"rank-{rank}")
            process.start()
            theirs.close()
            self._ranks.append((process, ours))

    def _collect(self, timeout: float) -> dict[int, Any]:
        """Wait for every rank; once one has failed, the others get a short time, as they may hang in a collective."""
        answers: dict[int, Any] = {}
        pending = {pipe: rank for rank, (_, pipe) in enumerate(self._ranks)}
        deadline = time.monotonic() + timeout
        while pending:
            ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
            if not ready:
                self._kill()
                if any(isinstance(answer, _Failure) for answer in answers.values()):
                    return answers  # the failure is the story; the others only waited for it
                late = sorted(pending.values())
                raise TimeoutError(f"Ranks {late} did not answer within {timeout:g} s. The pool was killed.")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                answer = self._receive(pipe, rank := pending.pop(pipe))
                answers[rank] = answer
                if isinstance(answer, _Failure):
                    deadline = min(deadline, time.monotonic() + _GRACE)
        return answers

    def _receive(self, pipe: Connection, rank: int) -> Any:
        try:
            return pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionError) as error:
            process = self._ranks[rank][0]
            process.join(_GRACE)
            code = process.exitcode
            self._kill()
            raise RuntimeError(f"Rank {rank} died with exit code {code} before it answered.") from error

    def _kill(self) -> None:
        for process, pipe in self._ranks:
            pipe.close()
            if process.is_alive():
                process.kill()
            process.join()
            process.close()
        self._ranks = []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def run_on_ranks(fn: Callable[..., Any], *args: Any, world_size: int = 2, timeout: float = 120.0) -> list[Any]:
    """Call ``fn(*args)`` once on ``world_size`` fresh ranks; for one call only, as starting them takes seconds.

    Args:
        fn: As in :meth:`RankPool.run`.
        args: Arguments, the same on each rank.
        world_size: Number of processes.
        timeout: Seconds before the ranks are killed.

    Returns:
        The results, one per rank, in rank order.

    Raises:
        Exception: As in :meth:`RankPool.run`.
    """
    with RankPool(world_size, timeout=timeout) as pool:
        return pool.run(fn, *args)


@dataclass(frozen=True)
class _Place:
    """Where a worker stands: its rank, and the file through which the ranks find each other."""

    rank: int
    world_size: int
    store: str
    timeout: float

    def join(self) -> None:
        os.environ.update(
            RANK=str(self.rank),
            LOCAL_RANK=str(self.rank),
            NODE_RANK="0",
            WORLD_SIZE=str(self.world_size),
            LOCAL_WORLD_SIZE=str(self.world_size),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT="29500",  # asked for, never opened: the group exists before a library looks
        )
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{self.store}",
            rank=self.rank,
            world_size=self.world_size,
            timeout=timedelta(seconds=self.timeout),
        )


@dataclass(frozen=True)
class _Job:
    """A function by the file, module and name it lives under; a module that only pytest can import works too."""

    file: str
    module: str
    name: str

    @classmethod
    def of(cls, fn: Callable[..., Any]) -> Self:
        name = getattr(fn, "__qualname__", repr(fn))
        module = inspect.getmodule(fn)
        if module is None or getattr(module, name, None) is not fn:
            raise ValueError(
                f"`fn` must be a function at the top level of a module, got {name!r}. "
                "Move it out of the function or class, and pass its arguments through `run(fn, *args)`."
            )
        return cls(str(Path(inspect.getfile(module)).resolve()), module.__name__, name)

    def load(self) -> Callable[..., Any]:
        fn: Callable[..., Any] = getattr(self._load_module(), self.name)
        return fn

    def _load_module(self) -> ModuleType:
        known = sys.modules.get(self.module)
        if known is None:
            try:
                known = importlib.import_module(self.module)
            except ImportError:
                known = None
        if known is not None and str(Path(known.__file__ or "").resolve()) == self.file:
            return known
        spec = importlib.util.spec_from_file_location(self.module, self.file)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[self.module] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module


@dataclass(frozen=True)
class _Failure:
    """What a rank raised, in a form that always travels."""

    error: bytes | None
    text: str

    @classmethod
    def of(cls, error: BaseException) -> Self:
        text = "".join(traceback.format_exception(error))
        try:
            body = pickle.dumps(error)
            pickle.loads(body)  # some errors pickle and then cannot be rebuilt
        except Exception:
            body = None
        return cls(body, text)

    def revive(self, rank: int) -> BaseException:
        error: BaseException = RuntimeError(f"Rank {rank} failed.") if self.error is None else pickle.loads(self.error)
        error.add_note(f"Raised on rank {rank}:\n{self.text}")
        return error


def _serve(place: _Place, pipe: Connection) -> None:
    """Main loop of a worker: answer jobs until the pipe closes."""
    try:
        place.join()
        while True:
            job, args = pipe.recv()
            pipe.send_bytes(_answer(job, args))
            gc.collect()  # drop the job's modules before the next one: they may hold hooks on the group
    except (EOFError, ConnectionError, KeyboardInterrupt):
        pass
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _answer(job: bytes, args: bytes) -> bytes:
    try:
        fn = pickle.loads(job).load()  # loads the module under its name, so that `args` may hold its classes
        arguments: Sequence[Any] = pickle.loads(args)
        return pickle.dumps(fn(*arguments))
    except Exception as error:
        return pickle.dumps(_Failure.of(error))
