"""Accuracy is an objective of the search: who does not agree with the reference is not measured any further."""

import dataclasses

import pytest

from loadtest.search.events import (
    EXPECTED,
    UNREACHED,
    Agree,
    Agreed,
    Entrant,
    Event,
    Experiment,
    Load,
    Predict,
    Profile,
    Question,
    Volley,
)
from loadtest.search.standing import SearchOutcome, agreement_text
from loadtest.search.strategy import search
from tests.loadtest.simulated_lab import SimulatedLab, Truth
from tests.loadtest.test_search_answers import resumed

FP32 = Entrant("fp32", "fp32", 0.1, 1, 8, "fp32")
WIDE = Entrant("fp32 wide", "fp32", 0.1, 2, 8, "fp32")
INT8 = Entrant("int8", "int8", 0.1, 1, 8, "int8")
BF16 = Entrant("bf16", "bf16", 0.1, 1, 8, "bf16")
TRUTHS = {
    "fp32": Truth(100),
    "fp32 wide": Truth(110),
    "int8": Truth(200, agreement=0.94),
    "bf16": Truth(120, agreement=0.99998),
}
QUESTION = Question(
    (FP32, WIDE, INT8, BF16),
    required=0.99,
    limit_ms=50,
    seconds=1800,
    min_agreement=0.999,
    reference="fp32",
    stand_ins=("bf16",),
)


def searched(question: Question = QUESTION, **truths: Truth) -> tuple[SearchOutcome, SimulatedLab]:
    lab = SimulatedLab(question, TRUTHS | truths)
    return lab.run(), lab


def out_of(outcome: SearchOutcome) -> dict[str, str]:
    return {standing.entrant.name: standing.out for standing in outcome.standings}


def touched(lab: SimulatedLab, kind: type) -> set[str]:
    return {experiment.entrant for experiment in lab.experiments if isinstance(experiment, kind)}


def test_a_candidate_twice_as_fast_that_agrees_at_094_does_not_win() -> None:
    outcome, lab = searched()
    assert outcome.winner == "bf16"
    assert out_of(outcome)["int8"] == "agrees 0.94 with the reference, 0.999 is asked"
    assert "int8" not in touched(lab, Profile) | touched(lab, Load)


@pytest.mark.parametrize("allowed", [0.9, None])
def test_it_wins_where_the_user_allows_it(allowed: float | None) -> None:
    outcome, _ = searched(dataclasses.replace(QUESTION, min_agreement=allowed))
    assert outcome.winner == "int8"
    agreed = {standing.entrant.name: standing.agreement for standing in outcome.standings}["int8"]
    assert agreed is not None
    assert agreed.agreement == 0.94


def test_each_numerics_is_compared_once_and_before_any_profile() -> None:
    outcome, lab = searched()
    asked = [experiment for experiment in lab.experiments if isinstance(experiment, Agree)]
    assert [experiment.entrant for experiment in asked] == ["fp32", "int8", "bf16"]
    assert lab.experiments[: len(asked)] == asked
    standings = {standing.entrant.name: standing for standing in outcome.standings}
    assert standings["fp32 wide"].agreement is standings["fp32"].agreement


def test_comparing_takes_half_of_a_short_budget_at_most() -> None:
    many = tuple(Entrant(f"e{number}", f"e{number}", 0.1, 1, 8, f"n{number}") for number in range(20))
    question = dataclasses.replace(QUESTION, entrants=many, reference="e0", stand_ins=(), seconds=100)
    lab = SimulatedLab(question, {entrant.name: Truth(5000) for entrant in many})
    outcome = lab.run()
    asked = touched(lab, Agree)
    assert asked == {f"e{number}" for number in range(8)}  # 7 s each
    assert out_of(outcome)["e8"] == "was not compared: the budget did not reach it"
    assert touched(lab, Profile)
    assert touched(lab, Profile) <= asked


