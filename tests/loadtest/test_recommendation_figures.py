"""Each figure of a recommendation, on runs made by hand."""

import datetime
import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway.documents.reader import STANDARD_INPUT_NAME
from gateway.instances.facts import Price
from loadtest.errors import ExitCode, UsageError
from loadtest.lab.recommender import question_of
from loadtest.prices.fleet import Fleet
from loadtest.question.spec import UNSURE, AgreementTest, SearchSpec
from loadtest.reports import forms, tables
from loadtest.reports.conclusion import build
from loadtest.reports.headline import facts, reservations
from loadtest.reports.recommendation import Recommendation, read, to_json
from loadtest.search.events import UNREACHED, Agreed, Measured, Predicted, Profiled, Timing
from loadtest.search.standing import Name, SearchOutcome, Standing, listed
from tests.loadtest.examples import NOW, example_spec

ONE, TWO, THREE, FOUR = (f"{kind}.large synthetic (sessions {n})" for kind in ("c7i", "c8g") for n in (1, 2))
USD = 0.08925  # an hour of a c7i.large
HELD, MISSED = 1.0, 0.5


@functools.cache
def usual_spec() -> SearchSpec:
    return example_spec()


def run(name: str, rps: float, verdict: str = "pass", share: float = HELD, **more: Any) -> Measured:
    blocks = ((100, round(100 * share)),) * 10
    usual = {"purpose": "peak", "seconds": 20.0, "p50_ms": 8.0, "p95_ms": 18.0, "p99_ms": 20.0, "mean_ms": 9.0}
    return Measured(name, rps=rps, verdict=verdict, blocks=blocks, **{**usual, **more})  # type: ignore[arg-type]


def told(
    runs: Mapping[str, Sequence[Measured]],
    winner: str | None = None,
    runner_up: str | None = None,
    *,
    predicted: Mapping[str, float] | None = None,
    outs: Mapping[str, str] | None = None,
    untried: Mapping[str, str] | None = None,
    agreed: Mapping[str, Agreed] | None = None,
    spec: SearchSpec | None = None,
    paid: bool = False,
    asked_with: Sequence[str] = (),
    **outcome: Any,
) -> Recommendation:
    """predicted: 500/s where nothing else is said; 0: never."""
    spec = spec or usual_spec()
    question = question_of(spec, paid=paid)
    standings = []
    for entrant in question.entrants:
        rps = (predicted or {}).get(entrant.name, 500.0)
        standings.append(
            Standing(
                entrant,
                question.required,
                question.limit_ms,
                predictions=[Predicted(entrant.name, rps)] if rps else [],
                runs=list(runs.get(entrant.name, ())),
                out=(outs or {}).get(entrant.name, ""),
                untried=(untried or {}).get(entrant.name, ""),
                agreement=(agreed or {}).get(entrant.name),
            )
        )
    usual: dict[str, Any] = {"verified": None, "floor": None, "seconds": 60.0, "usd": 0.5, "notes": (), "profiles": {}}
    found = SearchOutcome(tuple(standings), winner=winner, runner_up=runner_up, **{**usual, **outcome})
    return build(spec, question, found, now=NOW, machine="a machine", paid=paid, asked_with=asked_with)


PROVEN = {ONE: [run(ONE, 400)], TWO: [run(TWO, 300)]}
BRACKETS = {ONE: [*PROVEN[ONE], run(ONE, 420, "fail", MISSED)], TWO: [*PROVEN[TWO], run(TWO, 310, "fail", MISSED)]}


# One candidate.


def test_a_candidate_is_described_by_its_bracket_at_the_rate_claimed() -> None:
    found = told(BRACKETS, ONE, TWO).candidate(ONE)
    assert (found.max_rps, found.held_rps, found.failing_rps, found.claimed_rps) == (400, 400, 420, 400)
    assert (found.predicted_rps, found.estimated_rps) == (500, pytest.approx((400 * 420) ** 0.5))
    assert found.cost_per_million_usd == pytest.approx(USD / 3600 / 400 * 1e6)
    assert found.requests_per_dollar == pytest.approx(400 * 3600 / USD)
    assert found.p99_ms_at_max == 20
    assert [point.offered_rps for point in found.curve] == [400, 420]
    assert len(found.runs) == 2


def test_who_was_never_measured_has_no_cost() -> None:
    found = told(PROVEN, ONE, TWO).candidate(THREE)
    assert (found.max_rps, found.held_rps, found.failing_rps) == (0, 0, None)
    assert (found.cost_per_million_usd, found.requests_per_dollar, found.p99_ms_at_max, found.cliff) == (None,) * 4
    assert (found.timings, found.overhead_ms, found.curve, found.runs) == ((), 0, (), ())


def test_the_p99_is_that_of_the_last_run_at_the_claimed_rate() -> None:
    again = {ONE: [run(ONE, 400, "undecided", p99_ms=44.0), run(ONE, 400, p99_ms=33.0), run(ONE, 380, p99_ms=11.0)]}
    assert told(again, ONE).candidate(ONE).p99_ms_at_max == 33


def test_who_was_not_tried_is_told_by_whose_failure() -> None:
    failure = "did not start: out of memory"
    found = told({}, predicted={TWO: 0, ONE: 0}, outs={TWO: failure, ONE: failure}, untried={TWO: ONE})
    assert found.candidate(ONE).out == failure
    assert found.candidate(TWO).out == f"not tried, as c7i.large, sessions 1 failed: {failure}"


