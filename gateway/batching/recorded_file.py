"""How recordings are told to others: one msgpack object, with the format first. As GET /v2/models/MODEL/why gives it."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import msgspec

from gateway import __version__
from gateway.batching.recording import FORMAT, LaneSettings, Ring
from gateway.errors import InvalidArgument

_BROKEN: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)  # what decoding raises


class LaneRecording(msgspec.Struct):
    """One backend's recording. dropped: segments that there was no room for any more. segments: for `replay`."""

    settings: LaneSettings
    dropped: int
    segments: list[dict[str, Any]]

    def recorded(self) -> dict[str, Any]:
        """As `replay` takes it."""
        return {"dropped": self.dropped, "segments": self.segments}


class ModelRecording(msgspec.Struct, kw_only=True):
    """Of one model in one process. now_ns, unix_s: the same moment by the process's clock and by everybody's.

    process: a name that no other process has; processes: how many serve the model side by side. routing: for `replay_routing`;
    None, where there is one backend. unrecorded: backends whose decisions are recorded no more, and why; under an empty name
    the routing.
    """

    model: str
    version: str
    process: str
    processes: int
    now_ns: int
    unix_s: float
    lanes: list[LaneRecording]
    routing: dict[str, Any] | None = None
    unrecorded: dict[str, str] = {}


class _File(msgspec.Struct):
    format: int
    gateway: str
    recordings: list[ModelRecording]


class _Format(msgspec.Struct):
    format: int
    gateway: str = "unknown"


def packed(
    model: str,
    version: str,
    rings: Sequence[Ring],
    *,
    process: str,
    processes: int,
    now_ns: int,
    unix_s: float,
    routing: Ring | None = None,
    unrecorded: Mapping[str, str] = MappingProxyType({}),
) -> bytes:
    """What a process has recorded of one model."""
    recording = {
        "model": model,
        "version": version,
        "process": process,
        "processes": processes,
        "now_ns": now_ns,
        "unix_s": unix_s,
        "lanes": [ring.dump() for ring in rings],
        "routing": routing.dump() if routing is not None else None,
        "unrecorded": dict(unrecorded),
    }
    return msgspec.msgpack.encode({"format": FORMAT, "gateway": __version__, "recordings": [recording]})


def joined(files: Sequence[bytes], model: str = "") -> bytes:
    """Several as one. model: only what is of this one; empty: all."""
    recordings = [recording for file in files for recording in msgspec.msgpack.decode(file)["recordings"]]
    recordings = [recording for recording in recordings if model in ("", recording["model"])]
    return msgspec.msgpack.encode({"format": FORMAT, "gateway": __version__, "recordings": recordings})


def unpacked(data: bytes, source: str) -> list[ModelRecording]:
    """Raises: InvalidArgument, which says what it is instead."""
    try:
        head = msgspec.msgpack.decode(data, type=_Format)
    except _BROKEN as exc:
        raise InvalidArgument(
            f"{source}: no recording of a gateway ({exc}): expected what `gateway why URL --save FILE` wrote"
        ) from exc
    if head.format != FORMAT:
        raise InvalidArgument(
            f"{source}: recorded in format {head.format} by gateway {head.gateway}, expected format {FORMAT}: use "
            f"`gateway why` of that release, this is {__version__}"
        )
    try:
        return msgspec.msgpack.decode(data, type=_File).recordings
    except _BROKEN as exc:
        raise InvalidArgument(f"{source}: a recording that is broken ({exc}): save it again") from exc
