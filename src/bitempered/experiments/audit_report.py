"""The page of `bitempered audit`: the worst labels, as rows or as pictures, and which classes are confused.

One file that loads nothing: styles and pictures are inside. Everything from the data is escaped.
"""

import base64
import io
from dataclasses import dataclass
from html import escape

import numpy as np
from PIL import Image

from bitempered.audit import Audit

__all__ = ["Audited", "Rows", "page"]

WORST = 100  # the most cases to show
CASES = 12  # the fewest, even if no label counts as wrong
FEATURES = 8  # the most columns of a table to show
CLASSES = 20  # the most for the whole confusion
PAIRS = 20  # the most confused pairs of more classes

STYLE = """
:root { color-scheme: light dark; --text: #1c1e21; --soft: #5c636b; --line: #d9dde2; --back: #fff; --card: #f6f7f9;
  --wrong: #b3261e; --right: #1b6e3c; --heat: 201 74 32; }
@media (prefers-color-scheme: dark) { :root { --text: #e6e8eb; --soft: #9aa3ad; --line: #353b43; --back: #14171a;
  --card: #1d2126; --wrong: #ff8a80; --right: #7ed6a0; --heat: 240 110 60; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back); margin: 0 auto;
  max-width: 70rem; padding: 1.5rem; }
h1 { font-size: 1.6rem; margin: 0 0 .5rem; overflow-wrap: anywhere; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
p { max-width: 48rem; margin: .5rem 0; } .soft { color: var(--soft); }
.figures { display: flex; flex-wrap: wrap; gap: 2rem; margin: 1rem 0; }
.figures b { font-size: 1.7rem; display: block; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .6rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line);
  max-width: 16rem; overflow: hidden; text-overflow: ellipsis; }
.words :is(th, td):nth-child(2), .words :is(th, td):nth-child(3) { text-align: left; }
th { font-weight: 600; color: var(--soft); } .confusion td { border: 1px solid var(--line); min-width: 2.2rem; }
.confusion td:not(.same) { background: rgb(var(--heat) / calc(var(--share) * .75)); } .same { color: var(--soft); }
.given { color: var(--wrong); font-weight: 600; } .suggested { color: var(--right); font-weight: 600; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(8.5rem, 1fr)); gap: .8rem; }
figure { margin: 0; padding: .6rem; background: var(--card); border: 1px solid var(--line); border-radius: .4rem; }
figure img { width: 100%; aspect-ratio: 1; object-fit: contain; image-rendering: pixelated; background: #000; }
a { color: inherit; }
figcaption { font-size: .85rem; line-height: 1.35; margin-top: .4rem; overflow-wrap: anywhere; }
"""


@dataclass(frozen=True)
class Rows:
    """What is audited: features (n, d), class numbers (n,), and how to show a row."""

    name: str
    features: np.ndarray
    labels: np.ndarray
    classes: list[str]
    columns: list[str]  # the names of a table's features
    images: np.ndarray | None = None  # (n, channels, height, width) uint8


@dataclass(frozen=True)
class Audited:
    """The rows of a data set, what was found about their labels, and how."""

    rows: Rows
    found: Audit  # its labels are the names of the classes
    method: str


def page(audited: Audited) -> str:
    """Return the whole page."""
    rows, found = audited.rows, audited.found
    wrong = found.wrong
    shown = found.order[: min(WORST, max(CASES, int(wrong.sum())))]
    cases = pictures(rows, found, shown, wrong) if rows.images is not None else lines(rows, found, shown, wrong)
    notes = "\n".join(f"<p>{escape(note)}</p>" for note in found.notes())
    name = escape(rows.name)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Labels of {name}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>Labels of {name}</h1>