def test_a_profile_is_its_groups() -> None:
    group = usual_spec().candidates[0].group
    timings = (Timing(1, 1, 5.0),)
    found = told(PROVEN, ONE, TWO, profiles={group: Profiled(group, timings, 0.5, 30.0)})
    assert [(c.timings, c.overhead_ms) for c in found.candidates if c.instance_type == "c7i.large"] == [(timings, 0.5)] * 2
    assert {c.timings for c in found.candidates if c.instance_type == "c8g.large"} == {()}


def test_prices_come_with_source_date_and_what_is_doubtful() -> None:
    spec = usual_spec()
    odd = Price(usd_per_hour=0.5, source="a guess", date=datetime.date(2020, 1, 1), estimated=True)
    undated = Price(usd_per_hour=0.25, source="a bill", date=None)
    candidates = tuple(
        replace(candidate, price=odd if candidate.instance_type == "c7i.large" else undated) for candidate in spec.candidates
    )
    found = told(PROVEN, ONE, TWO, spec=replace(spec, candidates=candidates))
    price = found.candidate(ONE).price
    assert (price.usd_per_hour, price.basis, price.source, price.date) == (0.5, "ec2", "a guess", "2020-01-01")
    assert price.flags[0] == "estimated"
    assert found.candidate(THREE).price.date is None
    # One line for each price, whoever has it.
    doubts = [line for line in found.warnings if "prices refresh" in line]
    assert [line.partition(":")[0] for line in doubts] == ["c8g.large", "c7i.large"]
    assert "(a bill): `loadtest prices refresh c8g.large` fetches" in doubts[0]
    assert "(a guess): `loadtest prices refresh c7i.large` fetches" in doubts[1]


# Ranks and states.


def test_each_has_the_status_of_what_is_known_of_it() -> None:
    runs = {
        ONE: PROVEN[ONE],
        TWO: PROVEN[TWO],
        THREE: [run(THREE, 200)],
        FOUR: [run(FOUR, 400, valid=False, verdict="undecided")],
    }
    found = told(runs, ONE, TWO)
    assert [candidate.status for candidate in found.candidates] == ["winner", "runner-up", "finalist", "not measurable"]
    out = told(runs, ONE, TWO, outs={THREE: "agrees 0.5"})
    assert out.candidate(THREE).status == "measured"
    missed = {**runs, THREE: [run(THREE, 200, "fail", MISSED)], FOUR: []}
    assert told(missed, ONE, TWO).candidate(THREE).status == "rejected"
    late = run(THREE, 150, valid=False, verdict="undecided")
    assert told({**missed, THREE: [*missed[THREE], late]}, ONE, TWO).candidate(THREE).status == "undecided"
    short = replace(run(THREE, 200, "undecided", MISSED), purpose="round", overrun=1.5)
    assert told({**missed, THREE: [short]}, ONE, TWO).candidate(THREE).status == "undecided"
    assert told(missed, ONE, TWO).candidate(FOUR).status == "predicted"
    assert told(missed, ONE, TWO, predicted={FOUR: 0.0}).candidate(FOUR).status == "rejected"


def test_letters_go_by_rank_and_then_by_cost() -> None:
    runs = {
        THREE: [run(THREE, 400)],
        TWO: [run(TWO, 300)],
        ONE: [run(ONE, 200)],
    }
    found = told(runs, THREE, TWO)
    assert [(candidate.letter, candidate.name) for candidate in found.candidates] == [
        ("A", THREE), ("B", TWO), ("C", ONE), ("D", FOUR),
    ]  # fmt: skip
    unmeasured = told({ONE: [run(ONE, 400)]}, ONE, predicted={TWO: 100.0, THREE: 300.0, FOUR: 200.0})
    assert [candidate.name for candidate in unmeasured.candidates] == [ONE, THREE, FOUR, TWO]  # by what is predicted
    assert len({candidate.differs for candidate in found.candidates}) == 4


def test_a_winner_is_proven_where_its_rate_passed() -> None:
    proven = told(PROVEN, ONE, TWO, verified=True)
    assert (proven.state, proven.proven, proven.exit_code, proven.needed, proven.command) == (
        "proven",
        True,
        ExitCode.MET,
        "",
        "",
    )
    assert (proven.verified, proven.winner, proven.runner_up) == (True, ONE, TWO)
    held = told({ONE: [run(ONE, 400, "undecided")]}, ONE, needed_seconds=130.0, asked_with=("--out", "some where"))
    assert (held.state, held.proven, held.exit_code) == ("not proven", False, ExitCode.MISSED)
    assert held.command == "loadtest recommend example.yaml --out 'some where' --resume --budget-minutes 3"
    assert "more" in held.needed


def test_a_spec_from_standard_input_is_asked_for_again() -> None:
    spec = replace(usual_spec(), source=STANDARD_INPUT_NAME)
    held = told({ONE: [run(ONE, 400, "undecided")]}, ONE, needed_seconds=130.0, asked_with=("--out", "x"), spec=spec)
    assert held.command == "loadtest recommend - --out x --resume --budget-minutes 3"
    assert held.needed == "needs about 3 more minutes, and this spec on standard input again"
    untold = told({ONE: [run(ONE, 400, "undecided")]}, ONE, spec=spec)
    assert untold.command == "loadtest recommend - --budget-minutes 60"
    assert untold.needed.endswith("of measuring did not suffice; with this spec on standard input again")


