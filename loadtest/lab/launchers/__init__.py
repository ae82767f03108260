"""How a candidate comes to run, so that it can be measured: one protocol (`launcher`), one module per way.

url     it runs already
local   fresh processes on this machine, pinned to cores
"""

from gateway.process.credentials import NOTHING_SHOWN, Credentials
from loadtest.lab.launchers.launcher import Launcher
from loadtest.lab.launchers.local import Local
from loadtest.lab.launchers.url import Url
from loadtest.question.spec_file import LocalLauncher, UrlLauncher


def launcher_of(wanted: LocalLauncher | UrlLauncher, shown: Credentials = NOTHING_SHOWN) -> Launcher:
    """The launcher that a spec asks for. shown: to servers that run already."""
    if isinstance(wanted, LocalLauncher):
        return Local(start_timeout_s=wanted.start_timeout_s, nice=wanted.nice)
    return Url(shown)
