"""A candidate's configuration, and the files that it names, as `gateway package` packs them: in a process of its own."""

import asyncio
import hashlib
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from gateway.deploying.sagemaker import PackedModel
from loadtest.lab.launchers.launcher import StartFailed
from loadtest.measuring import children

Pack = Callable[[Mapping[str, Any], Path, str, Sequence[Path]], Awaitable[PackedModel]]
_PACK_S: Final = 600.0


async def packed(document: Mapping[str, Any], folder: Path, bucket: str, apart: Sequence[Path]) -> PackedModel:
    """folder: an empty one, which holds the archive. bucket: where it is to go. apart: files that do not.

    Raises: StartFailed.
    """
    config, archive = folder / "gateway.yaml", folder / "model.tar.gz"
    config.write_text(yaml.safe_dump(dict(document), sort_keys=False))
    without = [f"--without={path}" for path in apart if path.is_file()]
    command = (sys.executable, "-m", "gateway", "package", str(config), "--out", str(archive), *without)
    process = await children.begin(*command, stdin=DEVNULL, stdout=DEVNULL, stderr=PIPE)
    try:
        async with asyncio.timeout(_PACK_S):
            _, said = await process.communicate()
    except TimeoutError as exc:
        raise StartFailed(f"was not packed within {_PACK_S:g} s") from exc
    finally:
        await children.end(process)
    if process.returncode:
        raise StartFailed(f"cannot be packed: {' '.join(said.decode(errors='replace').split())}")
    digest = await asyncio.to_thread(_digest, archive)
    return PackedModel(archive, archive.stat().st_size, digest, bucket)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
