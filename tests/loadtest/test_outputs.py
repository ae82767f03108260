"""Every output tells the same answer, in words and figures that need no other to be understood."""

import csv
import io
import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from xml.etree import ElementTree

import pytest

from loadtest.errors import ExitCode
from loadtest.lab.recommender import question_of
from loadtest.reports import forms, recommendation, tables
from loadtest.reports.conclusion import ended_early
from loadtest.reports.headline import Fact, facts, headline, needed, question
from loadtest.reports.recommendation import Recommendation, to_json
from loadtest.reports.states import SIGNALS
from loadtest.search.standing import Name, SearchOutcome
from tests.loadtest.examples import EXAMPLES, altered, example_outcome, example_spec, incomparable, told
from tests.loadtest.simulated_lab import Truth

pytestmark = pytest.mark.slow  # whole searches are simulated

STATES = {
    "proven": "proven",
    "not proven": "not proven",
    "nobody": "no candidate",
    "invalid": "invalid",
    "incomparable": "invalid",
    "inaccurate": "proven",
    "tie": "proven",
    "one": "proven",
    "twelve": "proven",
}
EXIT_CODES = {"proven": 0, "not proven": 1, "no candidate": 1, "invalid": 3}


@cache
def example(name: str) -> Recommendation:
    return EXAMPLES[name]()


@cache
def rendered(name: str, form: str) -> str:
    return forms.render(example(name), form)


@pytest.fixture(params=sorted(EXAMPLES))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_each_state_has_one_signal_and_one_exit_code(name: str) -> None:
    found = example(name)
    assert found.state == STATES[name]
    assert found.exit_code == EXIT_CODES[found.state]
    assert found.proven == (found.state == "proven")


def test_every_output_says_the_state_in_the_same_words(name: str) -> None:
    found = example(name)
    said = SIGNALS[found.state].word
    outputs = [rendered(name, form) for form in ("text", "md", "html")]
    suite = ElementTree.fromstring(rendered(name, "junit"))
    outputs += [found.answer, " ".join(text for case in suite.findall("testcase")[:1] for text in words(case))]
    if found.configuration:
        outputs.append(forms.configuration(found))
    others = {signal.word for signal in SIGNALS.values()} - {said}
    for output in outputs:
        assert said in output
        rest = output.replace(said, "")
        assert not any(re.search(rf"\b{other}\b", rest) for other in others - {"INVALID"})  # INVALID: also of a single run
    assert {row["state"] for row in csv.DictReader(io.StringIO(rendered(name, "csv")))} == {found.state}


def words(case: ElementTree.Element) -> Iterator[str]:
    for child in case:
        yield (child.text or "") + child.get("message", "")


def test_every_output_has_the_question_for_its_title(name: str) -> None:
    asked = question(example(name))
    assert rendered(name, "text").startswith(asked)
    assert rendered(name, "md").startswith(f"### {asked}\n")
    assert f"<title>{asked}</title>" in rendered(name, "html")
    assert f"<h1>{asked}</h1>" in rendered(name, "html")


def test_every_output_tells_the_same_figures(name: str) -> None:
    found = example(name)
    page = rendered(name, "html")
    text = " ".join(rendered(name, "text").split())
    for fact in facts(found):
        assert f"<dt>{fact.value}</dt><dd>{fact.label}</dd>" in page
        assert f"{fact.value} {fact.label}" in text
        assert f"- **{fact.value}** {fact.label}" in rendered(name, "md")
        assert f"{fact.value} {fact.label}" in found.answer


def test_every_figure_of_the_headline_agrees_with_the_document(name: str) -> None:
    found = example(name)
    document = json.loads(to_json(found))
    for fact in facts(found):
        wanted = looked_up(document, fact)
        if wanted is None:
            continue
        (number,) = re.findall(r"[\d.]+", fact.value.replace(",", ""))
        figures = 2 if fact.key in ("margin", "probability_cheapest") else 3
        assert float(number) == pytest.approx(wanted, rel=0.51 * 10 ** (1 - figures)), fact


