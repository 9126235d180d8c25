"""One page that tells a whole run: opens offline, needs no script, asks no server."""

import base64
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Final

from lightning_fcl.reports.files import read_table
from lightning_fcl.reports.tables import data_size, duration, html_table, number

if TYPE_CHECKING:
    from lightning_fcl.reports.run_report import RunReport

HEADLINES: Final = {
    "acc": ("ACC", "mean score at the end"),
    "bwt": ("BWT", "change of earlier tasks since they were learned"),
    "fwt": ("FWT", "score of tasks before they were learned"),
    "avg": ("Avg", "mean score of the tasks seen, over all stages"),
    "forgetting": ("Forgetting", "drop from each task's best score"),
    "worst_drop": ("Worst drop", "largest loss of one earlier task"),
}
ANALYSIS: Final = {
    "hessian": "Largest eigenvalues of the Hessian",
    "features": "Features of training examples and anchors in the plane",
    "prototypes": "Cosine of anchors and class means",
    "psnr": "Anchors, the training images closest to them, and class means",
}
SIGNED: Final = ("bwt", "worst_drop")

STYLE: Final = """
:root{--ground:#fff;--text:#1c2430;--soft:#5c6878;--line:#dde3ea;--card:#f6f8fa;--accent:#14829f}
@media (prefers-color-scheme:dark){
:root{--ground:#12161c;--text:#e4e9f0;--soft:#97a3b4;--line:#2b333f;--card:#1a2029;--accent:#5cc3dd}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:60rem;padding:1.5rem 1rem 4rem;background:var(--ground);color:var(--text);
font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;overflow-wrap:anywhere}
h1{font-size:1.6rem;margin:0}h2{font-size:1.1rem;margin:2.5rem 0 .75rem}
p{margin:.25rem 0;color:var(--soft)}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(9rem,1fr));gap:.75rem;margin-top:1.25rem}
.card{background:var(--card);border:1px solid var(--line);border-radius:.5rem;padding:.75rem .9rem}
.card b{display:block;font-size:1.5rem;line-height:1.3;font-variant-numeric:tabular-nums}
.card span{color:var(--accent);font-size:.85rem;font-weight:600}
.card small{display:block;color:var(--soft);font-size:.78rem;line-height:1.35}
.card.fact b{font-size:1.05rem}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:.92rem}
th,td{padding:.35rem .7rem;border-bottom:1px solid var(--line);text-align:right;white-space:nowrap}
th:first-child{text-align:left}thead th{color:var(--soft);font-weight:600}
table.text td,table.text th{text-align:left}table.text td{white-space:normal;min-width:6rem}
img{max-width:100%;background:#fff;border-radius:.5rem;border:1px solid var(--line)}
pre{background:var(--card);border:1px solid var(--line);border-radius:.5rem;padding:.8rem;overflow-x:auto;
font-size:.82rem;line-height:1.45}
summary{cursor:pointer;color:var(--accent)}
"""


def page(report: "RunReport", figures: Mapping[str, bytes]) -> str:
    """The whole ``report.html`` of a run.

    Args:
        report: The run; failures and times are read from its folder.
        figures: PNG files by name; the section of one that is not there is left out.

    Returns:
        A page with its style and pictures inside. Every text of the run is escaped.
    """
    failures = read_table(report.run_dir / "failures.csv")[1]
    times = read_table(report.run_dir / "timing.csv")[1]
    title = f"{report.method}, seed {report.seed}"
    sections = {
        "": _headlines(report) + _facts(report, len(times), len(failures)),
        "Score after each stage": matrix_table(report),
        "Scores over the rounds": _picture(figures.get("curves.png"), "Score of each task over the global rounds"),
        "Which subspaces answer which task": _picture(figures.get("subspaces.png"), "Activation of each subspace"),
        "Accuracy of each class": _picture(figures.get("classes.png"), "Accuracy of each class over the rounds"),
        "Analysis": "".join(_picture(figures.get(f"{name}.png"), alt) for name, alt in ANALYSIS.items()),
        "Failures": _failures(failures),
        "Time": _times(times),
        "Configuration": _pre("Show all settings", report.to_dict()["config"]),
        "Versions": _pre("Show versions", dict(report.versions)),
    }
    body = "\n".join(
        f"<section>{f'<h2>{name}</h2>' if name else ''}{content}</section>"
        for name, content in sections.items()
        if content
    )
    return document(title, f"<h1>{escape(title)}</h1>\n<p>{escape(str(report.run_dir))}</p>\n{body}")