def test_money_is_not_spent_on_comparing_beyond_the_limit() -> None:
    _, lab = searched(dataclasses.replace(QUESTION, max_usd=0.1 * 10 / 3600))
    assert len(touched(lab, Agree)) == 1  # 7 s, and 4 more are too many


def test_nothing_is_compared_without_a_reference() -> None:
    outcome, lab = searched(dataclasses.replace(QUESTION, reference=""))
    assert not touched(lab, Agree)
    assert outcome.winner == "int8"


def test_another_of_full_precision_stands_in_for_a_reference_that_fails() -> None:
    failing = Truth(100, failure="did not start: no such file")
    outcome, lab = searched(**{"fp32": failing, "fp32 wide": failing})
    assert [(c.entrant, c.reference) for c in lab.experiments if isinstance(c, Agree)] == [
        ("fp32", "fp32"), ("fp32 wide", "fp32 wide"), ("bf16", "bf16"), ("int8", "bf16"),
    ]  # fmt: skip
    assert (outcome.winner, outcome.reference) == ("bf16", "bf16")
    assert ("the reference ", "fp32 wide", " did not start: no such file: ", "bf16", " stands in for it") in outcome.notes
    assert out_of(outcome)["fp32 wide"] == "did not start: no such file"


def test_who_computes_the_same_stands_in_first_for_a_reference_that_fails() -> None:
    question = dataclasses.replace(QUESTION, stand_ins=())  # as where the user names it
    outcome, _ = searched(question, fp32=Truth(100, failure="did not start: out of memory"))
    assert (outcome.winner, outcome.reference) == ("bf16", "fp32 wide")
    assert ("the reference ", "fp32", " did not start: out of memory: ", "fp32 wide", " stands in for it") in outcome.notes
    assert out_of(outcome)["fp32"] == "did not start: out of memory"


@pytest.mark.parametrize("older", [False, True], ids=["now", "in an old journal"])
def test_what_was_compared_with_a_stand_in_is_compared_anew_once_the_reference_answers(older: bool) -> None:
    dear = dataclasses.replace(FP32, usd_per_hour=100.0)
    question = dataclasses.replace(QUESTION, entrants=(dear, INT8, BF16), max_usd=0.1)
    lab = SimulatedLab(question, TRUTHS | {"bf16": Truth(120, agreement=0.94)})
    outcome = resumed(question, lab)
    assert (outcome.reference, len(touched(lab, Agree))) == ("bf16", 2)
    if older:
        lab.events = [dataclasses.replace(each, reference="") if isinstance(each, Agreed) else each for each in lab.events]
    lab.experiments.clear()
    outcome = resumed(dataclasses.replace(question, max_usd=50.0), lab)
    asked = [(each.entrant, each.reference) for each in lab.experiments if isinstance(each, Agree)]
    assert asked == [("fp32", "fp32"), ("int8", "fp32"), ("bf16", "fp32")]
    assert (outcome.reference, outcome.winner) == ("fp32", "fp32")
    # What was compared with it is known.
    lab.experiments.clear()
    resumed(dataclasses.replace(question, max_usd=60.0), lab)
    assert not touched(lab, Agree)


def test_nobody_is_said_to_stand_in_for_a_reference_who_was_not_compared_either() -> None:
    short = dataclasses.replace(QUESTION, seconds=3.0)
    outcome = resumed(short, SimulatedLab(short, TRUTHS))
    assert all(standing.unreached for standing in outcome.standings)
    assert outcome.notes == ()
    dear = dataclasses.replace(FP32, usd_per_hour=100.0)
    outcome, _ = searched(dataclasses.replace(QUESTION, entrants=(dear, INT8, BF16), max_usd=0.01))
    assert outcome.reference == "bf16"
    (note,) = outcome.notes
    assert "".join(note) == "the reference fp32 was not compared: the budget did not reach it: bf16 stands in for it"