def looked_up(document: dict[str, object], fact: Fact) -> float | None:
    """What the document has for a fact; None where the fact is no number of it."""
    name = fact.candidate or document["winner"]
    winner = next((c for c in document["candidates"] if c["name"] == name), {})  # type: ignore[attr-defined]
    if fact.key == "claimed_rps":
        return winner["max_rps"] or winner["held_rps"]
    if fact.key == "usd_per_hour":
        return winner["price"]["usd_per_hour"]
    if fact.key == "alone":
        least = math.ceil(document["target_rps"] / winner["max_rps"] / document["headroom"])  # type: ignore[operator]
        return least * winner["price"]["usd_per_hour"] * 730
    if fact.key == "usd_per_month":
        return document["fleet"]["usd_per_hour"] * 730  # type: ignore[index]
    if fact.key.startswith("floor."):
        return document["floor"][fact.key.removeprefix("floor.")]  # type: ignore[index]
    if fact.key == "margin":
        return 100 * document["margin"] if document["margin_resolved"] else None  # type: ignore[operator]
    if fact.key == "probability_cheapest":
        return None if "over" in fact.value or "under" in fact.value else 100 * document["probability_cheapest"]  # type: ignore[operator]
    value = winner[fact.key] if fact.key in winner else document[fact.key]
    assert isinstance(value, float)
    return value


def test_one_cost_at_one_rate_is_given_for_the_winner(name: str) -> None:
    found = example(name)
    if found.winner_report is None:
        return
    by_key = {fact.key: fact for fact in facts(found)}
    winner = found.winner_report
    assert winner.cost_per_million_usd == pytest.approx(winner.price.usd_per_hour / winner.claimed_rps / 3600 * 1e6)
    if not found.mix:
        assert len([fact for fact in facts(found) if "per million" in fact.label]) == 1
        assert by_key["cost_per_million_usd"].label == "per million requests at that rate"
    if found.fleet is not None:
        rates = {c.name: c.claimed_rps for c in found.candidates}
        assert found.fleet.capacity_rps == pytest.approx(sum(rates[one] * n for one, n in found.fleet.counts.items()))


@pytest.mark.parametrize("form", ["text", "md", "html", "junit"])
def test_nothing_is_told_that_needs_to_be_deciphered(name: str, form: str) -> None:
    told = re.sub(r"<style>.*</style>|<svg.*?</svg>", "", rendered(name, form), flags=re.DOTALL)
    assert not re.search(r"\b(nan|inf|None|null)\b|e[+-]0\d|\(\)|\[\]|stale|0\.0 %|  %", told)
    chances = [fact.value for fact in facts(example(name)) if fact.key == "probability_cheapest"]
    assert not {"100 %", "0 %"} & set(chances)
    assert "--rate" not in told  # flags that `recommend` lacks
    assert "--processes" not in told
    assert "--duration" not in told


def test_text_without_a_terminal_is_at_most_100_columns_wide(name: str) -> None:
    assert max(map(len, rendered(name, "text").splitlines())) <= 100


def test_candidates_are_letters_in_order_of_rank_with_one_legend(name: str) -> None:
    found = example(name)
    assert [candidate.letter for candidate in found.candidates] == list("ABCDEFGHIJKL"[: len(found.candidates)])
    assert found.winner is None or found.candidates[0].name == found.winner
    text = rendered(name, "text")
    body = text.removeprefix(question(found)).replace(headline(found), "", 1)
    for candidate in found.candidates:
        assert len(re.findall(rf"^{candidate.letter}  ", body, flags=re.MULTILINE)) == 1
        if candidate.name != candidate.differs:
            assert candidate.name not in text


