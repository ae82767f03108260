"""Which process runs which file of tests, also after a process was lost: a plugin of pytest, beside pytest-xdist."""

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController


class Files(LoadFileScheduling):
    """What a lost process had not run goes to the others and to the one in its place.

    pytest-xdist 3.8.0 hands out again whatever a lost process ever had: a file, and the next one when a test has ended. Who
    gets a file that has been run, or a single test, ends none: the run stands still (its issues 1323 and 1327).
    """

    def _reschedule(self, node: WorkerController) -> None:
        super()._reschedule(node)
        # A process begins a test only when it knows the next one, or that there is none.
        while self.workqueue and not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
            self._assign_work_unit(node)


@pytest.hookimpl(optionalhook=True)  # pytest-xdist's
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Files | None:
    return Files(config, log) if config.option.dist == "loadfile" else None
