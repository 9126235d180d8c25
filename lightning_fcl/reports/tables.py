"""Numbers as people read them, and tables as text, Markdown and HTML."""

import math
from collections.abc import Sequence
from html import escape

from torch import Tensor


def score_scale(scores: Tensor) -> float:
    """100 if all measured scores are fractions in ``[-1, 1]``, so that they print as percent; else 1."""
    measured = scores[scores.isfinite()]
    return 100.0 if measured.numel() == 0 or measured.abs().max() <= 1 else 1.0


def number(value: float, scale: float = 1.0, *, sign: bool = False) -> str:
    """``value * scale`` with one digit for percent and three else; a dash for NaN.

    Example:
        >>> number(0.6475, 100), number(-0.0312, 100, sign=True), number(float("nan"))
        ('64.8', '-3.1', '-')
    """
    if not math.isfinite(value):
        return "-"
    return f"{value * scale:{'+' if sign else ''}.{1 if scale > 1 else 3}f}"


def duration(seconds: float) -> str:
    """Wall time with two units at most.

    Example:
        >>> duration(0.042), duration(2.5), duration(75), duration(7500)
        ('42 ms', '2.50 s', '1 min 15 s', '2 h 5 min')
    """
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def data_size(count: int | None) -> str:
    """Bytes in decimal units; a dash for what was not measured.

    Example:
        >>> data_size(999), data_size(12_345_678), data_size(None)
        ('999 B', '12.3 MB', '-')
    """
    if count is None:
        return "-"
    size, units = float(count), ["B", "kB", "MB", "GB", "TB", "PB"]
    while size >= 1000 and len(units) > 1:
        size /= 1000
        units.pop(0)
    return f"{size:.{0 if units[0] == 'B' else 1}f} {units[0]}"


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns padded with spaces: the first to the left, the others to the right.

    Example:
        >>> print(text_table(["", "a"], [["after 0", "97.1"]]))
                    a
        after 0  97.1
    """
    table = [header, *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(header))]
    lines = (
        "  ".join(cell.rjust(width) if column else cell.ljust(width) for column, (cell, width) in enumerate(cells))
        for cells in (zip(row, widths, strict=True) for row in table)
    )
    return "\n".join(line.rstrip() for line in lines)


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    r"""A GitHub table; bars and line breaks in cells cannot break it.

    Example:
        >>> print(markdown_table(["method", "acc"], [["a|b", "64.8"]]))
        | method | acc |
        |:---|---:|
        | a\|b | 64.8 |
    """
    lines = ["| " + " | ".join(_markdown_cell(cell) for cell in row) + " |" for row in [header, *rows]]
    lines.insert(1, "|:---|" + "---:|" * (len(header) - 1))
    return "\n".join(lines)


def _markdown_cell(cell: str) -> str:
    return " ".join(escape(cell, quote=False).replace("|", "\\|").split())


def html_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], shades: Sequence[Sequence[float]] | None = None
) -> str:
    """A table whose text is escaped.

    Args:
        header: Column titles.
        rows: Cells; the first of a row is its title.
        shades: Colour strength in ``[0, 1]`` of every cell but the first of each row; NaN for none.
    """
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in header)
    body = []
    for index, (title, *cells) in enumerate(rows):
        row_shades = shades[index] if shades else [math.nan] * len(cells)
        row = "".join(f"<td{_shade(s)}>{escape(cell)}</td>" for cell, s in zip(cells, row_shades, strict=True))
        body.append(f'<tr><th scope="row">{escape(title)}</th>{row}</tr>')
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>\n<tbody>{chr(10).join(body)}</tbody></table></div>'
    )


def _shade(strength: float) -> str:
    # a translucent colour reads well on light and dark ground alike
    return f' style="background:rgba(20,130,160,{0.05 + 0.5 * strength:.2f})"' if math.isfinite(strength) else ""