def test_the_evidence_comes_before_the_reservations(name: str) -> None:
    for form in ("text", "md", "html"):
        output = rendered(name, form)
        table = max(output.rfind("USD/h"), output.rfind(tables.APART))
        assert 0 < table < output.index("Keep in mind")


def test_no_column_is_empty(name: str) -> None:
    drawn = re.findall(r"<table>.*?</table>", rendered(name, "html"), flags=re.DOTALL)
    assert drawn
    for table in drawn:
        headings = re.findall(r"<th.*?>(.*?)</th>", table)
        rows = [re.findall(r"<td.*?>(.*?)</td>", row, flags=re.DOTALL) for row in table.split("<tr")[2:]]
        for place, heading in enumerate(headings):
            assert any(re.sub("<.*?>", "", row[place]).strip() for row in rows), heading


def test_a_caption_names_only_what_is_drawn(name: str) -> None:
    for card in re.findall(r"<figure.*?</figure>", rendered(name, "html"), flags=re.DOTALL):
        caption, drawing = card.split("</figcaption>")
        for word, mark in (
            ("band", 'class="band'),
            ("Ring", 'class="ring"'),
            ("Pareto", 'class="front"'),
            ("cliff between", 'class="region"'),
            ("dotted line", 'class="diagonal"'),
        ):
            assert (word in caption) == (mark in drawing), caption
        assert ("(not from 0)" in drawing) == ('class="break"' in drawing), caption
        assert drawing.count("<svg") == 1


def test_no_money_axis_hides_that_it_does_not_begin_at_zero(name: str) -> None:
    for card in re.findall(r"<figure.*?</figure>", rendered(name, "html"), flags=re.DOTALL):
        if ">USD per" in card:
            (label,) = re.findall(r">(USD per .*?)<", card)
            ticks = [float(tick) for tick in re.findall(r'class="tick-y".*?>([\d.]+)<', card)]
            assert min(ticks) == 0 or "log scale" in label or "not from 0" in label


def test_a_proof_that_lacks_time_says_first_what_it_would_take() -> None:
    found = example("not proven")
    assert (found.needed, found.command) == (
        "needs about 3 more minutes",
        "loadtest recommend example.yaml --resume --budget-minutes 3",
    )
    for form in ("text", "md", "html"):
        output = rendered("not proven", form)
        assert output.index("about 3 more minutes") < output.index("kept p99 under 50 ms")
    assert found.answer.startswith("NOT PROVEN YET: needs about 3 more minutes: loadtest recommend example.yaml --resume ")


def test_the_command_goes_where_the_results_went() -> None:
    _, command = needed(example("not proven"), 10.0, ("--out", "my results"))
    assert command == "loadtest recommend example.yaml --out 'my results' --resume --budget-minutes 1"


@pytest.mark.parametrize("form", ["text", "md", "html", "yaml"])
def test_the_command_is_one_line_however_long_it_is(form: str) -> None:
    command = f"loadtest recommend {'a/long/path/' * 20}spec.yaml --resume --budget-minutes 3"
    found = replace(example("not proven"), command=command)
    output = forms.configuration(found) if form == "yaml" else forms.render(found, form)
    lines = [re.sub("^# |<.*?>", "", line).strip() for line in output.splitlines()]
    assert lines.count(command) == 1


def test_a_rate_that_is_not_proven_is_never_told_as_if_it_were() -> None:
    (claimed,) = [fact for fact in facts(example("not proven")) if fact.key == "claimed_rps"]
    assert "not proven" in claimed.label
    assert re.search(r"\(\d+\)", rendered("not proven", "text"))


def test_two_that_cannot_be_told_apart_cost_the_same_within_what_was_measured() -> None:
    labels = {fact.key: f"{fact.value} {fact.label}" for fact in facts(example("tie"))}
    assert labels["margin"] == "the same is what B, the runner-up, costs, within what was measured"
    assert "flip_usd_per_hour" not in labels
    assert "A is as cheap as any, within what was measured" in example("tie").answer