def fragment(report: "RunReport") -> str:
    """Title, matrix and summary as HTML without a page around them, for notebooks."""
    summary = "  ".join(f"{label} {_headline(report, key)}" for key, (label, _) in HEADLINES.items())
    return f"<b>{escape(report.method)}, seed {report.seed}</b>{matrix_table(report)}<p>{escape(summary)}</p>"


def document(title: str, body: str) -> str:
    """A page around ``body``, which must be escaped already; ``title`` is not."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width,initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def matrix_table(report: "RunReport") -> str:
    """The score matrix as a table: the stronger the colour, the higher the score."""
    scale, stages = report.scale, report.accuracy.tolist()
    measured = report.accuracy[report.accuracy.isfinite()]
    low, high = (0.0, 1.0) if scale > 1 or not measured.numel() else (float(measured.min()), float(measured.max()))
    shades = [[(score - low) / ((high - low) or 1.0) for score in scores] for scores in stages]
    rows = [[f"after {stage}", *(number(score, scale) for score in scores)] for stage, scores in enumerate(stages)]
    unit = f"{report.score}, in %" if scale > 1 else report.score
    return f"<p>{escape(unit)}</p>" + html_table(["", *report.names], rows, shades)


def _headline(report: "RunReport", key: str) -> str:
    return number(report.summary[key], report.scale, sign=key in SIGNED)


def _headlines(report: "RunReport") -> str:
    cards = (
        f'<div class="card"><span>{label}</span><b>{_headline(report, key)}</b><small>{meaning}</small></div>'
        for key, (label, meaning) in HEADLINES.items()
    )
    return f'<div class="cards">{"".join(cards)}</div>'


def _facts(report: "RunReport", rounds: int, failures: int) -> str:
    facts = {
        "rounds": str(rounds),
        "wall time": duration(report.wall_seconds),
        "sent by clients": data_size(report.bytes_up),
        "sent to clients": data_size(report.bytes_down),
        "peak memory": data_size(report.peak_memory_bytes),
        "failures": str(failures),
    }
    cards = (f'<div class="card fact"><b>{value}</b><small>{name}</small></div>' for name, value in facts.items())
    return f'<div class="cards">{"".join(cards)}</div>'


def _picture(png: bytes | None, alt: str) -> str:
    if png is None:
        return ""
    return f'<img alt="{escape(alt)}" src="data:image/png;base64,{base64.b64encode(png).decode()}">'


def _failures(rows: Sequence[Mapping[str, str]]) -> str:
    if not rows:
        return "<p>None.</p>"
    groups: dict[str, list[Mapping[str, str]]] = defaultdict(list)
    for row in rows:
        groups[row.get("reason", "")].append(row)
    lines = [
        [
            f"{len(group)}x {reason}",
            ", ".join(sorted({row.get("client", "-") for row in group}, key=lambda client: (len(client), client))),
            f"{group[0].get('global_round', '-')} to {group[-1].get('global_round', '-')}",
            group[0].get("detail", ""),
        ]
        for reason, group in sorted(groups.items(), key=lambda item: -len(item[1]))
    ]
    table = html_table(["reason", "clients", "rounds", "first detail"], lines)
    return table.replace("<table>", '<table class="text">', 1)


def _times(rows: Sequence[Mapping[str, str]]) -> str:
    if not rows:
        return "<p>Not measured.</p>"
    parts = ("train", "aggregate", "evaluate", "commit", "server")
    totals = {part: sum(float(row.get(part, 0)) for row in rows) for part in ("seconds", *parts)}
    totals["other"] = totals["seconds"] - sum(totals[part] for part in parts)
    whole = totals["seconds"] or math.nan
    lines = [
        [
            "all" if part == "seconds" else part,
            duration(total),
            duration(total / len(rows)),
            f"{number(total / whole, 100)} %",
        ]
        for part, total in totals.items()
    ]
    return html_table(["part", "total", "per round", "share"], lines)


def _pre(summary: str, content: Mapping[str, object]) -> str:
    if not content:
        return ""
    text = json.dumps(content, indent=2, ensure_ascii=False)
    return f"<details><summary>{summary}</summary><pre>{escape(text)}</pre></details>"
