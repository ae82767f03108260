"""The post between a search and its load generator: objects in a bucket, below one prefix, and nothing else. Pure.

files/SUM/NAME      what jobs read
jobs/N              put by the search, one after the other
taken/N             put by the generator before it begins with one: who finds it there begins no second time
progress/N          put by the generator while it works
stops/N             put by the search: end it; what is in it says whether what was measured is wanted
results/N           put by the generator, at last
ready               put by the generator once it waits for jobs
"""

from dataclasses import dataclass
from typing import Final

STOP: Final = b"stop"  # what was measured is wanted
DROP: Final = b"drop"


@dataclass(frozen=True, slots=True)
class Post:
    """bucket, base: where. Numbers have so many digits that names sort as they count."""

    bucket: str
    base: str

    @property
    def ready(self) -> str:
        return f"{self.base}/ready"

    @property
    def jobs(self) -> str:
        return f"{self.base}/jobs/"

    def job(self, number: int) -> str:
        return f"{self.jobs}{number:06}"

    def taken(self, number: int) -> str:
        return f"{self.base}/taken/{number:06}"

    def progress(self, number: int) -> str:
        return f"{self.base}/progress/{number:06}"

    def stops(self, number: int) -> str:
        return f"{self.base}/stops/{number:06}"

    def result(self, number: int) -> str:
        return f"{self.base}/results/{number:06}"

    def file(self, sha256: str, name: str) -> str:
        return f"{self.base}/files/{sha256[:16]}/{name}"