def test_without_a_winner_it_depends_on_what_is_known() -> None:
    missed = {name: [run(name, 100, "fail", MISSED)] for name in (ONE, TWO, THREE, FOUR)}
    assert told(missed).state == "no candidate"
    busy = {**missed, ONE: [run(ONE, 100, "undecided", valid=False)]}
    found = told(busy)
    assert (found.state, found.generator_limited, found.exit_code) == ("invalid", (ONE,), ExitCode.INVALID)
    untried = {**missed, ONE: []}
    assert told(untried).state == "not proven"
    assert told(untried, predicted={ONE: 0.0}).state == "no candidate"
    dead = {**missed, ONE: [run(ONE, 100, "undecided", failure="was killed")]}
    assert told(dead).state == "no candidate"
    undecided = {**missed, ONE: [run(ONE, 100, "undecided", 0.98)]}
    assert told(undecided).state == "not proven"


def test_who_missed_only_rates_that_were_too_high_may_be_the_answer_while_lower_ones_are_left_to_try() -> None:
    vain = {name: [run(name, 100, "fail", MISSED)] * 4 for name in (TWO, THREE, FOUR)}
    missed = {**vain, ONE: [run(ONE, 100, "fail", MISSED)]}
    left: dict[str, Any] = {"lacking": (("that is too short for a run of ", Name(ONE), " at 80.0/s"),), "needed_seconds": 70.0}
    found = told(missed, **left)
    assert (found.state, found.candidate(ONE).status, found.candidate(TWO).status) == ("not proven", "undecided", "rejected")
    assert found.command == "loadtest recommend example.yaml --resume --budget-minutes 2"
    assert told(missed, needed_seconds=70.0).candidate(ONE).status == "rejected"  # nothing was left to try
    floor = run(ONE, 13.0, "fail", MISSED, purpose="floor")  # hardly any load is too much already
    assert told(missed, **left, floor=floor).state == "no candidate"
    assert told(missed, **left, floor=replace(floor, verdict="undecided")).state == "not proven"


def test_whom_the_budget_did_not_reach_leaves_the_answer_open() -> None:
    missed = {name: [run(name, 100, "fail", MISSED)] for name in (ONE, TWO, THREE)}
    unreached: dict[str, Any] = {"predicted": {FOUR: 0.0}, "outs": {FOUR: UNREACHED}}
    found = told(missed, **unreached)
    assert (found.state, found.candidate(FOUR).status) == ("not proven", "not reached")
    few = example_spec(target_rps=5000, candidates=[{**example_spec_document(), "max_count": 2}])
    found = told(BRACKETS, ONE, TWO, spec=few, predicted={THREE: 0.0, FOUR: 0.0}, outs={FOUR: UNREACHED}, needed_seconds=70.0)
    assert (found.state, found.winner, found.needed) == ("not proven", ONE, "needs about 2 more minutes")
    assert found.notes[-1].startswith("as many instances as can be had carry 560/s of 5,000/s")
    proven = told(BRACKETS, ONE, TWO, **unreached)
    assert proven.answer.startswith("PROVEN: A is the cheapest that was found: ")
    assert "is the chance that none of those that the budget reached costs less than A" in proven.answer
    # Not even the reference's answers: no machine is to blame.
    silent = {name: Agreed(name, failure=f"was not compared: {UNREACHED}") for name in (ONE, TWO, THREE, FOUR)}
    outs = {name: agreed.failure for name, agreed in silent.items()}
    assert told({}, predicted=dict.fromkeys(outs, 0.0), agreed=silent, outs=outs).state == "not proven"


def test_what_a_proof_takes_is_told_in_time_and_where_it_lacks_in_money() -> None:
    held: dict[str, Any] = {"runs": {ONE: [run(ONE, 400, "undecided")]}, "winner": ONE, "needed_seconds": 130.0}
    spec = example_spec(budget={"minutes": 800, "usd": 2.0})
    enough = told(**held, needed_usd=0.5, spec=spec, paid=True)
    assert enough.needed == "needs about 3 more minutes"
    assert enough.command == "loadtest recommend example.yaml --resume --budget-minutes 3 --max-usd 2"
    more = told(**held, needed_usd=1.801, spec=spec, paid=True, usd=1.9)
    assert more.needed == "needs about 3 more minutes and $1.80"
    assert more.command.endswith("--max-usd 2")  # they are spent anew
    assert told(**held, needed_usd=2.801, spec=spec, paid=True).command.endswith("--max-usd 2.81")
    assert told(**held, seconds=0.0).command == "loadtest recommend example.yaml --budget-minutes 3"  # nothing to go on from
    untold = told(**{**held, "needed_seconds": None}, spec=spec)
    assert untold.command == "loadtest recommend example.yaml --budget-minutes 1440"  # more is refused
    assert told(**{**held, "needed_seconds": 1e6}).command.endswith("--budget-minutes 1440")


def test_a_floor_that_could_not_be_measured_or_that_kept_the_slo_is_no_miss() -> None:
    missed = {name: [run(name, 100, "fail", MISSED)] for name in (ONE, TWO, THREE, FOUR)}
    floor = run(ONE, 13.0, "fail", MISSED, purpose="floor")
    found = told(missed, floor=floor)
    assert found.state == "no candidate"
    assert found.floor is not None
    assert (found.floor.candidate, found.floor.rps, found.floor.p50_ms, found.floor.p95_ms, found.floor.p99_ms) == (
        ONE,
        13,
        8,
        18,
        20,
    )
    assert told(missed, floor=replace(floor, valid=False)).state == "invalid"
    assert told(missed, floor=replace(floor, verdict="pass")).state == "not proven"
    assert told(missed, floor=replace(floor, blocks=(), p99_ms=0.0)).floor is None