def test_what_misses_the_agreement_is_listed_apart_with_its_figure() -> None:
    missed = example("inaccurate").candidates[-1]
    page = rendered("inaccurate", "html")
    apart = page[page.index("Not eligible") :]
    assert "0.942" in apart
    assert missed.differs in apart
    assert missed.differs not in page[: page.index("Not eligible")]
    assert "At least 0.999 is asked" in apart
    text = rendered("inaccurate", "text")
    assert text.index("Not eligible") < text.index(missed.differs) < text.index("0.942")


def test_cost_is_set_against_agreement_where_candidates_differ_in_it() -> None:
    assert "Cost against agreement" in rendered("inaccurate", "html")
    assert "Cost against agreement" not in rendered("proven", "html")


def test_the_intervals_of_the_p99_are_a_band() -> None:
    page = rendered("proven", "html")
    assert "The band is the 95 % interval of the p99." in page
    assert 'class="band' not in rendered("tie", "html")


def test_a_cliff_is_named_in_words_and_drawn() -> None:
    found = example("proven")
    jump = recommendation.Cliff(467.0, 489.0, 49.0, 210.0)
    cliffed = replace(found, candidates=(replace(found.candidates[0], cliff=jump), *found.candidates[1:]))
    named = "A has a cliff between 467/s and 489/s: p99 about 49.0 ms below it, 210 ms above"
    for form in ("text", "md", "html"):
        assert named in forms.render(cliffed, form)
    assert 'class="axis-span"' in forms.render(cliffed, "html")


def test_junit_fails_only_where_the_state_says_so(name: str) -> None:
    suite = ElementTree.fromstring(rendered(name, "junit"))
    signal = SIGNALS[example(name).state]
    whole, *candidates = suite.findall("testcase")
    assert [child.tag for child in whole] == [signal.junit or "system-out"]
    assert suite.get("failures") == str(int(signal.junit == "failure"))
    assert suite.get("errors") == str(int(signal.junit == "error"))
    assert suite.get("skipped") == str(len(suite.findall("testcase/skipped")))
    assert {whole.get("classname"), *(case.get("classname") for case in candidates)} == {"loadtest", "loadtest.candidates"}
    for case, candidate in zip(candidates, example(name).candidates, strict=True):
        compared = candidate.agreement is not None and candidate.agreement.value is not None and not candidate.agreement.met
        assert [child.tag for child in case] == ["system-out" if candidate.curve or compared else "skipped"], candidate.name


def decided(outcome: SearchOutcome, truths: dict[str, Truth] | None = None) -> Recommendation:
    return told(example_spec(), replace(outcome, winner=None, runner_up=None, verified=None, needed_seconds=None))


def test_nothing_is_concluded_of_the_slo_where_one_candidate_could_not_be_measured() -> None:
    outcome = example_outcome(example_spec())
    other = outcome.winner

    def run(measured: recommendation.Measured) -> recommendation.Measured:
        if measured.entrant == other:
            return replace(measured, valid=False, notes=("the machine was busy",))
        return replace(measured, verdict="fail", blocks=tuple((n, 0) for n, _ in measured.blocks))

    found = decided(altered(outcome, run))
    assert (found.state, found.exit_code) == ("invalid", ExitCode.INVALID)
    assert "the machine was busy" in forms.render(found, "html")
    assert "no candidate" not in found.answer.lower()
    assert "nothing to build a fleet of" not in forms.render(found, "text")


