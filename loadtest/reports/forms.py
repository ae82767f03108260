"""A recommendation in every form: what `recommend` writes at its end, and `report` later.

text    for the terminal              html    the page, one file
md      for a pull request            junit   for CI: one test case per candidate, and the SLO
csv     one line per candidate        json    the document itself
"""

import csv
import io
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Final
from xml.etree import ElementTree

from gateway.documents.whole_file import write_whole
from loadtest.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from loadtest.reports.recommendation import CandidateReport, Recommendation
    from loadtest.reports.tables import Column

FORMATS: Final = ("text", "html", "md", "csv", "junit", "json")
METRICS: Final = ("CostPerInference", "MaxInvocations", "ModelLatency", "CpuUtilization", "MemoryUtilization")
_NARROW: Final = ("", "candidate", "SLO kept at/s", "USD/million")  # headings in a terminal of fewer than 90 columns
_WIDE: Final = ("USD/h", "missed at/s", "p99 ms", "agreement")  # and in a wider one
_STYLES: Final = {"good": "green", "open": "yellow", "bad": "red"}
_CASES: Final = "loadtest.candidates"  # CI knows cases again by it: no module's path
FILES: Final = {
    "json": "report.json",
    "html": "report.html",
    "md": "report.md",
    "csv": "report.csv",
    "junit": "junit.xml",
    "yaml": "gateway.yaml",
}


def render(found: "Recommendation", form: str) -> str:
    """The document in one of FORMATS."""
    if form == "html":
        from loadtest.reports.html import render as page

        return page(found)
    if form == "json":
        from loadtest.reports.recommendation import to_json

        return to_json(found) + "\n"
    if form == "text":
        from rich.console import Console

        from loadtest.reports.consoles import WIDTH

        out = io.StringIO()
        show(found, Console(file=out, width=WIDTH))
        return out.getvalue()
    return {"md": markdown, "csv": table, "junit": junit}[form](found)


def write_all(found: "Recommendation", folder: Path) -> list[Path]:
    """Every form as a file, and the configuration to deploy. Returns what was written.

    Raises: UsageError, once all were tried, if some could not be written.
    """
    written, failures = [], []
    for form, name in FILES.items():
        path = folder / name
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if form == "yaml":
                if not found.configuration:
                    path.unlink(missing_ok=True)  # of an earlier search
                    continue
                write_whole(path, configuration(found))
            else:
                write_whole(path, render(found, form))
        except OSError as exc:
            failures.append(f"{path}: cannot be written: {exc}")
        else:
            written.append(path)
    if failures:
        raise UsageError("; ".join(failures))
    return written


def configuration(found: "Recommendation") -> str:
    """The gateway configuration to deploy, with where it comes from as a comment."""
    import yaml

    from loadtest.reports.headline import answer

    lines = (answer(found, command=False), f"{found.created_at}, {found.source}, on {found.machine}.")
    told = [*(part for line in lines for part in textwrap.wrap(line, 110)), *found.command.splitlines()]
    return "".join(f"# {part}\n" for part in told) + yaml.safe_dump(found.configuration, sort_keys=False, allow_unicode=True)


def show(found: "Recommendation", console: "Console") -> None:
    """The summary for people: the answer, the evidence, then what to keep in mind."""
    from rich.table import Table
    from rich.text import Text

    from loadtest.reports.headline import cliff_told, facts, headline, question, reservations, spent
    from loadtest.reports.states import SIGNALS

    signal = SIGNALS[found.state]
    console.print(Text(question(found), style="bold"))
    console.print()
    console.print(Text.assemble((signal.word, f"bold {_STYLES[signal.style]}"), ": ", (headline(found), "bold"), "."))
    if found.command:
        console.print(Text(f"  {found.command}"), soft_wrap=True)  # to be copied
    told = Table.grid(padding=(0, 2), pad_edge=True)
    told.add_column(justify="right", style="bold", no_wrap=True)
    told.add_column()
    for fact in facts(found):
        told.add_row(fact.value, Text(fact.label))
    if told.row_count:
        console.print(told)
    console.print()
    _show_tables(found, console)
    console.print()
    for candidate in found.candidates:
        if text := cliff_told(candidate):
            console.print(Text(f"{text}."))
    for name, per_minute in found.fleet.autoscaling_per_minute.items() if found.fleet else ():
        letter = found.candidate(name).letter
        console.print(Text(f"Autoscaling of {letter}: begin with {per_minute:,.0f} invocations per instance and minute."))
    if lines := reservations(found):
        console.print("\nKeep in mind:", style="bold")
        grid = Table.grid(padding=(0, 1))
        for line in lines:
            grid.add_row("-", Text(line))
        console.print(grid)
    console.print(Text(f"\n{spent(found)}", style="dim"))


