"""One run as one self-contained HTML page: no script, no file beside it, readable from a mail attachment."""

from __future__ import annotations

import base64
import os
from collections.abc import Callable, Iterator
from html import escape
from pathlib import Path

from paceline import __version__
from paceline.report import figures
from paceline.report.record import Evaluation, Incarnation, RunRecord, read_run


def write_report(run_folder: Path) -> Path:
    """Write `report.html` into the folder of a run and give its path. A run that was cut short gets one, too.

    Raises:
        NotFoundError: there is no such folder.
    """
    page = render(read_run(run_folder))
    path = run_folder / "report.html"
    unfinished = path.with_suffix(".html.new")
    unfinished.write_text(page, encoding="utf-8")
    os.replace(unfinished, path)
    return path


def render(record: RunRecord) -> str:
    """The page of a run."""
    title = escape(record.run_id)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title} · Paceline</title>
<style>{STYLE}</style>
</head>
<body>
<header>
<p class="kind">Paceline run {_state(record)}</p>
<h1>{title}</h1>
{_problem(record)}<dl class="tiles">
{"".join(_tiles(record))}</dl>
</header>
{"".join(_sections(record))}
<footer>Paceline {escape(__version__)} · made from the files in the folder of this run</footer>
</body>
</html>
"""


def duration_text(seconds: float) -> str:
    """A duration for people: "48 s", "3 min 08 s", "2 h 05 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def _state(record: RunRecord) -> str:
    kind, words = "unfinished", "not finished"
    if record.lag.ending == "failed":
        kind, words = "failed", "failed"
    elif record.finished:
        kind, words = "finished", "finished"
    elif record.lag.ending == "stopped":
        words = "stopped before its end"
    return f'<span class="state {kind}">{words}</span>'


def _problem(record: RunRecord) -> str:
    if record.lag.ending != "failed" or not record.lag.problem:
        return ""
    return f'<p class="problem">It failed: {escape(record.lag.problem)}</p>\n'


def _tiles(record: RunRecord) -> Iterator[str]:
    configured = "" if record.configured_ratio is None else f"asked for: {record.configured_ratio:g}"
    yield _tile("environment", record.environment)
    yield _tile("algorithm", record.algorithm)
    yield _tile("running time", duration_text(record.seconds) if record.incarnations or record.seconds else None)
    yield _tile("environment steps", _count(record.environment_steps))
    yield _tile("updates", _count(record.learner_step))
    yield _tile(
        "updates per step", None if record.achieved_ratio is None else f"{record.achieved_ratio:.3f}", configured
    )
    yield _tile("best evaluation", _mean(record.best), _where(record.best))
    yield _tile("last evaluation", _mean(record.last), _where(record.last))


def _tile(name: str, value: str | None, note: str = "") -> str:
    shown = '<span class="unknown">not known</span>' if value is None else escape(value)
    return f"<div><dt>{escape(name)}</dt><dd>{shown}<small>{escape(note)}</small></dd></div>\n"


def _count(value: int | None) -> str | None:
    return None if value is None else f"{value:,}"


def _mean(evaluation: Evaluation | None) -> str | None:
    return None if evaluation is None else f"{evaluation.mean_return:,.1f}"


def _where(evaluation: Evaluation | None) -> str:
    return "" if evaluation is None else f"at step {evaluation.environment_steps:,}, version {evaluation.version}"