def test_without_a_reference_that_answers_nobody_wins_silently() -> None:
    question = dataclasses.replace(QUESTION, entrants=(FP32, INT8, BF16), stand_ins=())
    outcome, lab = searched(question, fp32=Truth(100, failure="did not start: no such file"))
    assert outcome.winner is None
    assert out_of(outcome)["bf16"] == "cannot be compared: the reference did not start: no such file"
    assert not touched(lab, Load)


def test_outputs_of_another_shape_are_no_agreement() -> None:
    wide = dataclasses.replace(INT8, name="int8 wide", sessions=2)
    question = dataclasses.replace(QUESTION, entrants=(*QUESTION.entrants, wide))
    outcome, lab = searched(question, **{"int8": Truth(200), "int8 wide": Truth(300, agreement=None)})
    assert outcome.winner == "bf16"
    assert "int8" not in touched(lab, Agree)  # it computes the same
    told = "cannot be compared: its output y is FP32 [1, 3], the reference's FP32 [1, 4]"
    assert (out_of(outcome)["int8 wide"], out_of(outcome)["int8"]) == (told, told)


def widths(entrant: Entrant, *sessions: int) -> tuple[Entrant, ...]:
    """The same with so many sessions, and each with two batch caps, as 8x32."""
    return tuple(
        dataclasses.replace(entrant, name=f"{entrant.name} {most}x{rows}", sessions=most, max_rows=rows)
        for most in sessions
        for rows in (8, 32)
    )


def before_loads(question: Question, lab: SimulatedLab) -> list[tuple[str, str]]:
    """What is asked until everything is predicted: of whom, and what."""
    steps = search(question)
    asked, found = next(steps), []
    while not isinstance(asked, Predict):
        experiments = asked.experiments if isinstance(asked, Volley) else (asked,)
        found += [(each.entrant, type(each).__name__) for each in experiments]
        answers = tuple(lab.answer(each) for each in experiments)
        asked = steps.send(answers if isinstance(asked, Volley) else answers[0])
    return found


@pytest.mark.parametrize("parallel", [1, 2])
def test_where_one_did_not_start_to_be_compared_the_narrowest_is_when_all_others_were(parallel: int) -> None:
    question = dataclasses.replace(QUESTION, entrants=(FP32, INT8, *widths(BF16, 1, 2, 4)), stand_ins=(), parallel=parallel)
    failing = {f"bf16 {wide}": Truth(200, failure="did not start: out of memory") for wide in ("4x8", "4x32")}
    lab = SimulatedLab(question, TRUTHS | {each.name: Truth(120) for each in question.entrants[2:]} | failing)
    asked = before_loads(question, lab)
    assert asked == [
        ("fp32", "Agree"), ("int8", "Agree"), ("bf16 4x32", "Agree"), ("fp32", "Profile"), ("bf16 1x8", "Agree"),
        *((f"bf16 {wide}", "Profile") for wide in ("4x8", "1x8", "2x8", "2x32")),
    ]  # fmt: skip
    out = out_of(resumed(dataclasses.replace(question, parallel=1), lab))
    assert out["bf16 4x8"] == out["bf16 4x32"] == "did not start: out of memory"


@pytest.mark.parametrize(
    ("reference", "min_agreement", "expected"),
    [
        ("fp32", 0.999, ["fp32 Agree", "bf16 4x32 Agree", "fp32 Profile", "bf16 1x8 Agree"]),
        ("fp32", None, ["fp32 Agree", "bf16 4x32 Agree", "fp32 Profile", "bf16 1x8 Profile"]),
        ("bf16 4x8", 0.999, ["bf16 4x8 Agree", "bf16 1x8 Agree", "fp32 Agree", "fp32 Profile"]),
        ("bf16 1x8", None, ["bf16 1x8 Agree", "bf16 1x32 Agree", "fp32 Agree", "fp32 Profile"]),
        ("", None, ["fp32 Profile", "bf16 4x32 Profile", "bf16 1x8 Profile"]),
    ],
)
def test_who_starts_with_none_of_its_settings_costs_two_starts(
    reference: str, min_agreement: float | None, expected: list[str]
) -> None:
    question = dataclasses.replace(
        QUESTION,
        entrants=(FP32, *widths(BF16, 1, 2, 4)),
        reference=reference,
        stand_ins=("fp32",) if reference.startswith("bf16") else (),
        min_agreement=min_agreement,
    )
    failure = "did not start: no module named foo"
    lab = SimulatedLab(question, TRUTHS | {each.name: Truth(1, failure=failure) for each in question.entrants[1:]})
    assert [" ".join(each) for each in before_loads(question, lab)] == expected
    outcome = lab.run()
    assert outcome.winner == "fp32"
    assert touched(lab, Load) == {"fp32"}
    broken = outcome.standings[1:]
    assert {standing.out for standing in broken} == {failure}
    assert sum(not standing.untried for standing in broken) == 2
    assert broken[2].untried == ("bf16 1x32" if reference == "bf16 1x8" else "bf16 1x8")