def _show_tables(found: "Recommendation", console: "Console") -> None:
    from rich.text import Text

    from loadtest.reports import tables

    main = tables.candidates(found)
    kept = _NARROW if console.width < 90 else _NARROW + _WIDE
    _show_table([column for column in main if column.heading in kept], console, found.leaders)
    if any(cell.startswith("(") for column in main for cell in column.cells):
        console.print("(in brackets: kept the SLO while it was measured, not proven)", style="dim")
    if any(cell.endswith("*") for column in main for cell in column.cells):
        console.print("* a price to be doubted: see below", style="dim", markup=False)
    reasons: dict[str, list[str]] = {}
    for candidate in found.candidates:
        if candidate.out and not tables.missed_agreement(candidate):
            reasons.setdefault(candidate.out, []).append(candidate.letter)
    for reason, letters in reasons.items():
        console.print(Text(f"{', '.join(letters)}: {reason}", style="dim"))
    if apart := tables.apart(found):
        console.print(f"\n{tables.APART}", style="bold")
        _show_table(apart, console)


def _show_table(columns: "list[Column]", console: "Console", first: tuple[str, ...] = ()) -> None:
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=None, pad_edge=False)
    for column in columns:
        numeric = column.numeric
        grid.add_column(column.heading, justify="right" if numeric else "left", no_wrap=numeric or len(column.heading) < 2)
    for row in zip(*(column.cells for column in columns), strict=True):
        grid.add_row(*(Text(cell) for cell in row), style="bold" if row[0] in first else "")
    console.print(grid)


def markdown(found: "Recommendation") -> str:
    """For a pull request."""
    from loadtest.reports import tables
    from loadtest.reports.headline import cliff_told, facts, headline, question, reservations
    from loadtest.reports.states import SIGNALS

    lines = [f"### {_plain(question(found))}", "", f"**{SIGNALS[found.state].word}**: {_plain(headline(found))}.", ""]
    lines += ["```sh", found.command, "```", ""] if found.command else []
    lines += [f"- **{fact.value}** {_plain(fact.label)}" for fact in facts(found)]
    lines += ["", *_markdown_table(tables.candidates(found)), ""]
    if apart := tables.apart(found):
        lines += [f"{tables.APART}:", "", *_markdown_table(apart), ""]
    lines += [f"{text}." for candidate in found.candidates if (text := cliff_told(candidate))]
    if notes := reservations(found):
        lines += ["", "Keep in mind:", "", *(f"- {_plain(line)}" for line in notes)]
    return "\n".join(lines).rstrip() + "\n"


def _markdown_table(columns: "list[Column]") -> list[str]:
    rows = zip(*(column.cells for column in columns), strict=True)
    return [
        f"| {' | '.join(column.heading for column in columns)} |",
        f"|{'|'.join('--:' if column.numeric else '---' for column in columns)}|",
        *(f"| {' | '.join(_plain(cell).replace('|', chr(92) + '|') for cell in row)} |" for row in rows),
    ]


def _plain(text: str) -> str:
    """Text that Markdown would take for markup."""
    return text.replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_").replace("\n", " ")