def _sections(record: RunRecord) -> Iterator[str]:
    if record.missing:
        items = "".join(f"<li>{escape(sentence)}</li>" for sentence in record.missing)
        yield f'<section class="missing"><h2>What is missing</h2><ul>{items}</ul></section>\n'
    nothing = "Nothing to draw yet: neither a training episode nor an evaluation was recorded."
    have_returns = bool(record.episodes or record.evaluations)
    yield _figure(
        "Return against environment steps",
        "What the policy is worth, by how much it has seen. Dots are episodes with exploration; the line is the mean "
        "of evaluations on fixed seeds without it, within the band from their lowest to their highest episode.",
        figures.return_by_steps,
        record,
        None if have_returns else nothing,
    )
    yield _figure(
        "Return against seconds",
        "The same, by running time; the time between one learner's end and the next one's start is left out.",
        figures.return_by_seconds,
        record,
        None if have_returns else nothing,
    )
    yield _figure(
        "Training lag",
        "How many policy versions lay between the policy that collected a row and the learner that trained on it, "
        "each time it did. Replay looks back on purpose; a tail that grows with the run says that rows stay too long.",
        figures.training_lag,
        record,
        None if record.lag_rows else "Nothing to draw yet: no training lag was recorded.",
    )
    yield _figure(
        "Acting lag",
        "How many policy versions lay between the newest that a collector knew of and the one that acted, at each of "
        "its steps.",
        figures.acting_lag,
        record,
        None if record.lag.acting_steps else "Nothing to draw: no acting lag was written.",
    )
    yield _figure(
        "What the training lag is made of",
        "Versions that were published, and seconds that passed, while the snapshot was on its way to the collector "
        "(transfer), the row in a block that was not full (rollout), the block on its way into replay (queue), and the "
        "row in its table (residence). The largest part names what to change: see paceline lag.",
        figures.lag_parts,
        record,
        None if sum(record.lag.part_versions.values()) > 0 else "Nothing to draw: no parts of the lag were written.",
    )
    yield _figure(
        "Where each process spent its time",
        "Grey is waiting: for a peer, for rows, for the limiter. The process with the least grey is what holds the run "
        "back.",
        figures.process_time,
        record,
        None if record.process_seconds else "Nothing to draw: no process times were written.",
    )
    yield _evaluations(record)
    yield _incarnations(record.incarnations)
    if record.config_text is not None:
        yield (
            "<section><details><summary>Settings of the run, every default written out</summary>"
            f"<pre>{escape(record.config_text)}</pre></details></section>\n"
        )


def _figure(title: str, caption: str, draw: Callable[[RunRecord], bytes], record: RunRecord, absent: str | None) -> str:
    return figure_section(title, caption, None if absent is not None else draw(record), absent or "")


def figure_section(title: str, caption: str, image: bytes | None, absent: str = "") -> str:
    """A section with an SVG image, or with the sentence `absent` where there is none."""
    if image is None:
        body = f'<p class="absent">{escape(absent)}</p>'
    else:
        # An image of its own, so that the ids within one figure never meet those of another.
        data = base64.b64encode(image).decode("ascii")
        body = (
            f'<figure><img alt="{escape(title)}" src="data:image/svg+xml;base64,{data}">'
            f"<figcaption>{escape(caption)}</figcaption></figure>"
        )
    return f"<section><h2>{escape(title)}</h2>{body}</section>\n"


def _evaluations(record: RunRecord) -> str:
    if not record.evaluations:
        return '<section><h2>Evaluations</h2><p class="absent">None yet.</p></section>\n'
    rows = "".join(
        table_row(
            f"{evaluation.incarnation}.{evaluation.version}",
            f"{evaluation.environment_steps:,}",
            f"{evaluation.learner_step:,}",
            f"{evaluation.seconds:,.0f}",
            f"{evaluation.mean_return:,.1f}",
            f"{min(evaluation.returns):,.1f}" if evaluation.returns else "",
            f"{max(evaluation.returns):,.1f}" if evaluation.returns else "",
            "" if evaluation.mean_length is None else f"{evaluation.mean_length:,.0f}",
            best=evaluation is record.best,
        )
        for evaluation in record.evaluations
    )
    return (
        '<section><h2>Evaluations</h2><div class="scroll"><table><thead><tr>'
        "<th>policy<small>incarnation.version</small></th><th>environment steps</th><th>updates</th>"
        "<th>running time<small>s</small></th><th>mean return</th><th>lowest</th><th>highest</th>"
        f"<th>mean length<small>steps</small></th></tr></thead><tbody>{rows}</tbody></table></div></section>\n"
    )


