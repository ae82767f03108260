"""Carries planned calls out, in their order: waits where they wait, and takes back what was made where one of them fails."""

import datetime
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from gateway.aws.client import THROTTLED, Platform, absent
from gateway.deploying.calls import ANY, Call, Until, found_at, with_answers
from gateway.errors import GatewayError, PlatformRefused
from gateway.process.console import words
from gateway.process.interrupts import ended_by

_ASK_AGAIN_S: Final = 15.0
_SAY_AGAIN_S: Final = 60.0
_BUSY_S: Final = 1800.0  # how long an endpoint that is being made, and so cannot be removed, is waited for
_EXISTS: Final = "already exist"  # SageMaker has no word of its own for that
_BUSY: Final = ("in-progress", "in progress")
_AGAIN_S: Final = 300.0  # how long what passes by itself is waited for


class Deploying:
    """One deployment, or one removal.

    Life: `carry_out` once. sleep, now_s, now: of time, which tests make; now: what the clock shows.
    """

    def __init__(
        self,
        platform: Platform,
        *,
        sleep: Callable[[float], None] = time.sleep,
        now_s: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime.datetime] = lambda: datetime.datetime.now(tz=datetime.UTC),
    ) -> None:
        self._platform = platform
        self._sleep = sleep
        self._now_s = now_s
        self._now = now
        self._made: list[Call] = []
        self._answers: dict[str, Any] = {}
        self._kept = False  # something that was made is in use: it is not taken back
        self._there: list[Call] = []  # whose work was found done: by somebody else, or by a call that the client repeated
        self._taken_back = False
        self._doubt = ""  # what was said of a call of which it is not known yet whether it was done

    def carry_out(self, calls: Sequence[Call], *, remedy: str, of_left: str = "") -> None:
        """Make all calls. remedy: the command that removes what is left, where something is. of_left: what else is said of it.

        Raises: PlatformRefused, when one fails: what was made is taken back then, and what could not be is named; ConfigError.
        Interrupted, also while it takes back, it leaves what there is, and says so. Where one that is alone fails,
        the others are made before that is told.
        """
        failed = []
        for number, call in enumerate(calls, 1):
            words.info("%d of %d: %s", number, len(calls), call.why)
            try:
                self._make(call)
            except KeyboardInterrupt as exc:
                goes_on = "what was made goes on, and costs" if self._made or self._kept else _not_known(call)
                if self._made or self._kept or call.until is None:
                    told = of_left or f"{remedy} removes it."
                    words.error("Ended by %s: %s. %s", ended_by(exc)[0], goes_on, told)
                raise
            except GatewayError as exc:
                reason = getattr(exc, "reason", "")
                if call.alone and isinstance(exc, PlatformRefused):
                    words.warning("%s: %s", call.why, exc.message)
                    failed.append((call.why, reason))
                    continue
                message = f"{self._doubt}{exc.message}"
                remains = of_left or f"{remedy} removes them."
                try:
                    left = self._left_of(call, exc, reason)
                except KeyboardInterrupt as end:
                    names = "; ".join(each.named for each in reversed(self._made))
                    told = f"Ended by {ended_by(end)[0]} while that was taken back. Left are: {names}. {remains}"
                    words.error("%s\n%s", message, told)
                    raise
                raise PlatformRefused(f"{message}\n{self._told(left, remains)}", reason) from exc
        if failed:
            whys = "; ".join(why for why, _ in failed)
            raise PlatformRefused(f"Failed: {whys}. All else was done.", failed[-1][1])

    def remove(self, *places: Sequence[Call], remedy: str) -> None:
        """The same of calls that remove something: what is gone already is well. A question is of the call before it.

        Where one fails the others are made, but for those that are alone behind one of its place that is not: what stands
        there may need what they remove. Raises: PlatformRefused, with what is not done. Interrupted, it says that too.
        """
        calls = [call for place in places for call in place]
        first = [place[0] for place in places if place]
        left: list[Call] = []
        kept, reason = False, ""  # kept: something of this place that others may need
        for number, call in enumerate(calls, 1):
            of = calls[number - 2] if call.until is not None else call
            behind = calls[number:]
            kept &= call not in first
            if left and left[-1] is of:
                continue
            if kept and call.alone:
                left.append(call)
                continue
            words.info("%d of %d: %s", number, len(calls), call.why)
            try:
                self._removed(call)
            except KeyboardInterrupt as exc:
                words.error("Ended by %s. %s", ended_by(exc)[0], _not_done([*left, of, *behind], remedy))
                raise
            except GatewayError as exc:
                words.warning("%s: %s", of.why, exc.message)
                left.append(of)
                kept |= not of.alone
                reason = getattr(exc, "reason", "")
                costs = any(not each.alone and each.until is None for each in behind)
                if not isinstance(exc, PlatformRefused) or not (reason or costs):  # nor will the others be answered
                    left += behind
                    break
        if left:
            raise PlatformRefused(_not_done(left, remedy), reason)

    def _make(self, call: Call) -> None:
        if call.until is not None:
            self._wait(call, call.until)
            if call.until.keep:
                self._made, self._kept, self._doubt = [], True, ""
            return
        try:
            self._answers[call.named] = self._called(call)
        except PlatformRefused as exc:
            if call.already and exc.reason == call.already:
                if not call.restores:
                    if call.undo:
                        self._there.append(call)
                    return  # somebody else's, or an earlier deployment's: not ours to take back
            elif call.told and (not exc.reason or _busy(exc)):
                words.info("%s: it is looked whether it was done", exc.message)
                self._doubt = f"{exc.message}\n"
            else:
                raise
        self._made.append(call)

    def _called(self, call: Call) -> dict[str, Any]:
        """Its answer; asked again while that says what passes by itself, as throttling does."""
        began_s = self._now_s()
        while True:
            try:
                return self._asked(call)
            except PlatformRefused as exc:
                passes = exc.reason in call.again or exc.reason in THROTTLED
                if not passes or self._now_s() - began_s >= _AGAIN_S:
                    raise
            self._sleep(_ASK_AGAIN_S)

    def _asked(self, call: Call) -> dict[str, Any]:
        asked = with_answers(call.parameters, self._answers)
        if call.as_of is not None:
            asked = call.as_of(asked, self._now())
        return {} if asked is None else self._platform.call(call.service, call.operation, asked)

    def _left_of(self, failed: Call, exc: GatewayError, reason: str) -> list[str]:
        """What is left, in words, once all that can be was taken back."""
        if _EXISTS in exc.message:  # somebody else is at it, or an answer was lost: what needs what is not known
            return [f"{call.named}, which was made" for call in reversed(self._made)] + [f"{failed.named}, of whomever"]
        if failed.until is not None and failed.until.leave:
            return [call.named for call in reversed(self._made)]
        lost = isinstance(exc, PlatformRefused) and not reason and failed.until is None
        others = failed.already and not failed.restores  # what it makes may be somebody else's
        if lost and not others:
            self._made.append(failed)  # it may have been
        left = self._take_back()
        return [*left, _not_known(failed)] if lost and others else left

    def _take_back(self) -> list[str]:
        """What was made, the last first, until something cannot be: what was made before it may be needed by it.

        Gives what is left, in words.
        """
        left = []
        try:
            while self._made:
                self._taken_back = True
                made = self._made[-1]
                left += [made.named] if not made.undo else []
                if not self._known(made):
                    left.append(_not_known(made))
                    self._made.pop()
                    continue
                for back in made.undo:
                    words.info("Taking back: %s", back.why)
                    try:
                        self._removed(back)
                    except PlatformRefused as exc:
                        if not (back.alone and exc.reason):  # without an answer the others get none either
                            raise
                        left.append(f"{made.named}, as this failed: {back.why}: {exc.message}")
                self._made.pop()
        except GatewayError as exc:
            left += [f"{self._made.pop().named}, as {exc.message}", *(call.named for call in reversed(self._made))]
        return left

    def _known(self, made: Call) -> bool:
        """Whether what takes it back can name it. Where its answer was lost, it is looked for, for as long as it may be new."""
        if made.sought is None or made.named in self._answers:
            return True
        question, place = made.sought
        words.info("Its answer is lost. %s", question.why)
        began_s = self._now_s()
        while True:
            over = self._now_s() - began_s >= _AGAIN_S
            try:
                found = found_at(self._called(question), place)
            except PlatformRefused as exc:
                if exc.reason or over:
                    raise
                found = None  # a network that lost one answer may lose more
            if found is not None:
                self._answers[made.named] = found
                return True
            if over:
                return False
            self._sleep(_ASK_AGAIN_S)

    def _told(self, left: Sequence[str], remains: str) -> str:
        found = "; ".join(f'what "{call.why}" makes' for call in self._there)
        there = f" Found there, and left: {found} (an earlier deployment's, or this one's)." if found else ""
        if left:
            return f"Left are: {'; '.join(left)}.{there} {remains}"
        if self._kept:
            return f"What was made before is in use. {remains}"
        if there:
            return f"{'All else was taken back' if self._taken_back else 'Nothing else was made'}.{there} {remains}"
        taken = "All that was made was taken back" if self._taken_back else "Nothing was made"
        return f"{taken}: nothing of it is left, and nothing of it costs."

    def _removed(self, call: Call) -> None:
        if call.until is not None:
            try:
                self._wait(call, call.until)
            except PlatformRefused as exc:
                if not absent(exc.reason, exc.message):
                    raise
            return
        began_s = self._now_s()
        while True:
            try:
                self._answers[call.named] = self._called(call)
                return
            except PlatformRefused as exc:
                if absent(exc.reason, exc.message) or (call.already and exc.reason == call.already):
                    return
                busy = _busy(exc)
                if exc.reason and not busy:
                    raise
                if self._now_s() - began_s >= (_BUSY_S if busy else _AGAIN_S):
                    raise
                if not busy:  # done or not: asked again, it is done
                    words.info("%s: asking again", exc.message)
            self._sleep(_ASK_AGAIN_S)

    def _subject(self, call: Call) -> str:
        found = with_answers(next(iter(call.parameters.values())), self._answers)
        return ", ".join(map(str, found)) if isinstance(found, list) else str(found)

    def _wait(self, call: Call, until: Until) -> None:
        """Raises: PlatformRefused, when it failed, or takes longer than it may; ConfigError, without credentials."""
        began_s = said_s = self._now_s()
        last = ""
        while True:
            unasked = ""
            try:
                answer = self._asked(call)
                state = _state(answer, until)
            except PlatformRefused as exc:
                if not until.done and absent(exc.reason, exc.message):
                    return
                young = self._now_s() - began_s < _AGAIN_S
                if exc.reason and exc.reason not in THROTTLED and not (exc.reason in call.again and young):
                    raise
                # A network that is away for a while costs no deployment.
                answer, state, unasked = {}, "not to be asked", f": {exc.message}"
            if state in until.done:
                self._answers[call.named] = answer
                return
            if answer and (state in until.failed or ANY in until.failed):
                why = _reason(answer, until) or "without a reason"
                look = f"\nCloudWatch has what the container said: {until.look}" if until.look else ""
                what = "says" if until.within else "is" if until.key.endswith(("Status", "State.Name")) else f"has {until.key}"
                raise PlatformRefused(f"AWS: {self._subject(call)} {what} {state}: {why}{look}", state)
            now_s = self._now_s()
            if state != last or now_s - said_s >= _SAY_AGAIN_S:
                words.info("%s is %s, %.0f min%s", self._subject(call), state, (now_s - began_s) / 60, unasked)
                said_s, last = now_s, state
            if now_s - began_s >= until.most_s:
                least = f"is {state} for {until.most_s / 60:.0f} min: expected less"
                raise PlatformRefused(f"AWS: {self._subject(call)} {least}{unasked}", state)
            self._sleep(_ASK_AGAIN_S)


def _busy(exc: PlatformRefused) -> bool:
    return any(word in exc.message for word in _BUSY)


def _not_done(calls: Sequence[Call], remedy: str) -> str:
    whys = "; ".join(call.why for call in calls if call.until is None)
    return f"Not done, as far as is known: {whys}. {remedy} removes what is left."


def _not_known(call: Call) -> str:
    return f"{call.named}: whether it did something is not known"


def _state(answer: Any, until: Until) -> str:
    """Of those that it knows the one that the answer has, else the answer's own word."""
    found = str(found_at(answer, until.key.split(".")) or "")
    if not until.within:
        return found
    return next((state for state in (*until.done, *until.failed) if state in found), "silent yet")


def _reason(answer: Any, until: Until) -> str:
    """Of a text the last line that says it failed."""
    found = str(found_at(answer, until.reason.split(".")) or "")
    if not until.within:
        return found
    lines = [line.strip() for line in found.splitlines() if any(state in line for state in until.failed)]
    return lines[-1] if lines else ""
