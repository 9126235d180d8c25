"""Trainer, module and stream from a configuration, for the commands that need all three."""

import os
import sys
from collections.abc import Callable
from typing import Any

from jsonargparse import ArgumentParser, Namespace, set_parsing_settings


def add_run_arguments(parser: ArgumentParser) -> None:
    """Add ``--trainer.*``, ``--model``, ``--stream`` and ``--ckpt_path``.

    Args:
        parser: Gains them.
    """
    import lightning as L

    from lightning_fcl.data.stream import TaskStream
    from lightning_fcl.federated.trainer import FederatedTrainer

    set_parsing_settings(instantiate_subclass_spec_in_any=True)  # data sets, loggers and strategies may be of any type
    sys.path.insert(0, os.getcwd())  # so that class_path finds the user's modules, as `python script.py` would
    parser.add_class_arguments(FederatedTrainer, "trainer")
    parser.add_argument("--model", type=L.LightningModule, required=True, help="The module to train.")
    parser.add_argument(
        "--stream",
        type=TaskStream,
        required=True,
        help="Tasks and clients. `class_path` is TaskStream, one of its class methods, or any function that returns "
        "one, e.g. lightning_fcl.data.digit_stream.",
    )
    parser.add_argument(
        "--ckpt_path", type=str | None, help="`last` or `auto` resumes run_dir; or the path of a committed round."
    )


def instantiate(parser: ArgumentParser, config: Namespace) -> Namespace:
    """The objects of a configuration; what a constructor raises comes out as it is.

    Args:
        parser: It has parsed ``config``.
        config: All options.
    """
    failures: list[Exception] = []

    def make(kind: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return kind(*args, **kwargs)
        except Exception as error:
            failures.append(error)
            raise

    try:
        made: Namespace = parser.instantiate(config, instantiators=[(make, object, True)])
    except ValueError:
        # where several types are allowed, jsonargparse tells of all that it tried and hides what went wrong
        if failures:
            raise failures[-1] from None
        raise
    return made