def _incarnations(incarnations: tuple[Incarnation, ...]) -> str:
    if len(incarnations) < 2:
        return ""
    rows = "".join(
        table_row(
            str(incarnation.number),
            "resumed" if incarnation.resumed else "began" if incarnation is incarnations[0] else "began anew",
            f"{incarnation.environment_steps:,}",
            f"{incarnation.learner_step:,}",
            f"{incarnation.seconds:,.0f}",
        )
        for incarnation in incarnations
    )
    return (
        '<section><h2>Starts of the learner</h2><div class="scroll"><table><thead><tr><th>incarnation</th>'
        "<th>how</th><th>environment steps</th><th>updates</th><th>running time<small>s</small></th></tr></thead>"
        f"<tbody>{rows}</tbody></table></div></section>\n"
    )


def table_row(*cells: str, best: bool = False) -> str:
    """A row of a table; `best` marks it."""
    mark = ' class="best"' if best else ""
    return f"<tr{mark}>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"


STYLE = """
:root { color-scheme: light; --ink: #1f2a37; --faint: #6b7787; --line: #e4e8ee; --accent: #0b6e99; }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.25rem 3rem; max-width: 60rem; background: #f6f8fa; color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "DejaVu Sans", sans-serif; }
header, section { background: #fff; border: 1px solid var(--line); border-radius: 10px; padding: 1.25rem 1.5rem;
  margin-bottom: 1.1rem; }
.kind { margin: 0; color: var(--faint); font-size: .85rem; }
.state { border-radius: 1rem; padding: .1rem .6rem; margin-left: .4rem; font-weight: 600; font-size: .78rem; }
.finished { background: #e3f4ea; color: #1c6b3f; } .unfinished { background: #fdf0dc; color: #8a5a12; }
.failed { background: #fbe4e6; color: #8f2430; } .problem { margin: 0 0 1rem; overflow-wrap: anywhere; }
h1 { margin: .1rem 0 1rem; font-size: 1.7rem; line-height: 1.25; overflow-wrap: anywhere; }
h2 { margin: 0 0 .75rem; font-size: 1.1rem; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(11.5rem, 1fr)); gap: .9rem 1.25rem; margin: 0; }
.tiles dt { color: var(--faint); font-size: .8rem; } .tiles dd { margin: 0; font-size: 1.2rem; font-weight: 600;
  font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
small { display: block; color: var(--faint); font-size: .76rem; font-weight: 400; }
.unknown, .absent { color: var(--faint); font-weight: 400; } .unknown { font-size: 1rem; } .absent { margin: 0; }
.missing { background: #fffaf1; border-color: #f0dfc0; } .missing ul { margin: 0; padding-left: 1.2rem; }
figure { margin: 0; } img { display: block; width: 100%; height: auto; }
figcaption { color: var(--faint); font-size: .86rem; margin-top: .5rem; }
.scroll { overflow: auto; max-height: 30rem; }
table { border-collapse: collapse; width: 100%; font-size: .88rem; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .35rem .6rem; border-bottom: 1px solid var(--line); }
td { white-space: nowrap; }
th { position: sticky; top: 0; background: #fff; color: var(--faint); font-weight: 600; vertical-align: bottom; }
.best td { background: #e9f4f9; font-weight: 600; }
summary { cursor: pointer; font-weight: 600; }
pre { margin: 1rem 0 0; padding: 1rem; background: #f6f8fa; border-radius: 6px; overflow: auto; font-size: .82rem; }
footer { color: var(--faint); font-size: .8rem; text-align: center; }
@media print { body { background: #fff; } section { break-inside: avoid; } .scroll { max-height: none; } }
"""
