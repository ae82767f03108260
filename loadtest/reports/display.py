"""How a search goes, for people: in a terminal one line that is redrawn, above it a line per measurement; else only those.

Nothing here has a thread: one would hold the interpreter while requests are due. The line is redrawn when the generator looks
at its run, twice a second.
"""

from contextlib import suppress
from typing import TYPE_CHECKING, Final

from loadtest.search.events import Agreed, Load, Measured, Predicted, TakenBack
from loadtest.search.standing import agreement_text
from loadtest.wording import attained, clock, figures, ms, rate, usd

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import Console

    from loadtest.lab.driver import SearchStep
    from loadtest.measuring.progress import Progress
    from loadtest.search.events import Event, Experiment, Question

LONGEST_NAME: Final = 34  # in a terminal; of a longer one the end is shown, where its settings are
ERASE: Final = "\r\x1b[2K"
_VERDICTS: Final = {"pass": ("kept", "green"), "fail": ("missed", "red"), "undecided": ("undecided", "yellow")}


class Display:
    """Takes `run_search`'s steps and `Lab`'s progress. names: entrant -> what it is called here. paid: money is spent."""

    def __init__(self, console: "Console", question: "Question", names: "Mapping[str, str]", *, paid: bool) -> None:
        self._console = console
        self._question = question
        self._names = names
        self._paid = paid
        self._width = max(map(len, names.values()), default=0)
        if console.is_terminal:
            self._width = min(LONGEST_NAME, self._width)
        self._seconds = 0.0
        self._usd = 0.0
        self._looks = 0
        self._within = 0

    def on_step(self, step: "SearchStep") -> None:
        self._seconds, self._usd = step.seconds, step.usd
        self._looks = self._within = 0
        if step.event is None:
            self._redraw(self._began(step.experiment))
            return
        self.clear()
        told, verdict, style = self._found(step.event)
        from rich.text import Text

        line = Text.assemble(self._began(step.experiment), "  ", told, (verdict, style))
        self._console.print(line, soft_wrap=not self._console.is_terminal)

    def on_progress(self, load: "Load", progress: "Progress") -> None:
        """Twice a second."""
        limit_ms = self._question.limit_ms
        if progress.rate_rps > 0:
            self._looks += 1
            self._within += progress.p99_ms <= limit_ms
        seconds = self._seconds + progress.elapsed_s
        parts = [
            f"{clock(seconds)} {load.purpose:8} {self._name(load.entrant)}  {rate(progress.rate_rps)}, {rate(load.rps)} asked",
            f"p99 {ms(progress.p99_ms)} of {limit_ms:g}" if progress.rate_rps > 0 else "no answers now",
            f"kept in {self._within} of {self._looks} looks",
            f"{clock(max(0.0, self._question.seconds - seconds))} left",
        ]
        if self._paid:
            price = next(entrant.usd_per_hour for entrant in self._question.entrants if entrant.name == load.entrant)
            parts.append(f"{usd(self._usd + progress.elapsed_s / 3600 * price)} spent")
        self._redraw("  ".join(parts))

    def clear(self) -> None:
        """Take the line away that is redrawn."""
        self._redraw("")

    def _redraw(self, line: str) -> None:
        if not self._console.is_terminal:
            return
        with suppress(OSError):  # a terminal that is gone ends a search by its signal, in order
            self._console.file.write(ERASE + line[: self._console.width - 1])
            self._console.file.flush()

    def _began(self, experiment: "Experiment") -> str:
        what = experiment.purpose if isinstance(experiment, Load) else type(experiment).__name__.lower()
        return f"{clock(self._seconds)} {what:8} {self._name(experiment.entrant)}"

    def _name(self, entrant: str) -> str:
        name = self._names[entrant]
        if len(name) > self._width:
            name = f"…{name[len(name) - self._width + 1 :]}"
        return f"{name:{self._width}}"

    def _found(self, event: "Event") -> tuple[str, str, str]:
        """What to tell of a measurement: its figures, its verdict, and the verdict's style."""
        if isinstance(event, Predicted):
            if event.rps > 0:
                return f"about {rate(event.rps)}", "", ""
            if event.disturbed:
                return "", event.why, "yellow"
            return "keeps the SLO at no rate" + (f": {event.why}" if event.why else ""), "", ""
        if isinstance(event, TakenBack):
            return "", f"not counted: {event.why}", "yellow"
        if event.failure:
            return "", event.failure, "red"
        if isinstance(event, Agreed):
            return f"agreement {agreement_text(event.agreement or 0.0)} ({event.statistic}, {event.inputs} inputs)", "", ""
        if isinstance(event, Measured):
            offered = f"{rate(event.rps)}  "
            if not event.valid:
                return offered, f"not counted: {'; '.join(event.notes)}", "yellow"
            if event.unanswered:
                return f"{offered}{event.unanswered}  ", *_VERDICTS[event.verdict]
            within = f", {attained(event.attainment)} in the SLO  " if event.attainment is not None else "  "
            return f"{offered}p99 {ms(event.p99_ms)} of {self._question.limit_ms:g}{within}", *_VERDICTS[event.verdict]
        alone = [timing for timing in event.timings if timing.concurrency == 1]
        return f"{', '.join(f'{t.rows}: {figures(t.ms)}' for t in alone)} ms by rows", "", ""