def test_a_floor_of_errors_only_is_told_as_errors_and_not_as_0_ms() -> None:
    missed = {name: [run(name, 100, "fail", MISSED)] for name in (ONE, TWO, THREE, FOUR)}
    failed: dict[str, Any] = {"p50_ms": 0.0, "p95_ms": 0.0, "p99_ms": 0.0, "error_rate": 1.0}
    errors = {"errors": {"http 500": 1000}, "error_samples": {"http 500": "boom"}}
    floor = run(ONE, 13.0, "fail", 0.0, purpose="floor", **failed, **errors)
    found = told({**missed, ONE: [*missed[ONE], floor]}, floor=floor)
    assert (found.state, found.floor, facts(found)) == ("no candidate", None, [])
    one = found.candidate(ONE).letter
    assert f"{one}, hardly loaded with 13.0/s: 1,000 of 1,000 failed: 1,000 × http 500: boom" in found.notes
    (row,) = [row for row in zip(*(column.cells for column in tables.runs(found)), strict=True) if "floor" in row]
    assert "1,000 of 1,000 failed: 1,000 × http 500: boom" in row
    assert "0" not in row
    waiting = replace(floor, errors={}, error_samples={}, error_rate=0.0)  # all were cut off by the end of the run
    assert told(missed, floor=waiting).notes[-1].endswith("hardly loaded with 13.0/s: none of 1,000 requests was answered")
    old = replace(waiting, error_rate=1.0)  # a journal of before it had kinds of errors
    assert told(missed, floor=old).notes[-1].endswith("hardly loaded with 13.0/s: none of 1,000 requests succeeded")


def test_where_nothing_could_be_compared_nothing_is_known() -> None:
    failed = {name: Agreed(name, failure="did not answer") for name in (ONE, TWO)}
    outs = dict.fromkeys((ONE, TWO, THREE, FOUR), "did not answer")
    assert told({}, agreed=failed, outs=outs).state == "invalid"
    some = {**failed, TWO: Agreed(TWO, 0.5, 300, "cosine")}
    missed = {name: [run(name, 100, "fail", MISSED)] for name in (ONE, TWO, THREE, FOUR)}
    assert told(missed, agreed=some).state == "no candidate"


# The winner against the rest.


@pytest.mark.slow
def test_costs_are_told_apart_where_their_brackets_are() -> None:
    assert told(BRACKETS, ONE, TWO).margin_resolved
    assert not told({**BRACKETS, TWO: [run(TWO, 390), run(TWO, 410, "fail", MISSED)]}, ONE, TWO).margin_resolved
    open_ended = {**BRACKETS, TWO: [run(TWO, 390)]}  # it may reach what is predicted
    assert not told(open_ended, ONE, TWO).margin_resolved
    assert told(open_ended, ONE, TWO, predicted={TWO: 395.0}).margin_resolved
    dearer = {ONE: BRACKETS[ONE], TWO: [run(TWO, 500), run(TWO, 510, "fail", MISSED)]}
    assert told(dearer, ONE, TWO).margin_resolved  # the other way round
    assert not told(PROVEN, ONE).margin_resolved  # with nobody


@pytest.mark.parametrize(("prices", "rates"), [((0.1, 0.1), (300, 130)), ((0.3, 0.1), (300, 30))])
def test_fleets_that_cost_the_same_are_as_cheap_as_each_other(prices: tuple[float, float], rates: tuple[float, float]) -> None:
    spec = example_spec(target_rps=50)
    odd = dict(zip((ONE, TWO), prices, strict=True))
    candidates = tuple(
        replace(candidate, price=Price(usd_per_hour=odd.get(candidate.name, 1.0), source="mine", date=None))
        for candidate in spec.candidates
    )
    runs = {name: [run(name, rps), run(name, 1.05 * rps, "fail", MISSED)] for name, rps in zip((ONE, TWO), rates, strict=True)}
    found = told(runs, ONE, TWO, spec=replace(spec, candidates=candidates))
    assert (found.margin, found.margin_resolved) == (0, False)
    assert "PROVEN: A is as cheap as any" in found.answer
    assert "; the same is what B, the runner-up, costs" in found.answer


def test_the_margin_and_the_price_that_flips_are_those_of_the_claims() -> None:
    found = told(PROVEN, ONE, TWO)
    assert found.margin == pytest.approx(400 / 300 - 1)
    assert found.flip_usd_per_hour == pytest.approx(USD * 400 / 300)
    assert found.autoscaling_invocations_per_minute == pytest.approx(400 * 60 / 2)
    nobody = told({})
    assert (nobody.margin, nobody.flip_usd_per_hour, nobody.probability_cheapest) == (None, None, None)
    assert (nobody.autoscaling_invocations_per_minute, nobody.configuration) == (None, {})


def test_the_answer_sets_the_runner_up_against_the_winner() -> None:
    answer = told(BRACKETS, ONE, TWO).answer
    assert "; 33 % more is what B, the runner-up, costs at 300/s; " in answer
    assert "; $0.119 an hour of A is where B becomes the cheaper; " in answer
    assert "is the chance that none costs less than A" in answer
    cheaper = {ONE: BRACKETS[ONE], TWO: [run(TWO, 460, "undecided"), run(TWO, 480, "fail", MISSED)]}
    answer = told(cheaper, ONE, TWO).answer
    assert "; 13 % less is what B, the runner-up, costs at 460/s, which is not proven; " in answer
    assert "becomes the cheaper" not in answer
    near = {ONE: BRACKETS[ONE], TWO: [run(TWO, 390), run(TWO, 410, "fail", MISSED)]}
    assert "; the same is what B, the runner-up, costs, within what was measured; " in told(near, ONE, TWO).answer
    alone = told(BRACKETS, ONE).answer
    assert alone.startswith("PROVEN: A is the only one that was seen to keep the SLO: c7i.large")
    assert "runner-up" not in alone


