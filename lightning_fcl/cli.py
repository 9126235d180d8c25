"""The command line: ``lightning-fcl fit|doctor|report|compare|analyse``. Help loads no torch."""

import sys
from argparse import ArgumentParser as PlainParser
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

from jsonargparse import ArgumentParser, Namespace
from typing_extensions import override

from lightning_fcl.exceptions import FCLError

if TYPE_CHECKING:
    from lightning_fcl.federated.trainer import FederatedTrainer

FAILED: Final = 1
USAGE: Final = 2
INTERRUPTED: Final = 130  # what shells report for Ctrl-C


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: Words after the program's name; by default those of this process.

    Returns:
        0 if all went well, 1 if the library refused, a report cannot be written (one line on standard error), or the
        doctor found something wrong, 130 if interrupted. Other errors, such as those of the user's own module, are
        raised as they are.

    Raises:
        SystemExit: After help (0), or with code 2 and one line on standard error if the arguments are wrong.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    parser = _Commands(
        prog="lightning-fcl",
        description="Federated continual learning with Lightning.",
        epilog="Options of a command: lightning-fcl COMMAND --help",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (_, summary) in _COMMANDS.items():
        commands.add_parser(name, help=summary, add_help=False)
    run, summary = _COMMANDS[parser.parse_args(words[:1]).command]
    command = _Parser(prog=f"lightning-fcl {words[0]}", description=summary)
    command.add_argument("--config", action="config", help="YAML file with these options; may be given several times.")
    try:
        code = run(command, words[1:])
    except (FCLError, OSError) as error:
        if run is _fit and not isinstance(error, FCLError):  # perhaps of the user's own code
            raise
        print(f"{command.prog}: {_one_line(error)}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print(f"{command.prog}: interrupted", file=sys.stderr)
        return INTERRUPTED
    return code or 0


class _Commands(PlainParser):
    """Says in one line what is wrong."""

    @override
    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"{self.prog}: {_one_line(message)} See {self.prog} --help\n")


class _Parser(ArgumentParser):
    """Says in one line what is wrong, instead of printing the usage of a hundred options."""

    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:  # jsonargparse's own parsers of sub-configurations
            super().error(message, ex)
        self.exit(USAGE, f"{self.prog}: {_one_line(message)} See {self.prog} --help\n")


def _one_line(message: object) -> str:
    text = " ".join(str(message).split())
    return text if text.endswith((".", "?", "!")) else f"{text}."


def _fit(parser: _Parser, words: list[str]) -> None:
    import lightning as L

    from lightning_fcl._run_config import add_run_arguments, instantiate

    add_run_arguments(parser)
    config = parser.parse_args(words)
    L.seed_everything(config.trainer.seed, verbose=False)  # for the module's initialisation
    made = instantiate(parser, config)
    _keep_config(parser, config, made.trainer)
    report = made.trainer.fit(made.model, made.stream, ckpt_path=config.ckpt_path)
    if made.trainer.is_global_zero:
        print(report, f"report: {report.run_dir / 'report.html'}", sep="\n")


def _keep_config(parser: _Parser, config: Namespace, trainer: "FederatedTrainer") -> None:
    """Write ``fit.yaml``, which repeats the run, unless the folder already holds a run."""
    from lightning_fcl.reports.files import explain_write_errors, write_text

    if not trainer.is_global_zero or any((trainer.run_dir / "checkpoints").glob("*")):
        return
    config = config.clone()
    del config["config"], config["ckpt_path"]
    with explain_write_errors(trainer.run_dir):
        trainer.run_dir.mkdir(parents=True, exist_ok=True)
    write_text(trainer.run_dir / "fit.yaml", parser.dump(config, skip_unset=False, skip_validation=True))


def _report(parser: _Parser, words: list[str]) -> None:
    parser.add_argument("run_dir", type=str, help="A run folder.")
    config = parser.parse_args(words)

    from lightning_fcl.reports.run_report import RunReport

    try:
        report = RunReport.load(config.run_dir)
    except (FileNotFoundError, ValueError) as error:
        parser.error(str(error))
    report.save()
    print(report, f"report: {report.run_dir / 'report.html'}", sep="\n")


def _compare(parser: _Parser, words: list[str]) -> None:
    parser.add_argument("run_dirs", type=str, nargs="*", help="Run folders, or folders that hold some.")
    parser.add_argument("--out", type=str | None, help="Folder for comparison.md and comparison.html, and for a suite.")
    parser.add_argument("--suite", type=str | None, help="Run this first: fedadb, special or fedcmm.")
    parser.add_argument("--methods", type=list[str] | None, help="Methods of the suite, e.g. '[FedAvg, FedACG]'.")
    parser.add_argument("--clients", type=int | None, help="Clients in the suite; by default the paper's number.")
    parser.add_argument("--rounds", type=int | None, help="Rounds per task; by default `scale` times the paper's.")
    parser.add_argument("--seeds", type=int, default=3, help="Seeds, counted from 0.")
    parser.add_argument("--scale", type=float, default=0.2, help="Share of the paper's rounds.")
    parser.add_argument("--data-dir", type=str | None, help="Folder of real data; by default scikit-learn's digits.")
    parser.add_argument("--devices", type=int, default=1, help="Processes that share the clients of a round.")
    config = parser.parse_args(words)
    if config.suite is not None:
        _run_suite(parser, config)
        return
    if not config.run_dirs:
        parser.error("the following arguments are required: run_dirs, or --suite and --out.")

    from lightning_fcl.reports.comparison import compare

    try:
        comparison = compare(config.run_dirs)
    except (FileNotFoundError, ValueError) as error:
        parser.error(str(error))
    print(comparison)
    if config.out is not None:
        print(f"comparison: {comparison.save(Path(config.out))}")


def _run_suite(parser: _Parser, config: Namespace) -> None:
    if config.out is None or config.run_dirs:
        parser.error("`--suite` must come with --out, its folder, and without other run folders.")

    from lightning.fabric.utilities import rank_zero_only

    from lightning_fcl.suites import SUITES, Sizes, run_suite

    if config.suite not in SUITES:
        parser.error(f"`--suite` must be one of {', '.join(SUITES)}, got {config.suite!r}.")
    suite, folder = SUITES[config.suite], Path(config.out)
    sizes = Sizes(clients=config.clients, rounds=config.rounds, scale=config.scale)
    data_dir = None if config.data_dir is None else Path(config.data_dir)
    options = {"methods": config.methods, "seeds": config.seeds, "data_dir": data_dir, "devices": config.devices}
    comparison = run_suite(suite, folder, sizes=sizes, **options)
    rank_zero_only(print)(suite.about, comparison, f"comparison: {folder / 'comparison.html'}", sep="\n")


def _analyse(parser: _Parser, words: list[str]) -> None:
    from lightning_fcl import _analyse as command

    command.run(parser, words)


def _doctor(parser: _Parser, words: list[str]) -> int:
    from lightning_fcl import _doctor as command

    return command.run(parser, words)


_COMMANDS: Final[dict[str, tuple[Callable[[_Parser, list[str]], int | None], str]]] = {
    "fit": (_fit, "Train a module over a stream of tasks."),
    "doctor": (_doctor, "Examine a configuration of fit by a dry run: gradients, bytes, memory, time."),
    "report": (_report, "Draw the figures and the page of a run anew, and print its table."),
    "compare": (_compare, "Compare methods over runs or run a suite of them: mean and deviation over seeds."),
    "analyse": (_analyse, "Rounds to targets, sharpness, features and anchors of finished runs."),
}
