"""What the values of the configuration are made of: numbers within bounds, names, and sections that take no unknown key."""

import ipaddress
import re
import unicodedata
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Annotated, Final

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from gateway.config.other_names import KEYS, plain
from gateway.documents.faults import Unfit

LONGEST_NAME: Final = 128  # of a model, in characters

_LONGEST_S: Final = 1_000_000_000  # over 30 years; inside, times are whole nanoseconds

Seconds = Annotated[float, Field(gt=0, le=_LONGEST_S)]
SecondsOrZero = Annotated[float, Field(ge=0, le=_LONGEST_S)]
Milliseconds = Annotated[float, Field(gt=0, le=3_600_000)]
Port = Annotated[int, Field(ge=0, le=65535)]
Threads = Annotated[int, Field(ge=1, le=4096)]
Replicas = Annotated[int, Field(ge=1, le=10_000)]
Resource = Annotated[float, Field(ge=0, le=100_000_000_000_000)]  # of which Ray counts no more (MAX_RESOURCE_QUANTITY)
Rows = Annotated[int, Field(ge=1, le=1 << 20)]


def no_parts(resources: Mapping[str, float], at: str) -> Iterator[Unfit]:
    """What Ray refuses to give in parts, only as it places who asks for it. at: the key that resources stand at."""
    for name, amount in resources.items():
        if name == "neuron_cores" and amount % 1:
            yield Unfit("a NeuronCore has one owner", expected="a whole number", at=(at, name))
        if name == "num_gpus" and amount > 1 and amount % 1:
            yield Unfit("Ray gives parts of one GPU alone", expected="a whole number, or less than 1", at=(at, name))


# Names stand in paths, lane names (`model:version/backend`), metric labels, and in the names of threads, files and deployments.
# With the longest of each, a file that Ray names after a deployment still has a name of less than 255 bytes.
def _name(value: object, *, most: int) -> object:
    if not isinstance(value, str):
        return value  # which pydantic refuses
    if not is_name(value, most=most):
        remedy = f"for instance {value.replace('/', '-')}" if "/" in value.strip("/") else "choose another"
        raise Unfit(expected=f"1 to {most} characters, none of them '/' or a control character", remedy=remedy)
    return value


def is_name(value: str, *, most: int = LONGEST_NAME) -> bool:
    """Whether a model can have it. most: characters."""
    unfit = any(char == "/" or unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp") for char in value[:most])
    return not unfit and 0 < len(value) <= most


def _version(value: object) -> object:
    def fits(text: str) -> bool:
        return re.fullmatch("[0-9]{1,18}", text) is not None

    if not isinstance(value, str):
        raise Unfit(expected="a number of 1 to 18 digits, in quotes", fits_in_quotes=fits)
    if not fits(value):
        raise Unfit(expected="a number of 1 to 18 digits, in quotes")
    return value


def _host(value: object) -> object:
    return _address_or_name(value, of_port="the ports are http_port and grpc_port")


def _allowed_host(value: object) -> object:
    if value == "*":
        return value
    found = _address_or_name(value, of_port="leave the port out: it is allowed at any")
    if isinstance(found, str) and not found.isascii():
        try:
            remedy = f"write {found.encode('idna').decode()}"
        except UnicodeError:
            remedy = ""
        raise Unfit(expected="a name as clients send it", remedy=remedy)
    return found


def _address_or_name(value: object, *, of_port: str) -> object:
    """of_port: what helps where a port is with it. Raises: Unfit."""
    if not isinstance(value, str):
        return value
    try:
        ipaddress.ip_address(value)
    except ValueError:
        if not re.fullmatch(r"[\w-]{1,63}(\.[\w-]{1,63})*\.?", value):
            remedy = of_port if re.search(r":\d+$", value) else ""
            raise Unfit(expected="an address such as 127.0.0.1, or a name", remedy=remedy) from None
    return value


def _path(value: object) -> object:
    if isinstance(value, str) and "\0" in value:
        raise Unfit(expected="a path, in which there is no NUL character")
    return value


def _application(value: object) -> object:
    if isinstance(value, str) and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", value):
        raise Unfit(expected="1 to 100 letters, digits, '.', '_' or '-', of which the first is a letter or digit")
    return value


def is_loopback(host: str) -> bool:
    """Whether an address is reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


Application = Annotated[str, BeforeValidator(_application)]  # stands in names of files and directories
FilePath = Annotated[str, BeforeValidator(_path)]
Host = Annotated[str, BeforeValidator(_host)]
AllowedHost = Annotated[str, BeforeValidator(_allowed_host)]
ModelName = Annotated[str, BeforeValidator(partial(_name, most=LONGEST_NAME))]
BackendName = Annotated[str, BeforeValidator(partial(_name, most=48))]
Version = Annotated[str, BeforeValidator(_version)]


class Strict(BaseModel):
    # Each is built when it is first held against something: those of other kinds of backends never are, but in a union.
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)

    @classmethod
    def called_here(cls, key: str) -> tuple[str, str] | None:
        """Of a key that others have: what it is here, and what to write; None, for any other, and for one of ours without its
        unit.
        """
        ours = any(plain(name).startswith(plain(key)) for name in cls.model_fields)
        return None if ours else KEYS.get(plain(key))