def test_the_answer_begins_with_the_rate_what_was_seen_there_and_what_it_costs() -> None:
    proven, at_rate = "400/s kept p99 under 50 ms, proven at 95 % confidence", "20.0 ms p99 at that rate; $0.0620 per million"
    assert f" {proven}; the highest that was tried; {at_rate} requests at that rate; " in told(PROVEN, ONE, TWO).answer
    assert f" {proven}; {at_rate} requests at that rate; " in told(BRACKETS, ONE, TWO).answer
    held = told({ONE: [run(ONE, 400, "undecided")]}, ONE).answer
    assert " 400/s kept p99 under 50 ms while it was measured, not proven; the highest that was tried; 20.0 ms p99" in held


@pytest.mark.parametrize(("seconds", "minutes"), [(1, 1), (60, 1), (61, 2), (120, 2), (120.5, 3)])
def test_what_a_proof_would_take_is_told_in_whole_minutes(seconds: float, minutes: int) -> None:
    found = told({ONE: [run(ONE, 400, "undecided")]}, ONE, needed_seconds=seconds)
    assert found.command.endswith(f" --resume --budget-minutes {minutes}")
    assert found.needed == f"needs about {minutes} more minute{'s' if minutes > 1 else ''}"


def test_what_the_decisive_run_says_of_itself_is_a_note() -> None:
    noted = {ONE: [run(ONE, 400, notes=("blocks are short",)), run(ONE, 380, notes=("another",))]}
    found = told(noted, ONE, notes=(("the first",),))
    assert found.notes[:2] == ("the first", "the run behind A's rate: blocks are short")


def test_candidates_are_letters_where_a_sentence_names_them_and_nowhere_else() -> None:
    busy = f"busy with other work ({ONE} 1.21 cores)"
    outs = {TWO: f"{ONE}.py: no module", THREE: f"{ONE} is what it said"}
    agreed = {TWO: Agreed(TWO, 0.5, 300, "cosine"), ONE: Agreed(ONE, 0.5, 300, "cosine")}
    named: dict[str, Any] = {"notes": (("the machine of ", Name(TWO), f" failed: {ONE}"),)}
    named["lacking"] = (("that is too short for ", *listed((TWO, ONE))),)
    found = told({ONE: [run(ONE, 400, notes=(busy,))]}, ONE, outs=outs, agreed=agreed, reference=TWO, **named)
    two = found.candidate(TWO).letter
    assert found.warnings[0] == f"the winner's answers agree only 0.5 with those of {two}; the spec allows it"
    assert found.notes[:2] == (f"the machine of {two} failed: {ONE}", f"the run behind A's rate: {busy}")
    assert found.notes[2].endswith(f" before its budget: that is too short for {two}, A")
    spec = usual_spec()
    unsure = replace(spec, agreement_test=AgreementTest((), {}, True, ONE, (), unsure=True))
    assert told(PROVEN, TWO, ONE, spec=unsure).warnings[: len(spec.odd) + 1] == (*spec.odd, f"{UNSURE}B")
    for form in ("text", "md", "html"):
        shown = " ".join(forms.render(found, form).split())
        assert all(told in shown for told in (*outs.values(), busy)), form


# Fleets.


def test_fleets_are_given_for_rates_from_a_tenth_to_fifty_times_the_best() -> None:
    found = told(PROVEN, ONE, TWO)
    assert [fleet.rps for fleet in found.fleets] == [40, 80, 200, 400, 800, 2000, 4000, 8000, 20000]
    assert found.fleets[3].counts == {ONE: 2}  # 0.7 of 400/s each
    assert found.fleets[3].usd_per_month == pytest.approx(2 * USD * 730)
    assert told({}).fleets == ()
    odd = told({ONE: [run(ONE, 404)]}, ONE)
    assert [fleet.rps for fleet in odd.fleets][:3] == [40, 81, 200]  # two digits


def test_a_fleet_is_of_proven_rates_unless_none_is() -> None:
    held = {ONE: PROVEN[ONE], TWO: [run(TWO, 4000, "undecided")]}
    assert told(held, ONE, TWO).fleets[-1].counts.keys() == {ONE}
    assert told({TWO: held[TWO]}, TWO).fleets[-1].counts.keys() == {TWO}
    broken = {ONE: PROVEN[ONE], TWO: [run(TWO, 4000), run(TWO, 4500, "fail", MISSED, failure="was killed")]}
    assert told(broken, ONE).fleets[-1].counts.keys() == {ONE}


@pytest.mark.slow
def test_the_answer_says_what_a_month_of_the_fleet_costs_where_a_rate_was_asked() -> None:
    found = told(PROVEN, ONE, TWO, spec=example_spec(target_rps=500))
    assert "; $130 a month for 500/s: 2 × A, loaded to 70 %; " in found.answer
    assert "a month" not in told(PROVEN, ONE, TWO).answer
    nobody_can = {**example_spec_document(), "max_count": 1}
    assert "a month" not in told(PROVEN, ONE, TWO, spec=example_spec(target_rps=5000, candidates=[nobody_can])).answer