class Failing(SimulatedLab):
    """Of bf16, those do not start, for their reasons, that are named. Nothing is compared."""

    def __init__(self, failures: dict[str, str], *entrants: Entrant) -> None:
        question = dataclasses.replace(QUESTION, entrants=(*entrants, FP32), reference="", stand_ins=())
        names = (entrant.name for entrant in question.entrants)
        super().__init__(question, {name: Truth(120, failure=failures.get(name.split()[-1], "")) for name in names})

    def profiled(self) -> list[str]:
        return [who.removeprefix("bf16 ") for who, _ in before_loads(self._question, self) if who != "fp32"]


NO_MEMORY = "did not start: out of memory"


def test_where_memory_is_too_little_for_many_rows_those_of_fewer_are_tried_with_as_many_sessions() -> None:
    failures = {f"{most}x32": NO_MEMORY for most in (2, 4)}
    assert Failing(failures, *widths(BF16, 1, 2, 4)).profiled() == ["4x32", "1x8", "4x8", "2x32", "1x32"]


def test_as_many_servers_as_there_are_settings_of_both_kinds_fail_at_most() -> None:
    grid = [dataclasses.replace(BF16, name=f"bf16 {k}x{m}", sessions=k, max_rows=m) for k in (1, 2, 4, 8) for m in (8, 32, 128)]
    failures = {f"{k}x{m}": f"{NO_MEMORY}: {k * m} MB" for k in (2, 4, 8) for m in (8, 32, 128)}
    assert Failing(failures, *grid).profiled() == ["8x128", "1x8", "8x8", "4x8", "2x8", "1x32", "1x128"]


@pytest.mark.parametrize(
    ("narrowest", "profiled"),
    [
        ("did not start: port taken", ["8x8", "1x8", "2x8", "4x8"]),  # by chance, as the next shows
        (f"{NO_MEMORY}: 17 MB", ["8x8", "1x8"]),  # as the widest
    ],
)
def test_that_the_narrowest_fails_as_the_widest_did_decides_for_those_between(narrowest: str, profiled: list[str]) -> None:
    lab = Failing({"8x8": f"{NO_MEMORY}: 812 MB", "1x8": narrowest}, *widths(BF16, 1, 2, 4, 8)[::2])
    assert lab.profiled() == profiled


def test_what_fails_each_time_otherwise_costs_three_starts() -> None:
    failures = {f"{most}x8": f"did not start: {'?' * most}" for most in (1, 2, 4, 8)}
    assert Failing(failures, *widths(BF16, 1, 2, 4, 8)[::2]).profiled() == ["8x8", "1x8", "2x8"]


@pytest.mark.parametrize("reference", ["fp32", "bf16 2x32", ""])
def test_where_there_is_none_of_fewer_sessions_another_of_as_many_is_tried(reference: str) -> None:
    question = dataclasses.replace(QUESTION, entrants=(FP32, *widths(BF16, 2)[::-1]), reference=reference, stand_ins=("fp32",))
    truths = {"bf16 2x32": Truth(1, failure="did not start: out of memory"), "bf16 2x8": Truth(120)}
    lab = SimulatedLab(question, TRUTHS | truths)
    assert lab.run().winner == "bf16 2x8"


