"""What `gateway deploy sagemaker` and `gateway deploy ec2` do alike."""

import datetime
from collections.abc import Iterable
from pathlib import Path
from typing import Final, TypeVar

from gateway.deploying.ec2_standing import StandingMachine
from gateway.deploying.machine_data import Sent, sent
from gateway.deploying.needs import GIB
from gateway.deploying.packing import packed, write
from gateway.deploying.sagemaker_standing import Deployed
from gateway.documents.reader import Document
from gateway.errors import ConfigError, PlatformRefused
from gateway.process.console import step, words

_Standing = TypeVar("_Standing", Deployed, StandingMachine)
_MOST_PUT_BYTES: Final = 5 << 30  # of one PutObject


def archive(document: Document, path: Path, remedy: str = "", *, apart: Iterable[Path] = ()) -> Sent:
    """Pack it, and tell what is in it. remedy: where it is too long. apart: as `packed` has it.

    Raises: ConfigError; OSError.
    """
    with step("packing"):
        told = write(packed(document, apart=apart), path)
        found = sent(path, path.name)
    words.info("%s: %s", path.name, told)
    if found.bytes > _MOST_PUT_BYTES:
        told = f"{document.source}: its package has {found.bytes / GIB:.1f} GiB: expected 5 GiB at most, as S3 takes it"
        raise ConfigError(": ".join(filter(None, (told, remedy))))
    return found


def of_ours(found: _Standing) -> _Standing:
    """Raises: ConfigError, if something has this name that is not ours; PlatformRefused, if that cannot be seen."""
    if found.unseen:
        raise PlatformRefused("\n".join(found.unseen), "AccessDenied")
    if found.untagged:
        taken = ", ".join(dict.fromkeys(found.untagged))
        raise ConfigError(f"--name: {found.name}: taken by {taken}, not of a gateway: choose another")
    return found


def now() -> datetime.datetime:
    return datetime.datetime.now(tz=datetime.UTC)