def test_a_search_that_leaves_some_of_its_budget_says_why() -> None:
    spec = example_spec()
    whole = example_outcome(spec)
    asked = question_of(spec, paid=False)

    def note(left_s: float, outcome: SearchOutcome = whole) -> list[str]:
        return ["".join(told) for told in ended_early(asked, replace(outcome, seconds=asked.seconds - left_s))]

    assert note(80) == []  # of 30 minutes
    assert note(100, whole) == [
        "the search ended 01:40 (minutes:seconds) before its budget: nothing was left to try that could change the answer"
    ]
    (short,) = note(
        100, replace(whole, lacking=(("that is too short for ", Name("one")), ("the rest of $1 does not pay for it",)))
    )
    assert short.endswith("before its budget: that is too short for one; the rest of $1 does not pay for it")
    busy = altered(whole, lambda run: replace(run, valid=False))
    assert "the last 3 runs of c7i.large synthetic (sessions 2)" in note(100, busy)[0]
    assert "were INVALID, and no other could change the answer" in note(100, busy)[0]
    for standing in whole.standings:
        standing.runs.clear()
        standing.predictions.clear()
    assert "no candidate was left that could be measured" in note(100)[0]


def test_a_busy_machine_is_said_to_be_busy() -> None:
    found = example("invalid")
    busy = tuple(replace(c, runs=tuple(replace(run, disturbed=True) for run in c.runs)) for c in found.candidates)
    assert "A, B could not be measured on this machine. Stop what else runs here" in headline(found)
    assert "other work on this machine disturbed what was measured of A, B. Stop what else runs here" in headline(
        replace(found, candidates=busy)
    )


def test_nothing_is_concluded_where_the_reference_did_not_answer() -> None:
    assert "no answers could be compared with the reference's: " in headline(example("incomparable"))
    assert headline(example("incomparable")).count("did not answer") == 1
    assert "Stop what else runs here" in headline(example("incomparable"))
    # A quieter machine does not help what was never up.
    assert headline(incomparable("did not start: no such image")).endswith("A did not start: no such image")


def test_a_candidate_that_was_never_tried_leaves_the_answer_open() -> None:
    outcome = example_outcome(example_spec())
    for standing in outcome.standings:
        standing.runs.clear()
    found = decided(outcome)
    assert (found.state, found.exit_code) == ("not proven", ExitCode.MISSED)
    assert found.answer.startswith("NOT PROVEN YET: ")


def test_a_floor_that_keeps_the_slo_contradicts_that_nobody_does() -> None:
    spec = example_spec()
    outcome = example_outcome(spec, {candidate.name: Truth(0) for candidate in spec.candidates})
    assert outcome.floor is not None
    assert decided(outcome).state == "no candidate"
    assert decided(replace(outcome, floor=replace(outcome.floor, verdict="pass"))).state == "not proven"
    assert decided(replace(outcome, floor=replace(outcome.floor, valid=False))).state == "invalid"


def test_a_doubtful_price_says_its_date_and_what_to_do() -> None:
    candidates = [
        {
            "instances": ["c7i.large"],
            "backend": {"kind": "synthetic"},
            "usd_per_hour": 0.05,
            "price_source": "a contract",
            "price_date": "2026-03-30",
        }
    ]
    spec = example_spec(candidates=candidates)
    found = told(spec, example_outcome(spec, {"c7i.large synthetic": Truth(480)}))
    text = " ".join(forms.render(found, "text").split())
    assert "$0.0500 an hour of A: your own price, price of 2026-03-30, 124 days old" in text
    assert "price of 2026-03-30, 124 days old (a contract): set `usd_per_hour` anew" in text
    ahead = example_spec(candidates=[candidates[0] | {"price_date": "2027-05-01"}])
    text = forms.render(told(ahead, example_outcome(ahead, {"c7i.large synthetic": Truth(480)})), "text")
    assert "price of 2027-05-01, in the future (a contract): set `price_date` to the day it is of" in " ".join(text.split())
    undated = example_spec(candidates=[{key: value for key, value in candidates[0].items() if key != "price_date"}])
    text = forms.render(told(undated, example_outcome(undated, {"c7i.large synthetic": Truth(480)})), "text")
    assert "price without a date (a contract): set `price_date` beside it, such as 2026-11-22" in " ".join(text.split())
