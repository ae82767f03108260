"""What other work on the machine did to a run: which requests it may have made late, and whether the verdict hangs on it."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from loadtest.load.request_log import GRPC, TIMEOUT
from loadtest.results import GeneratorReport, LoadSpec, MachineReport, SloSpec, Verdict
from loadtest.verdict import decision, stalls
from loadtest.verdict.blocks import LoggedRequests
from loadtest.verdict.stalls import Delays

_MUCH_TAKEN: Final = 0.05  # of the measured time: worth a warning also where the verdict does not hang on it
_NAMED: Final = 3  # of the others
_LATE: Final = (TIMEOUT, 503, 504, GRPC + 4, GRPC + 14)  # failures of requests that would have been late
_MENTIONED: Final = 0.005  # cores, or share


def marked(slo: SloSpec | None, logged: LoggedRequests, delays: Delays | None) -> np.ndarray:
    """Which of (n,) evaluable requests missed the SLO, but would have met it without what others took: bool."""
    none = np.zeros(len(logged.block), bool)
    if slo is None or slo.tightest_ms is None or delays is None:
        return none
    requests = logged.requests()
    missed = ~decision.met(slo, requests)
    late = logged.where(missed)
    excuse = np.zeros(len(logged.block))
    excuse[missed] = delays.excuse(late.intended, late.done)
    limit_ns = slo.tightest_ms * 1e6
    best = decision.JudgedRequests(
        requests.latency_ns - excuse,
        np.maximum(requests.service_ns - excuse, 0),
        requests.failed & ~(np.isin(logged.status, _LATE) & (excuse >= stalls.FAILED_SHARE * limit_ns)),
        requests.block,
        requests.cut,
    )
    found: np.ndarray = missed & (excuse >= stalls.SMALL_SHARE * limit_ns) & decision.met(slo, best)
    return found


def stands(
    slo: SloSpec, logged: LoggedRequests, marked: np.ndarray, found: Verdict, confidence: float = decision.CONFIDENCE
) -> bool:
    """Whether a verdict is the same whatever became of the requests that are marked.

    A delay only makes it harder to pass: a pass is one, and so is a fail that the others come to, had all of these passed.
    """
    if found != "fail" or not np.any(marked):
        return found == "pass" or not np.any(marked)
    return decision.overall(decision.judge(slo, had_met(logged, marked), confidence=confidence)) == "fail"


def had_met(logged: LoggedRequests, marked: np.ndarray) -> decision.JudgedRequests:
    """The requests, as if the marked ones had met the SLO."""
    requests = logged.requests()
    return decision.JudgedRequests(
        np.where(marked, 0, requests.latency_ns),
        np.where(marked, 0, requests.service_ns),
        requests.failed & ~marked,
        requests.block,
        ~logged.ended & ~marked,
    )


def bears(
    slo: SloSpec, logged: LoggedRequests, marked: np.ndarray, found: Verdict, confidence: float = decision.CONFIDENCE
) -> bool:
    """Whether a run may have that verdict: it stands, or it is the same without the marked requests, and they are few."""
    if stands(slo, logged, marked, found, confidence):
        return True
    return float(marked.mean()) <= stalls.MOST_MARKED and found == verdict_without(slo, logged, marked, confidence)


def verdict_without(
    slo: SloSpec, logged: LoggedRequests, marked: np.ndarray, confidence: float = decision.CONFIDENCE
) -> Verdict:
    """The verdict on those that are not marked."""
    rest = logged.where(~marked).requests()
    return decision.overall(decision.judge(slo, rest, confidence=confidence)) if len(rest.failed) else "undecided"


def own_lag_ns(inside: LoggedRequests, delays: Delays | None) -> np.ndarray:
    """Send lags less what others took from the generator."""
    lag: np.ndarray = inside.dispatched - inside.intended
    return lag - delays.lag_excuse(inside.intended, inside.dispatched) if delays is not None else lag


def assess(
    spec: LoadSpec,
    delays: Delays,
    found: Verdict | None,
    counted: LoggedRequests,
    marked: np.ndarray,
    inside: LoggedRequests,
    generator: GeneratorReport,
    start_ns: int,
    end_ns: int,
) -> tuple[MachineReport, tuple[str, ...], tuple[str, ...]]:
    """What other work did to the measured time, the faults of the run that are its doing, and warnings of what is none.

    marked: of the counted requests.
    """
    recording = delays.recording
    one, other = recording.candidate, recording.generator
    during = (recording.moments[1:] > start_ns) & (recording.moments[:-1] < end_ns)
    measured_ns = max(float(recording.periods[during].sum()), 1.0)
    total_ns = max(float(recording.periods.sum()), 1.0)
    cores = one.cores or other.cores
    steal = (one if one.cores else other).steal
    others = tuple((name, cpu_ns / total_ns) for name, cpu_ns in recording.names[:_NAMED])
    share = float(marked.mean()) if len(marked) else 0.0
    without = verdict_without(spec.slo, counted, marked) if spec.slo and found is not None and np.any(marked) else found
    lag_ns = inside.dispatched - inside.intended
    limit_ns = generator.send_lag_limit_ms * 1e6
    excused = (lag_ns > limit_ns) & (own_lag_ns(inside, delays) <= limit_ns)
    # Some late requests do no harm where there is a verdict that is the same with and without what that cost them.
    bearable = stalls.MOST_MARKED if spec.slo else 0.0
    steal_share = float(steal[during].sum()) / measured_ns / max(len(cores), 1)
    busy = _busy_with(others, steal_share)
    faults: list[str] = []
    told: list[str] = []
    again = "end that work, or measure again when it has ended"
    slo, missed = spec.slo, f"{busy}: it may have made {share:.1%} of the requests miss the SLO"
    if slo and found is not None and stands(slo, counted, marked, found):
        if without != found or share > stalls.MOST_MARKED:
            but = "which is met all the same" if found == "pass" else "but the others miss it even if those had met it"
            told.append(f"{missed}, {but}")
    elif without != found:
        faults.append(
            f"{busy}, and the verdict hangs on it: {found} with the {np.count_nonzero(marked):,} requests ({share:.1%}) that "
            f"this may have made late, {without} without them: {again}"
        )
    elif share > stalls.MOST_MARKED:
        faults.append(f"{missed}, 5 % are borne: {again}")
    if len(excused) and float(excused.mean()) > bearable and generator.send_lag_p99_ms > generator.send_lag_limit_ms:
        late = f"{busy} and kept the load generator from its core: {float(excused.mean()):.1%} of the requests were sent over "
        late += f"{generator.send_lag_limit_ms:.3g} ms late"
        if slo and found == "fail" and stands(slo, counted, marked | excused[inside.evaluable(slo)], found):
            told.append(f"{late}, but the others miss the SLO even if those had met it")
        else:
            faults.append(f"{late}: {again}")
    report = MachineReport(
        candidate_cores=one.cores,
        generator_cores=other.cores,
        taken_share=float(delays.candidate_taken[during].sum()) / measured_ns,
        generator_taken_share=float(delays.generator_taken[during].sum()) / measured_ns,
        others=others,
        steal_share=steal_share,
        longest_hiccup_ms=stalls.longest_hiccup_ms(recording, (*one.cores, *other.cores), start_ns, end_ns),
        marked=int(np.count_nonzero(marked)),
        marked_share=share,
        without_marked=without,
        meter_cores=float(recording.meter.sum()) / total_ns,
        disturbed=bool(faults),
    )
    if not told and report.taken_share > _MUCH_TAKEN:
        told.append(
            f"{busy}, which had a core that the server was ready to use for {report.taken_share:.0%} of the time: the verdict "
            "is the same without the requests that this delayed, but a quiet machine serves more"
        )
    return report, tuple(faults), tuple(told)


def _busy_with(others: Sequence[tuple[str, float]], steal_share: float) -> str:
    parts = [f"{name} {cores:.2f} cores" for name, cores in others if cores >= _MENTIONED]
    if steal_share >= _MENTIONED:
        parts.append(f"other virtual machines {steal_share:.1%}")
    return "the machine was busy with other work" + (f" ({', '.join(parts)})" if parts else "")