def test_the_fleet_for_the_target_rate_keeps_to_what_can_be_had() -> None:
    few = {**example_spec_document(), "max_count": 2}
    spec = example_spec(target_rps=900, candidates=[few])
    found = told({ONE: [run(ONE, 400)], THREE: [run(THREE, 300)]}, ONE, THREE, spec=spec)
    assert found.fleet is not None
    assert found.fleet.counts == {ONE: 2, THREE: 2}
    assert found.InferenceRecommendations[0].EndpointConfiguration.InitialInstanceCount == 2
    # Beyond what two of each carry there is none.
    assert [fleet.rps for fleet in found.fleets] == [40, 80, 200, 400, 800]
    assert found.state == "proven"
    assert told({}, spec=spec).fleet is None
    # Of one instance type, two can be had whatever the settings.
    short = told({ONE: [run(ONE, 400)], TWO: [run(TWO, 300)]}, ONE, TWO, spec=spec)
    assert (short.fleet, short.proven, [fleet.rps for fleet in short.fleets]) == (None, False, [40, 80, 200, 400])
    assert short.notes[-1].startswith("as many instances as can be had carry 560/s of 900/s")


def test_a_mix_that_costs_less_than_the_winner_alone_is_the_answer() -> None:
    few = {**example_spec_document(), "max_count": 2}
    spec = example_spec(target_rps=900, candidates=[few])
    found = told({ONE: [run(ONE, 400)], THREE: [run(THREE, 300)]}, ONE, THREE, spec=spec)
    assert found.answer.startswith(
        "PROVEN: 2 × A + 2 × B are the cheapest fleet that was proven: "
        "A is c7i.large, sessions 1; B is c8g.large, sessions 1. 400/s kept p99 under 50 ms"
    )
    # One that saves nothing is none: three of either would do, of one price.
    same = {**example_spec_document(), "usd_per_hour": 1.0, "price_source": "list", "price_date": "2026-07-30"}
    alike = told({ONE: [run(ONE, 420)], TWO: [run(TWO, 430)]}, ONE, spec=example_spec(target_rps=850, candidates=[same]))
    assert alike.fleet is not None
    assert alike.fleet.counts == {ONE: 3}


def test_a_fleet_of_one_kind_is_of_the_winners() -> None:
    # Beside the proven rate of TWO, what held counts for 0.8: four of ONE cost less than five of THREE. At their whole rates,
    # four of THREE would cost less.
    seen = {ONE: [run(ONE, 447, "undecided")], TWO: [run(TWO, 100)], THREE: [run(THREE, 365, "undecided")]}
    found = told(seen, ONE, THREE, spec=example_spec(target_rps=1000))
    assert found.fleet is not None
    assert (found.fleet.counts, found.configuration_of) == ({ONE: 4}, ONE)


@functools.cache
def mixed() -> Recommendation:
    """One alone costs 1.40 USD/h for 700/s; a TWO and a "4", of which one each can be had, 1.25 together."""
    usual = {**example_spec_document(), "instances": ["c7i.large"], "price_source": "own", "price_date": "2026-07-30"}
    prices = (
        (1, {"usd_per_hour": 1.4}),
        (2, {"usd_per_hour": 0.6, "max_count": 1}),
        (4, {"usd_per_hour": 0.65, "max_count": 1}),
    )
    spec = example_spec(target_rps=700, candidates=[{**usual, **more, "settings": {"sessions": [n]}} for n, more in prices])
    one, two, four = (candidate.name for candidate in spec.candidates)
    runs = {
        one: [run(one, 1000, p99_ms=41.0)],
        two: [run(two, 520, p99_ms=11.0)],
        four: [run(four, 530, p99_ms=12.0, notes=("a stall",))],
    }
    return told(runs, one, two, spec=spec, verified=True)


def test_the_figures_of_a_mix_are_of_whoever_is_in_it() -> None:
    found = mixed()
    assert [fact.value for fact in facts(found)[:8]] == [
        *("520/s", "11.0 ms", "$0.600"),
        *("530/s", "12.0 ms", "$0.650"),
        *("$912", "$1,022"),
    ]
    assert facts(found)[0].label.startswith("kept p99 under 50 ms on each B, proven at 95 % confidence")
    assert facts(found)[3].label.startswith("kept p99 under 50 ms on each C")
    assert facts(found)[7].label == "a month is what 1 × A costs, the cheapest alone"
    assert [candidate.status for candidate in found.candidates] == ["cheapest alone", "in the fleet", "in the fleet"]
    assert found.leaders == ("B", "C")
    assert "the run behind C's rate: a stall" in found.notes
    assert "A alone recovers from an overload" in forms.render(found, "html")
    assert "cheapest alone, recovers" not in forms.render(told(BRACKETS, ONE, TWO, verified=True), "html")


def test_the_configuration_of_a_mix_is_of_one_that_is_in_it_and_says_so() -> None:
    found = mixed()
    _, two, four = (candidate.name for candidate in found.candidates)
    assert found.configuration_of == four  # it carries most
    assert found.autoscaling_invocations_per_minute == 0.5 * 60 * 530
    assert found.configuration == found.configurations[four]
    backends = [found.configurations[name]["models"][0]["backends"][0] for name in (two, four)]
    assert [backend["sessions"] for backend in backends] == [2, 4]
    assert any("`gateway.yaml` is of C alone" in line for line in reservations(found))
    alone = told(BRACKETS, ONE, TWO)
    assert (alone.configuration_of, alone.configurations) == (ONE, {})
    assert not any("gateway.yaml" in note for note in alone.notes)


def test_what_holds_of_a_mix_that_is_not_proven_is_told_of_all_of_it() -> None:
    few = {**example_spec_document(), "max_count": 2}
    seen = {ONE: [run(ONE, 400, "undecided")], THREE: [run(THREE, 300, "undecided")]}
    found = told(seen, ONE, THREE, spec=example_spec(target_rps=900, candidates=[few]), needed_seconds=70.0)
    assert found.state == "not proven"
    assert ". So far 2 × A + 2 × B are ahead: A is c7i.large, sessions 1; B is" in found.answer


