"""What `loadtest recommend` would start, for how long, at what cost: worked out without starting anything."""

import datetime
from dataclasses import dataclass
from typing import TYPE_CHECKING

from loadtest.lab.launchers.launcher import Launcher
from loadtest.question.spec import RefusedCandidate, SearchSpec
from loadtest.search.budget import AGREE_MOST, agree_seconds, profile_seconds
from loadtest.search.events import EXPECTED, Question
from loadtest.search.knowledge import profiles_of
from loadtest.search.next_load import FINALISTS, SHORTLIST
from loadtest.search.strategy import OVERLOAD, SAFE
from loadtest.wording import counted

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, slots=True)
class PlannedCandidate:
    """One candidate and its price. price_flags: what makes the price doubtful."""

    name: str
    usd_per_hour: float
    price_basis: str
    price_source: str
    price_date: datetime.date | None
    price_flags: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PlannedAgreementTest:
    """Of answers, before anything is loaded. kinds: of candidates, at least one of each. seconds: the most, of each. share: of
    all the time.
    """

    kinds: int
    reference: str
    seconds: float
    share: float


@dataclass(frozen=True, slots=True)
class Plan:
    """profiles: where all start, shared by the candidates, of profile_seconds each; where some do not, up to one of each
    candidate. loaded: how many see real load at first; of those, finalists up to their peak. It may be more, up to all: where
    these turn out dearer than others, or too few of them can be had. max_usd: the most it can cost; None: nothing is paid for.
    beside_usd_per_hour: of it, a load generator's part; 0: it is this machine. refused: will not be started.
    """

    model: str
    slo: str
    launcher: str
    minutes: float
    candidates: tuple[PlannedCandidate, ...]
    comparison: PlannedAgreementTest | None
    profiles: int
    profile_seconds: float
    loaded: int
    finalists: int
    start_seconds: float
    max_usd: float | None
    beside_usd_per_hour: float
    refused: tuple[RefusedCandidate, ...]
    warnings: tuple[str, ...]


def plan_of(spec: SearchSpec, question: Question, launcher: Launcher, today: datetime.date) -> Plan:
    """spec: its candidates are priced."""
    candidates = []
    for candidate in spec.candidates:
        price = candidate.price
        assert price is not None
        candidates.append(
            PlannedCandidate(candidate.name, price.usd_per_hour, candidate.basis, price.source, price.date, price.flags(today))
        )
    comparison = None
    if spec.agreement_test is not None:
        comparison = PlannedAgreementTest(
            len({candidate.numerics for candidate in spec.candidates}),
            spec.agreement_test.reference,
            agree_seconds(question.seconds),
            AGREE_MOST,
        )
    profiles = profiles_of(question.entrants, {candidate.group for candidate in spec.candidates})
    loaded = min(SHORTLIST, len(candidates))
    max_usd = None
    if launcher.paid:
        prices = sorted((candidate.usd_per_hour for candidate in candidates), reverse=True)
        dearest = (sum(prices[: question.parallel]) + launcher.beside_usd_per_hour) * question.seconds / 3600
        max_usd = dearest if question.max_usd is None else min(dearest, question.max_usd)
    return Plan(
        model=spec.model,
        slo=str(spec.slo),
        launcher=spec.launcher.kind,
        minutes=question.seconds / 60,
        candidates=tuple(candidates),
        comparison=comparison,
        profiles=profiles,
        profile_seconds=profile_seconds(question, profiles),
        loaded=loaded,
        finalists=min(FINALISTS, loaded),
        start_seconds=launcher.start_s,
        max_usd=max_usd,
        beside_usd_per_hour=launcher.beside_usd_per_hour,
        refused=spec.refused,
        warnings=tuple(map("".join, spec.warnings)),
    )


def as_json(plan: Plan) -> str:
    """For programs."""
    import msgspec

    return msgspec.json.format(msgspec.json.encode(plan)).decode()


def show(plan: Plan, console: "Console") -> None:
    """For people."""
    from rich.table import Table

    grid = Table(title=f"{plan.model} within {plan.slo}, launcher {plan.launcher}", title_justify="left", box=None)
    for column in ("candidate", "USD/h", "price"):
        grid.add_column(column, justify="right" if column == "USD/h" else "left")
    for candidate in plan.candidates:
        price = ", ".join((candidate.price_basis, *candidate.price_flags))
        grid.add_row(candidate.name, f"{candidate.usd_per_hour:.4g}", price)
    console.print(grid)
    sources = {f"{c.price_basis}: {c.price_source}, {c.price_date or 'undated'}" for c in plan.candidates}
    for source in sorted(sources):
        console.print(f"prices, {source}", style="dim")
    count = len(plan.candidates)
    if plan.comparison is not None:
        kinds = plan.comparison.kinds
        against = plan.comparison.reference
        console.print(
            f"First the answers of {kinds} kind{'s' * (kinds > 1)} of candidates are compared with "
            f"{against if against == EXPECTED else f'those of {against}'}: for seconds on a quiet machine, at most "
            f"{plan.comparison.seconds:.0f} s each, and {plan.comparison.share:.0%} of the time in all"
            f"{'; more where one does not start' * (kinds < count)}."
        )
    more = ", and others where these turn out dearer, or too few of them can be had" * (plan.finalists < count)
    console.print(
        f"{counted(count, 'candidate')} {'has' if count == 1 else 'share'} "
        f"{counted(plan.profiles, 'profile')} of {plan.profile_seconds:.0f} s"
        f"{f', up to {count} where some do not start' * (plan.profiles < count)}; up to "
        f"{plan.loaded} see real load at first, {plan.finalists} up to their peak{more}. "
        f"A start takes about {plan.start_seconds:.0f} s. "
        f"All in all {plan.minutes:g} minutes, {OVERLOAD:g} and {SAFE:g} times the winner's peak included."
    )
    if plan.beside_usd_per_hour:
        console.print(f"A load generator beside them costs ${plan.beside_usd_per_hour:.4g} an hour, on demand.")
    if plan.max_usd is not None:
        console.print(f"Costs at most ${plan.max_usd:.2f}.")
    else:
        console.print("Costs nothing: what is measured runs already, or runs here.")
    for refused in plan.refused:
        for reason in refused.reasons:
            console.print(f"refused: {refused.name}: {reason}", style="yellow", markup=False)
    for line in plan.warnings:
        console.print(f"! {line}", style="yellow")
