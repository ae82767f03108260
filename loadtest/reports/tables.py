"""The tables of a recommendation, as text cells: the same in the terminal, in Markdown and on the page.

A column that no row fills is left out.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from loadtest.reports.headline import fleet_told
from loadtest.reports.recommendation import CandidateReport, Recommendation
from loadtest.search.events import Measured
from loadtest.search.standing import agreement_text
from loadtest.wording import attained, figures, percent, usd

APART: Final = "Not eligible: not shown to answer like the reference"


@dataclass(frozen=True, slots=True)
class Column:
    """heading: "" for the letter. numeric: set to the right."""

    heading: str
    numeric: bool
    cells: tuple[str, ...]


Row = TypeVar("Row")
Cells = tuple[str, bool, Callable[[Row], str]]


def candidates(found: Recommendation) -> list[Column]:
    """Every candidate that may win."""
    return table(
        [candidate for candidate in found.candidates if not missed_agreement(candidate)],
        [
            ("", False, lambda c: c.letter),
            ("candidate", False, lambda c: c.differs),
            ("status", False, lambda c: c.status),
            ("USD/h", True, lambda c: usd(c.price.usd_per_hour) + ("*" if c.price.flags else "")),
            ("predicted/s", True, lambda c: figures(c.predicted_rps) if c.predicted_rps else ""),
            ("SLO kept at/s", True, _claimed),
            ("missed at/s", True, lambda c: figures(c.failing_rps) if c.failing_rps and c.claimed_rps else ""),
            ("p99 ms", True, lambda c: figures(c.p99_ms_at_max) if c.p99_ms_at_max else ""),
            ("USD/million", True, lambda c: usd(c.cost_per_million_usd) if c.cost_per_million_usd else ""),
            ("agreement", True, _agreement),
            ("why not", False, lambda c: c.out),
        ],
    )


def apart(found: Recommendation) -> list[Column]:
    """Candidates whose answers differ too much from the reference's, or could not be compared; empty if there are none."""
    return table(
        [candidate for candidate in found.candidates if missed_agreement(candidate)],
        [
            ("", False, lambda c: c.letter),
            ("candidate", False, lambda c: c.differs),
            ("agreement", True, _agreement),
            ("inputs", True, lambda c: str(c.agreement.inputs) if c.agreement and c.agreement.inputs else ""),
            ("statistic", False, lambda c: c.agreement.statistic if c.agreement else ""),
            ("why", False, lambda c: (c.agreement.failure if c.agreement else "") or c.out),
        ],
    )


def fleets(found: Recommendation) -> list[Column]:
    """The cheapest fleets at other rates."""
    return table(
        found.fleets,
        [
            ("requests/s", True, lambda fleet: figures(fleet.rps)),
            ("USD/month", True, lambda fleet: usd(fleet.usd_per_month)),
            ("fleet", False, lambda fleet: fleet_told(found, fleet.counts)),
        ],
    )


def runs(found: Recommendation) -> list[Column]:
    """Every measurement, in the order of the candidates."""
    pairs = [(candidate, run) for candidate in found.candidates for run in candidate.runs]
    return table(
        pairs,
        [
            ("", False, lambda pair: pair[0].letter),
            ("run", False, lambda pair: pair[1].purpose),
            ("offered/s", True, lambda pair: figures(pair[1].rps)),
            (
                "in the SLO",
                True,
                lambda pair: "" if pair[1].attainment is None or not pair[1].valid else attained(pair[1].attainment),
            ),
            ("verdict", False, lambda pair: verdict(pair[1])),
            ("p50 ms", True, lambda pair: _measured(pair[1], pair[1].p50_ms)),
            ("p95 ms", True, lambda pair: _measured(pair[1], pair[1].p95_ms)),
            ("p99 ms", True, lambda pair: _measured(pair[1], pair[1].p99_ms)),
            ("ModelLatency ms", True, lambda pair: _platforms(pair[1].model_latency_ms)),
            ("OverheadLatency ms", True, lambda pair: _platforms(pair[1].overhead_latency_ms)),
            ("goodput/s", True, lambda pair: _measured(pair[1], pair[1].goodput_rps)),
            ("errors", True, lambda pair: percent(pair[1].error_rate) if pair[1].error_rate else ""),
            ("blocks", True, lambda pair: str(len(pair[1].blocks)) if pair[1].blocks else ""),
            ("CPU", True, lambda pair: f"{pair[1].cpu_percent:.0f} %" if pair[1].cpu_percent is not None else ""),
            ("seconds", True, lambda pair: f"{pair[1].seconds:.0f}"),
            (
                "note",
                False,
                lambda pair: pair[1].failure or (pair[1].unanswered if pair[1].valid else "; ".join(pair[1].notes)),
            ),
        ],
    )


def verdict(run: Measured) -> str:
    """In one word: a failure and an INVALID run have no verdict on the SLO."""
    return "failed" if run.failure else run.verdict if run.valid else "INVALID"


def missed_agreement(candidate: CandidateReport) -> bool:
    return candidate.agreement is not None and not candidate.agreement.met


def table(rows: Iterable[Row], columns: Sequence[Cells[Row]]) -> list[Column]:
    """columns: heading, whether it is numeric, and the text of a row's cell."""
    listed = list(rows)
    made = (Column(heading, numeric, tuple(cell(row) for row in listed)) for heading, numeric, cell in columns)
    return [column for column in made if any(column.cells)]


def _platforms(value: float | None) -> str:
    return "" if value is None else figures(value)


def _claimed(candidate: CandidateReport) -> str:
    if not candidate.claimed_rps:
        return ""
    return figures(candidate.claimed_rps) if candidate.max_rps else f"({figures(candidate.claimed_rps)})"


def _agreement(candidate: CandidateReport) -> str:
    agreed = candidate.agreement
    if agreed is None or agreed.value is None:
        return ""
    return "the reference" if candidate.name == agreed.reference else agreement_text(agreed.value)


def _measured(run: Measured, value: float) -> str:
    return figures(value) if run.requests and run.valid and not run.failure and not run.unanswered else ""