def test_a_mix_that_was_not_proven_is_named_beside_the_answer() -> None:
    hoped = Fleet({ONE: 1, THREE: 1}, 1.5 * USD, 800.0, 500.0, 0.7, {ONE: 1.0, THREE: 1.0})
    found = told(BRACKETS, ONE, TWO, spec=example_spec(target_rps=500), hoped=hoped)
    assert found.answer.startswith("PROVEN: A is the cheapest that was proven: c7i.large, sessions 1. ")
    three = found.candidate(THREE).letter
    assert f"; 25 % less is what 1 × A + 1 × {three} may cost, at rates that are not all proven; " in found.answer
    assert "is the chance that none alone costs less than A" in found.answer
    assert found.hoped_fleet == hoped


def test_a_mix_that_costs_no_less_than_the_fleet_is_not_named() -> None:
    # What held of ONE makes a cheaper fleet than the proven rate of TWO, which the hoped one was to undercut.
    seen = {ONE: [run(ONE, 400, "undecided")], TWO: [run(TWO, 100)]}
    for price, named in ((9.0, False), (1.95, False), (1.9, True)):
        hoped = Fleet({THREE: 9}, price * USD, 1440.0, 500.0, 0.7, {THREE: 1.0})
        found = told(seen, ONE, TWO, spec=example_spec(target_rps=500), hoped=hoped)
        assert found.fleet is not None
        assert found.fleet.usd_per_hour == 2 * USD
        assert (found.hoped_fleet is not None, " less is what 9 " in found.answer) == (named, named)


def test_nothing_is_proven_of_a_fleet_while_too_little_of_it_is() -> None:
    few = {**example_spec_document(), "max_count": 2}
    found = told({ONE: [run(ONE, 400)]}, ONE, spec=example_spec(target_rps=900, candidates=[few]), needed_seconds=70.0)
    assert (found.fleet, found.winner, found.state, found.proven, found.exit_code) == (None, ONE, "not proven", False, 1)
    assert found.needed == "needs about 2 more minutes"
    carried = "as many instances as can be had carry 560/s of 900/s, loaded to 70 % of what is proven of each"
    assert found.notes[-1] == carried
    assert "400/s kept p99 under 50 ms, proven at 95 % confidence" in found.answer


def test_there_is_no_winner_where_no_fleet_can_carry_the_target_rate() -> None:
    two = {**example_spec_document(), "max_count": 2}
    spec = example_spec(target_rps=5000, candidates=[two])
    found = told(BRACKETS, ONE, TWO, spec=spec, predicted={THREE: 0.0, FOUR: 0.0})
    assert (found.state, found.winner, found.runner_up, found.fleet, found.exit_code) == ("no candidate", None, None, None, 1)
    assert found.answer == (
        "NO CANDIDATE: as many instances as can be had carry 560/s of 5,000/s, loaded to 70 % of what is proven of each: "
        "raise `max_count`, or ask for less."
    )
    assert found.configuration == {}
    assert [(candidate.status, candidate.max_rps) for candidate in found.candidates[:2]] == [
        ("finalist", 400),
        ("finalist", 300),
    ]
    counts = [each.EndpointConfiguration.InitialInstanceCount for each in found.InferenceRecommendations]
    assert counts == [2, 2]
    seen = {**BRACKETS, THREE: [run(THREE, 100, "fail", MISSED)]}
    found = told(seen, ONE, TWO, spec=spec, predicted={FOUR: 0.0}, lacking=(("that is too short for ", Name(THREE)),))
    assert found.state == "no candidate"
    assert found.candidate(THREE).status == "rejected"  # a lower rate cannot change the answer
    assert found.notes[-1].endswith(f": that is too short for {found.candidate(THREE).letter}")


def test_a_runner_up_of_which_too_few_can_be_had_is_said_to_be_one() -> None:
    few, plenty = ({**example_spec_document(), "instances": [kind]} for kind in ("c7i.large", "c8g.large"))
    spec = example_spec(target_rps=900, candidates=[{**few, "max_count": 1}, plenty])
    found = told({ONE: [run(ONE, 400)], THREE: [run(THREE, 260)]}, THREE, ONE, spec=spec)
    assert (found.state, found.margin, found.flip_usd_per_hour) == ("proven", None, None)
    assert "; too few can be had of B, the runner-up, to carry 900/s alone; " in found.answer


def test_aws_is_told_how_many_instances_carry_the_target_rate() -> None:
    spec = example_spec(target_rps=900)
    counts = {
        each.RecommendationId: each.EndpointConfiguration.InitialInstanceCount
        for each in told(PROVEN, ONE, TWO, spec=spec).InferenceRecommendations
    }
    assert counts == {ONE: 4, TWO: 5}  # of 0.7 of 400/s, and of 300/s
    assert told(PROVEN, ONE, TWO).InferenceRecommendations[1].EndpointConfiguration.InitialInstanceCount == 1


def example_spec_document() -> dict[str, Any]:
    backend = {"kind": "synthetic", "fixed_ms": 4, "row_ms": 1}
    return {"instances": ["c7i.large", "c8g.large"], "backend": backend, "settings": {"sessions": [1, 2]}}


# In AWS's words.