def table(found: "Recommendation") -> str:
    """CSV, one line per candidate; AWS's names where AWS has one."""
    aws = {entry.RecommendationId: entry for entry in found.InferenceRecommendations}
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    own = "candidate status letter state InstanceType backend settings CostPerHour"
    prices = "price_basis price_source price_date price_flags"
    rates_and_costs = "predicted_rps max_rps held_rps failing_rps cost_per_million_usd requests_per_dollar agreement"
    writer.writerow((*own.split(), *prices.split(), *rates_and_costs.split(), *METRICS, "out"))
    for c in found.candidates:
        metrics = aws[c.name].Metrics if c.name in aws else None
        settings = ";".join(f"{key}={value}" for key, value in c.settings.items())
        price = (c.price.usd_per_hour, c.price.basis, c.price.source, c.price.date, ";".join(c.price.flags))
        rates = (c.predicted_rps, c.max_rps, c.held_rps, c.failing_rps, c.cost_per_million_usd, c.requests_per_dollar)
        agreed = c.agreement.value if c.agreement else None
        measured = tuple(getattr(metrics, name) if metrics else None for name in METRICS)
        called = (c.name, c.status, c.letter, found.state, c.instance_type, c.backend, settings)
        writer.writerow((*called, *price, *rates, agreed, *measured, c.out))
    for refused in found.refused:
        settings = ";".join(f"{key}={value}" for key, value in refused.settings.items())
        empty = (None,) * (len(f"CostPerHour {prices} {rates_and_costs}".split()) + len(METRICS))
        named = (refused.name, "refused", "", found.state, refused.instance_type, refused.backend, settings)
        writer.writerow((*named, *empty, "; ".join(refused.reasons)))
    return out.getvalue()


def junit(found: "Recommendation") -> str:
    """One test case for the question, which alone passes or fails, and one per candidate: skipped if it was not measured."""
    from loadtest.reports.headline import question
    from loadtest.reports.states import SIGNALS

    signal = SIGNALS[found.state]
    suite = ElementTree.Element("testsuite", name=f"loadtest {found.model}", time=f"{found.seconds_spent:.1f}")
    whole = ElementTree.SubElement(suite, "testcase", classname="loadtest", name=question(found))
    if signal.junit:
        ElementTree.SubElement(whole, signal.junit, message=found.answer)
    else:
        ElementTree.SubElement(whole, "system-out").text = found.answer
    skipped = 0
    for candidate in found.candidates:
        name = f"{candidate.letter}: {candidate.name}"
        case = ElementTree.SubElement(suite, "testcase", classname=_CASES, name=name)
        measured, told = _measured(candidate)
        if measured:
            ElementTree.SubElement(case, "system-out").text = told
        else:
            skipped += 1
            ElementTree.SubElement(case, "skipped", message=told)
    for refused in found.refused:
        skipped += 1
        case = ElementTree.SubElement(suite, "testcase", classname=_CASES, name=refused.name)
        ElementTree.SubElement(case, "skipped", message="; ".join(refused.reasons))
    counts = {kind: str(int(signal.junit == kind[:-1])) for kind in ("failures", "errors")}
    tests = 1 + len(found.candidates) + len(found.refused)
    suite.attrib |= {"tests": str(tests), **counts, "skipped": str(skipped)}
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def _measured(candidate: "CandidateReport") -> tuple[bool, str]:
    """Whether anything valid was measured of it, and what that says."""
    from loadtest.search.standing import agreement_text
    from loadtest.wording import rate

    why = candidate.out
    if candidate.claimed_rps:
        proof = "proven at 95 % confidence" if candidate.max_rps else "not proven"
        return True, f"kept the SLO at {rate(candidate.claimed_rps)}, {proof}"
    agreed = candidate.agreement
    if agreed is not None and not agreed.met and agreed.value is not None:
        return True, f"agreement {agreement_text(agreed.value)}: {why or agreed.failure}"
    if candidate.curve:
        return True, why or f"missed the SLO at {rate(candidate.curve[0].offered_rps)}"
    return False, why or "not measured"