def test_where_any_answers_are_allowed_who_was_not_compared_is_told_by_whom() -> None:
    question = dataclasses.replace(QUESTION, entrants=(FP32, *widths(BF16, 1, 2)), stand_ins=(), min_agreement=None)
    failing = {f"bf16 {wide}": Truth(200, failure="did not start: out of memory") for wide in ("2x8", "2x32")}
    outcome = SimulatedLab(question, TRUTHS | {"bf16 1x8": Truth(120), "bf16 1x32": Truth(90)} | failing).run()
    assert outcome.winner == "bf16 1x8"
    agreed = {each.entrant.name: each.agreement for each in outcome.standings}["bf16 1x8"]
    assert agreed is not None
    assert agreed.failure == "another that computes the same did not start: out of memory"


def test_on_another_instance_type_as_many_sessions_are_tried() -> None:
    small, large = (dataclasses.replace(BF16, name=f"bf16 {name}", group=name, sessions=2) for name in ("small", "large"))
    question = dataclasses.replace(QUESTION, entrants=(FP32, small, large), stand_ins=())
    lab = SimulatedLab(question, TRUTHS | {"bf16 small": Truth(1, failure="did not start"), "bf16 large": Truth(120)})
    assert lab.run().winner == "bf16 large"


def test_a_reference_that_the_budget_did_not_reach_leaves_the_question_open() -> None:
    question = dataclasses.replace(QUESTION, entrants=(BF16, FP32), reference="bf16", stand_ins=("fp32",), seconds=30)
    outcome = SimulatedLab(question, TRUTHS | {"bf16": Truth(1, failure="did not start: no such file")}, start_s=27.0).run()
    assert outcome.notes == (("the reference ", "bf16", " did not start: no such file: ", "fp32", " stands in for it"),)
    assert outcome.standings[1].unreached
    assert outcome.needed_seconds is not None


@pytest.mark.parametrize("fails", [1, 2])
def test_that_a_reference_fails_once_where_a_search_goes_on_puts_nobody_out(fails: int) -> None:
    """B was asked, but the reference's server, whose answers are to be had anew, failed."""
    question = dataclasses.replace(QUESTION, entrants=(FP32, BF16), stand_ins=())
    lost = Agreed("bf16", failure="cannot be compared: the reference did not start: port taken", seconds=5, reference="fp32")
    known: list[Event] = [Agreed("fp32", 1.0, 400, "cosine", 5, reference="fp32")]
    again = Agree("bf16", "fp32", 60.0)
    assert next(search(question, [*known, lost])) == again
    lab, steps = SimulatedLab(question, TRUTHS), search(question, known)
    assert next(steps) == again
    profile = steps.send(lost)
    assert isinstance(profile, Profile)
    assert steps.send(lab.answer(profile)) == again
    following = steps.send(lab.answer(again) if fails == 1 else lost)
    assert isinstance(following, Profile if fails == 1 else Predict)


@pytest.mark.parametrize(
    "failure",
    [
        "answered only 5 of 400 requests in the time there was, 300 are needed",  # as older journals have it
        f"answered only 240 of 400 requests in 60 s, 300 are needed: answered 503: busy: {UNREACHED}",
    ],
)
def test_what_time_cut_short_is_compared_again(failure: str) -> None:
    question = dataclasses.replace(QUESTION, entrants=(FP32, BF16), stand_ins=())
    known = [Agreed("fp32", 1.0, 400, "cosine", 5, reference="fp32"), Agreed("bf16", failure=failure, reference="fp32")]
    assert next(search(question, known)) == Agree("bf16", "fp32", 60.0)