def test_awss_figures_are_of_the_last_run_at_the_claimed_rate_cheapest_first() -> None:
    known = {"queue_ms": 3.0, "compute_ms": 4.0, "cpu_percent": 71.0, "memory_percent": 12.0}
    runs = {TWO: [run(TWO, 300, mean_ms=1.0), run(TWO, 300, **known)], ONE: [run(ONE, 400, queue_ms=3.0, mean_ms=9.0)]}
    first, second = told(runs, ONE, TWO).InferenceRecommendations
    assert (first.RecommendationId, second.RecommendationId) == (ONE, TWO)
    assert first.Metrics.ModelLatency == 9  # its compute time is not known
    assert (first.Metrics.CpuUtilization, first.Metrics.MemoryUtilization) == (None, None)
    metrics = second.Metrics
    assert (metrics.ModelLatency, metrics.CpuUtilization, metrics.MemoryUtilization) == (7, 71, 12)
    assert (metrics.CostPerHour, metrics.MaxInvocations) == (USD, 18_000)
    assert metrics.CostPerInference == pytest.approx(USD / 18_000 / 60)
    assert second.EndpointConfiguration.InstanceType == "ml.c7i.large"
    assert second.EndpointConfiguration.InitialInstanceCount == 1
    assert [(p.Key, p.ValueType, p.Value) for p in second.ModelConfiguration.EnvironmentParameters] == [
        ("sessions", "String", "2")
    ]


def test_awss_figures_need_neither_an_instance_type_nor_a_place_in_the_fleet() -> None:
    own = {"backend": {"kind": "synthetic"}, "usd_per_hour": 0.03, "price_source": "electricity"}
    spec = example_spec(candidates=[own], target_rps=100)
    (name,) = (candidate.name for candidate in spec.candidates)
    (found,) = told({name: [run(name, 400)]}, name, spec=spec).InferenceRecommendations
    assert found.EndpointConfiguration.InstanceType == ""
    both = told(PROVEN, ONE, TWO, spec=example_spec(target_rps=100))
    assert [entry.EndpointConfiguration.InitialInstanceCount for entry in both.InferenceRecommendations] == [1, 1]


# The fronts.


def test_less_load_is_quicker_and_dearer_as_far_as_the_slo_held() -> None:
    runs = {
        ONE: [run(ONE, 100, p99_ms=5.0), run(ONE, 400, p99_ms=20.0), run(ONE, 420, "fail", MISSED, p99_ms=90.0)],
        TWO: [run(TWO, 200, p99_ms=30.0), run(TWO, 450, "undecided", share=0.9, p99_ms=1.0)],
    }
    front = told(runs, ONE, TWO).pareto_p99
    assert sorted((point.candidate, point.offered_rps) for point in front) == [(ONE, 100), (ONE, 400)]


def test_cheaper_and_closer_to_the_reference_is_a_front_of_its_own() -> None:
    agreed = {ONE: Agreed(ONE, 0.99, 300, "cosine"), TWO: Agreed(TWO, 1.0, 300, "cosine"), THREE: Agreed(THREE, failure="died")}
    runs = {**PROVEN, THREE: [run(THREE, 390)]}
    found = told(runs, ONE, TWO, agreed=agreed, reference=TWO)
    assert sorted((point.candidate, point.offered_rps) for point in found.pareto_agreement) == [(ONE, 400), (TWO, 300)]
    assert told(PROVEN, ONE, TWO).pareto_agreement == ()


# Agreement.


def test_a_winner_below_the_default_is_told_with_its_loss() -> None:
    def loss(agreed: Agreed | None) -> list[str]:
        found = told(PROVEN, ONE, TWO, agreed={ONE: agreed} if agreed else {}, reference=TWO)
        return [line for line in found.warnings if line.startswith("the winner's answers")]

    assert loss(Agreed(ONE, 0.9989, 300, "cosine")) == [
        "the winner's answers agree only 0.9989 with those of B; the spec allows it"
    ]
    assert loss(Agreed(ONE, 0.999, 300, "cosine")) == []
    assert loss(None) == []
    assert loss(Agreed(ONE, failure="died")) == ["the winner's answers could not be judged: died; the spec allows it"]


def test_an_agreement_is_reported_with_whom_it_was_measured_on() -> None:
    agreed = {ONE: Agreed(TWO, 0.9, 321, "top-1")}
    found = told(PROVEN, ONE, TWO, agreed=agreed, reference=FOUR).candidate(ONE).agreement
    assert found is not None
    assert (found.value, found.inputs, found.statistic, found.reference, found.measured_on) == (0.9, 321, "top-1", FOUR, TWO)
    assert (found.met, found.failure) == (True, "")


# The document.


def test_the_document_says_what_was_asked_and_spent() -> None:
    found = told(PROVEN, ONE, TWO, spec=example_spec(target_rps=900))
    assert (found.created_at, found.source, found.model) == ("2026-08-01T12:00:00+00:00", "example.yaml", "adder")
    assert (found.slo, found.limit_ms, found.required_share) == ("p99<50ms", 50, 0.99)
    assert (found.target_rps, found.headroom, found.launcher, found.machine) == (900, 0.7, "local", "a machine")
    assert (found.seconds_spent, found.seconds_budget, found.usd_spent) == (60, 1800, 0)
    assert told(PROVEN, ONE, TWO, paid=True).usd_spent == 0.5
    assert found.configuration == usual_spec().candidates[0].document


def test_a_document_of_another_schema_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "old.json"
    path.write_text(to_json(replace(told(PROVEN, ONE, TWO), schema="loadtest.recommendation/0")))
    with pytest.raises(
        UsageError, match=r"old\.json: schema 'loadtest\.recommendation/0', expected 'loadtest\.recommendation/1'"
    ):
        read(path)
    with pytest.raises(UsageError, match=r"none\.json: is no result of `loadtest recommend`"):
        read(tmp_path / "none.json")
