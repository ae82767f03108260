"""How a candidate comes to run, so that it can be measured: one protocol (`launcher`), one module per way.

url         it runs already
local       fresh processes on this machine, pinned to cores
sagemaker   an endpoint of its own, which is paid for
ec2         a machine of its own, which is paid for, loaded by one beside it
"""

from gateway.process.credentials import NOTHING_SHOWN, Credentials
from loadtest.lab.launchers.launcher import Launcher
from loadtest.lab.launchers.local import Local
from loadtest.lab.launchers.url import Url
from loadtest.prices.catalogue import Catalogue
from loadtest.question.spec import SearchSpec
from loadtest.question.spec_file import Ec2Launcher, LocalLauncher, SageMakerLauncher


def launcher_of(spec: SearchSpec, catalogue: Catalogue, shown: Credentials = NOTHING_SHOWN) -> Launcher:
    """The launcher that a spec asks for. shown: to servers that run already."""
    wanted = spec.launcher
    if isinstance(wanted, LocalLauncher):
        return Local(start_timeout_s=wanted.start_timeout_s, nice=wanted.nice)
    if isinstance(wanted, SageMakerLauncher):
        from loadtest.lab.launchers.sagemaker import SageMaker

        return SageMaker(wanted, catalogue, spec.budget)
    if isinstance(wanted, Ec2Launcher):
        from loadtest.lab.launchers.ec2 import Ec2

        return Ec2(wanted, catalogue, spec.budget)
    return Url(shown)
