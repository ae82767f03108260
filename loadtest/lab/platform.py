"""What candidates on somebody's platform need beside the others: requests made here, as they tell nothing of their model; and
what the platform itself measured.
"""

from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Final

from gateway.documents.whole_file import write_whole
from loadtest.lab.launchers.aws.latencies import Window
from loadtest.lab.launchers.launcher import Launcher
from loadtest.load.payloads import encode_body, synthetic
from loadtest.question.spec import SearchSpec
from loadtest.question.spec_file import SageMakerLauncher
from loadtest.results import LoadSpec
from loadtest.search.standing import SearchOutcome

_REQUESTS: Final = "requests.jsonl"


def with_requests(spec: SearchSpec, folder: Path) -> SearchSpec:
    """The spec with a file of requests, one row each: its own, else one made here of the inputs that the model declares; as it
    is, where candidates tell themselves what they take.

    Raises: UsageError.
    """
    payload = spec.payload
    if payload.files or not isinstance(spec.launcher, SageMakerLauncher):
        return spec
    declared = spec.candidates[0].document["models"][0]["inputs"]
    asked = LoadSpec("", protocol="rest-json", model=spec.model, seed=spec.seed, length=payload.length, values=payload.values)
    made = (encode_body(asked, arrays, datatypes)[0] for arrays, datatypes in synthetic(asked, declared))
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / _REQUESTS, "".join(f"{body.decode()}\n" for body in made))
    return replace(spec, payload=payload.model_copy(update={"files": (str(folder / _REQUESTS),)}))


async def with_platform(outcome: SearchOutcome, launcher: Launcher) -> SearchOutcome:
    """The outcome whose runs hold the platform's own latencies beside the client's, as far as it has them."""
    runs = [run for standing in outcome.standings for run in standing.runs if run.endpoint and run.began_at]
    windows = []
    for run in runs:
        begin = datetime.fromisoformat(run.began_at)
        windows.append(Window(run.endpoint, begin, begin + timedelta(seconds=max(0.0, run.seconds - run.start_s))))
    found = dict(zip(map(id, runs), await launcher.latencies(windows), strict=True))
    for standing in outcome.standings:
        for place, run in enumerate(standing.runs):
            if latency := found.get(id(run)):
                standing.runs[place] = replace(run, model_latency_ms=latency.model_ms, overhead_latency_ms=latency.overhead_ms)
    return outcome
