"""``lightning-fcl doctor``: examines a configuration of ``fit``, or a large model's ``config.json``, before it runs."""

import inspect
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

    from lightning_fcl.doctor import Diagnosis


def run(parser: "ArgumentParser", words: list[str]) -> int:
    """The command: adds its options to ``parser``, parses ``words`` and prints the diagnosis.

    Args:
        parser: Has ``--config`` already.
        words: Arguments after the command's name.

    Returns:
        0 if nothing is wrong, else 1.
    """
    from lightning.fabric.utilities import rank_zero_only

    from lightning_fcl.doctor import diagnose

    speeds = list(inspect.signature(diagnose).parameters["link_mbit"].default)
    parser.add_argument("--link_mbit", type=float, nargs="+", default=speeds, help="Speeds of links, Mbit/s.")
    parser.add_argument(
        "--estimate", type=str | None, help="Folder or hub id of an image-and-text model: its config.json is enough."
    )
    only_config = any(word.partition("=")[0] == "--estimate" for word in words)
    diagnosis = _from_config(parser, words) if only_config else _dry_run(parser, words)
    rank_zero_only(print)(diagnosis)
    return 0 if diagnosis.ok else 1


def _from_config(parser: "ArgumentParser", words: list[str]) -> "Diagnosis":
    from lightning_fcl.doctor import estimate

    parser.add_function_arguments(estimate, skip={"path", "link_mbit"})
    given = parser.instantiate(parser.parse_args(words)).as_dict()
    options: dict[str, Any] = {name: value for name, value in given.items() if name not in ("config", "estimate")}
    return estimate(given["estimate"], **options)


def _dry_run(parser: "ArgumentParser", words: list[str]) -> "Diagnosis":
    import lightning as L

    from lightning_fcl._run_config import add_run_arguments, instantiate
    from lightning_fcl.doctor import Diagnosis, diagnose

    add_run_arguments(parser)
    config = parser.parse_args(words)
    L.seed_everything(config.trainer.seed, verbose=False)  # as `fit` does
    try:
        made = instantiate(parser, config)
    except Exception as error:
        failed = Diagnosis(error=error)
        failed.add("error", "making the objects of the configuration", f"{type(error).__name__}: {error}")
        return failed
    return diagnose(made.trainer, made.model, made.stream, link_mbit=config.link_mbit)
