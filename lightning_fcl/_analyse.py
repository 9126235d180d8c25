"""``lightning-fcl analyse``: figures of finished runs, from their tables, final weights and last anchors."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_fcl.exceptions import MisconfigurationError

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

    from lightning_fcl.functional.class_anchors import AnchorSet
    from lightning_fcl.reports.run_report import RunReport

_ROUNDS = "rounds"


def run(parser: "ArgumentParser", words: list[str]) -> None:
    """The command: adds its options to ``parser``, parses ``words`` and does the work."""
    from lightning_fcl.reports.analysis import PARTS

    parser.add_argument("run_dirs", type=str, nargs="+", help="Run folders; others are compared to the last method.")
    parser.add_argument("--parts", type=list[str], default=[_ROUNDS, *PARTS], help=f"Of {_ROUNDS}, {', '.join(PARTS)}.")
    parser.add_argument("--targets", type=list[float], default=[], help="Scores; default: 45, 65, 85 % of the best.")
    parser.add_argument("--smoothing", type=float, default=0.2, help="Weight of the newest score in the average.")
    parser.add_argument("--examples", type=int, default=1000, help="Training examples for eigenvalues and features.")
    parser.add_argument("--plane", type=str, default="pca", choices=["pca", "tsne"], help="How features become points.")
    parser.add_argument("--parts_from", type=str | None, help="YAML with model and stream; default: the run folder's.")
    config = parser.parse_args(words)

    from lightning_fcl.reports.rounds import curve_figures, save_figures, speed_up
    from lightning_fcl.reports.run_report import RunReport

    try:
        reports = [RunReport.load(path) for path in config.run_dirs]
    except (FileNotFoundError, ValueError) as error:
        parser.error(str(error))
    if unknown := set(config.parts) - {_ROUNDS, *PARTS}:
        parser.error(f"`parts` must be some of {_ROUNDS}, {', '.join(PARTS)}, got {sorted(unknown)}.")
    if _ROUNDS in config.parts:
        print(speed_up(reports, config.targets, config.smoothing))
        for report in reports:
            save_figures(report, curve_figures(report, config.targets, config.smoothing))
    inside = [part for part in config.parts if part != _ROUNDS]
    for report in reports:
        numbers = _look_inside(report, inside, config) if inside else {}
        report.save()
        for part, found in numbers.items():
            shown = {k: v for k, v in found.items() if not isinstance(v, list) or k == "eigenvalues"}
            print(f"{report.method}, seed {report.seed}, {part}: {json.dumps(shown)}")
        print(f"report: {report.run_dir / 'report.html'}")


def _look_inside(report: "RunReport", parts: list[str], config: Any) -> dict[str, Any]:
    from lightning_fcl.federated.checkpoint import CheckpointFolder
    from lightning_fcl.reports.analysis import analyse
    from lightning_fcl.reports.files import write_bytes, write_text

    module, stream = _parts(Path(config.parts_from) if config.parts_from else None, report.run_dir)
    commit = CheckpointFolder(report.run_dir / "checkpoints").newest()
    _, unexpected = module.load_state_dict(dict(commit.model), strict=False)
    if unexpected:
        raise MisconfigurationError(f"`model` must be the run's, but it has no {unexpected[:3]}. Fix analyse.yaml.")
    found = analyse(
        report, module, stream, _anchors(commit.server), parts=parts, examples=config.examples, method=config.plane
    )
    folder = report.run_dir / "analysis"
    folder.mkdir(exist_ok=True)
    for name, png in found.pictures.items():
        write_bytes(folder / name, png)
    write_text(folder / "analysis.json", json.dumps(found.numbers, indent=1) + "\n")
    return found.numbers


def _anchors(server: Any) -> "AnchorSet | None":
    """The last anchors that the run's commit holds, whoever made them."""
    from lightning_fcl.functional.class_anchors import AnchorSet

    states = [state for state in server["callbacks"].values() if set(state) == set(AnchorSet._fields)]
    return AnchorSet(**states[-1]) if states else None


def _parts(given: Path | None, run_dir: Path) -> tuple[Any, Any]:
    """Model and stream, from the first file that names them."""
    import lightning as L
    import yaml
    from jsonargparse import ArgumentParser

    from lightning_fcl.data.stream import TaskStream

    files = [given] if given else [run_dir / "analyse.yaml", run_dir / "fit.yaml"]
    file = next((path for path in files if path.is_file()), None)
    if file is None:
        raise MisconfigurationError(
            f"`parts_from` must name a YAML file with `model` and `stream`, since {str(run_dir)!r} holds neither "
            "analyse.yaml nor fit.yaml. See the page on FedADB's recipe."
        )
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--model", type=L.LightningModule, required=True)
    parser.add_argument("--stream", type=TaskStream, required=True)
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    made = parser.instantiate(parser.parse_object({name: content.get(name) for name in ("model", "stream")}))
    return made.model, made.stream