<div class="figures">
<div><b>{len(wrong):,}</b> labels</div>
<div><b>{len(found.classes):,}</b> classes</div>
<div><b>{found.noise_rate:.1%}</b> seem to be wrong</div>
</div>
{notes}
<p class="soft">{escape(audited.method)} A score of 1 means surely wrong.
Check a few by eye before you believe the rest. Below: <a href="#confused">which classes are confused</a>.</p>
<h2>The worst {len(shown)}</h2>
<p class="soft">{legend(int(wrong.sum()), len(shown), rows.images is None)}</p>
{cases}
<h2 id="confused">Which classes are confused</h2>
{confusion(found)}
</body>
</html>
"""


def legend(wrong: int, shown: int, table: bool) -> str:
    numbered = "Rows are numbered from 1" + (", after the header." if table else ".")
    if wrong > shown:
        return f"{wrong:,} labels count as wrong; audit.csv lists them all. {numbered}"
    if wrong == shown:
        return f"All labels that count as wrong. {numbered}"
    if not wrong:
        return f"None of them counts as wrong. {numbered}"
    return f"{wrong} of them {'counts' if wrong == 1 else 'count'} as wrong, with the suggestion in colour. {numbered}"


def verdict(found: Audit, row: int, wrong: bool) -> tuple[str, str]:
    """Return the given and the suggested label as HTML; the latter is a dash if it is the given one."""
    given, suggested = (escape(shorten(str(labels[row]))) for labels in (found.labels, found.suggested))
    if found.suggested[row] == found.labels[row]:
        return given, "–"
    return (f'<span class="given">{given}</span>', f'<span class="suggested">{suggested}</span>') if wrong else (
        given, suggested
    )  # fmt: skip


def lines(rows: Rows, found: Audit, shown: np.ndarray, wrong: np.ndarray) -> str:
    """Return the worst rows of a table with their first features."""
    columns = rows.columns[:FEATURES]
    head = ["row", "label", "suggested", "score", *(escape(shorten(name)) for name in columns)]
    body = []
    for i in map(int, shown):
        values = (f"{value:.6g}" for value in rows.features[i, : len(columns)])
        cells = [str(i + 1), *verdict(found, i, wrong[i]), f"{found.scores[i]:.3f}", *values]
        body.append(f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    more = len(rows.columns) - len(columns)
    rest = f'<p class="soft">{more} more columns are not shown.</p>' if more else ""
    top = "".join(f"<th>{name}</th>" for name in head)
    return f'<div class="scroll"><table class="words"><tr>{top}</tr>\n' + "\n".join(body) + f"</table></div>{rest}"


def pictures(rows: Rows, found: Audit, shown: np.ndarray, wrong: np.ndarray) -> str:
    """Return the worst images as cards."""
    assert rows.images is not None
    cards = []
    for i in map(int, shown):
        given, suggested = verdict(found, i, wrong[i])
        cards.append(
            f'<figure><img alt="row {i + 1}" src="{data_uri(rows.images[i])}"><figcaption>label {given}<br>'
            f'suggested {suggested}<br><span class="soft">score {found.scores[i]:.3f}<br>row {i + 1}</span>'
            "</figcaption></figure>"
        )
    return '<div class="cards">\n' + "\n".join(cards) + "\n</div>"


def data_uri(image: np.ndarray) -> str:
    """Return an image (1 or 3, height, width) of bytes as an address that holds it."""
    content = io.BytesIO()
    Image.fromarray(image[0] if len(image) == 1 else image.transpose(1, 2, 0)).save(content, format="png")
    return f"data:image/png;base64,{base64.b64encode(content.getvalue()).decode()}"


def confusion(found: Audit) -> str:
    """Return the estimated confusion as a coloured table, or its largest pairs if there are many classes."""
    counts, names = found.confusion * len(found.labels), [escape(shorten(str(name), 20)) for name in found.classes]
    of_class = np.maximum(counts.sum(axis=1), 1e-9)
    if len(names) > CLASSES:
        wrong = counts.copy()
        np.fill_diagonal(wrong, 0)
        largest = np.argsort(-wrong, axis=None, kind="stable")[:PAIRS]
        pairs = [divmod(int(cell), len(names)) for cell in largest]
        body = "\n".join(
            f"<tr><td>{names[i]}</td><td>{names[j]}</td><td>{wrong[i, j]:.0f}</td>"
            f"<td>{wrong[i, j] / of_class[i]:.0%}</td></tr>"
            for i, j in pairs
            if wrong[i, j] >= 0.5
        )
        return (
            '<p class="soft">The most frequent pairs, as estimated.</p>\n<div class="scroll"><table><tr><th>class</th>'
            f"<th>labelled</th><th>rows</th><th>of the class</th></tr>\n{body}</table></div>"
        )
    body = ""
    for i, name in enumerate(names):
        cells = (
            f'<td class="same">{count:.0f}</td>' if i == j
            else f'<td style="--share: {count / of_class[i]:.3f}">{f"{count:.0f}" if count >= 0.5 else ""}</td>'
            for j, count in enumerate(counts[i])
        )  # fmt: skip
        body += f"<tr><th>{name}</th>{''.join(cells)}</tr>\n"
    head = "".join(f"<th>{name}</th>" for name in names)
    return (
        '<p class="soft">Each line is a class as estimated, each column a label as given; the numbers are rows. Off '
        "the diagonal labels are wrong; the colour shows the share of the class.</p>\n"
        f'<div class="scroll"><table class="confusion"><tr><th>class \\ label</th>{head}</tr>\n{body}</table></div>'
    )


def shorten(text: str, most: int = 40) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