class Hasty(SimulatedLab):
    """It takes bf16 90 s to answer as many requests as a comparison takes."""

    def answer(self, experiment: Experiment) -> Event:
        event = super().answer(experiment)
        if not isinstance(event, Agreed) or not isinstance(experiment, Agree) or event.entrant != "bf16":
            return event
        if experiment.seconds >= 90:
            return dataclasses.replace(event, seconds=90.0)
        failure = f"answered only 87 of 400 requests in the time there was, 300 are needed: {UNREACHED}"
        seconds = 5 + experiment.seconds
        return dataclasses.replace(event, agreement=None, failure=failure, seconds=seconds, short_s=experiment.seconds)


def test_a_comparison_that_was_too_short_is_no_evidence_and_lasts_longer_next_time() -> None:
    question = dataclasses.replace(QUESTION, entrants=(FP32, dataclasses.replace(BF16, usd_per_hour=0.01)), stand_ins=())
    lab = Hasty(question, TRUTHS)
    outcome = resumed(dataclasses.replace(question, seconds=300), lab)  # a fifth of it is no longer
    assert outcome.winner == "fp32"
    assert outcome.standings[1].unreached
    short_s = lab.experiments[1].seconds  # type: ignore[union-attr]  # a comparison
    assert "".join(*outcome.lacking) == f"{short_s:.0f} s were too short for a comparison of the answers of bf16"
    assert resumed(dataclasses.replace(question, seconds=300), lab).lacking == outcome.lacking
    outcome = resumed(dataclasses.replace(question, seconds=2 * question.seconds), lab)
    assert [each.seconds for each in lab.experiments if isinstance(each, Agree)] == [60.0, short_s, 2 * short_s]
    assert (outcome.winner, outcome.lacking) == ("bf16", ())


def test_a_comparison_that_was_too_short_is_asked_again_when_all_others_were() -> None:
    question = dataclasses.replace(QUESTION, entrants=(FP32, dataclasses.replace(BF16, usd_per_hour=0.01)), stand_ins=())
    lab = Hasty(question, TRUTHS)
    assert [who for who, what in before_loads(question, lab) if what == "Agree"] == ["fp32", "bf16", "bf16"]
    outcome = lab.run()
    assert (outcome.winner, outcome.lacking) == ("bf16", ())


def test_a_comparison_that_was_too_short_is_told_what_it_takes() -> None:
    question = dataclasses.replace(QUESTION, entrants=(FP32, BF16), seconds=200, stand_ins=())
    lab = Hasty(question, TRUTHS | {"fp32": Truth(0)})
    for _ in range(2):
        outcome = resumed(question, lab)
        assert outcome.winner is None
        assert outcome.needed_seconds is not None
        question = dataclasses.replace(question, seconds=outcome.seconds + outcome.needed_seconds)
    assert resumed(question, lab).winner == "bf16"


def test_a_comparison_that_was_too_short_keeps_nobody_out_where_any_answers_are_allowed() -> None:
    question = dataclasses.replace(QUESTION, entrants=(FP32, BF16), stand_ins=(), min_agreement=None)
    outcome = Hasty(question, TRUTHS).run()
    assert (outcome.winner, outcome.lacking) == ("bf16", ())


def test_expected_answers_need_no_reference_among_the_candidates() -> None:
    question = dataclasses.replace(QUESTION, reference=EXPECTED, stand_ins=())
    outcome, lab = searched(question, bf16=Truth(120, agreement=0.5))
    assert out_of(outcome)["bf16"].startswith("agrees 0.5 with the reference")
    assert {experiment.reference for experiment in lab.experiments if isinstance(experiment, Agree)} == {EXPECTED}


@pytest.mark.parametrize(
    ("agreement", "text"),
    [
        (0.93999999, "0.94"), (0.949, "0.949"), (0.9989999, "0.9989"), (0.99998, "0.99998"), (0.999982, "0.999982"),
        (1.0, "1"), (1 - 1e-9, "0.999999"), (1 - 1e-15, "1"), (0.0, "0"), (-0.2, "-0.2"),
    ],
)  # fmt: skip
def test_an_agreement_is_told_as_far_from_1_as_it_is(agreement: float, text: str) -> None:
    assert agreement_text(agreement) == text
