"""A gateway as a service of systemd: a user of its own, hardly any rights, and a stop that lets it drain.

Source: systemd.service(5), systemd.exec(5), systemd.resource-control(5). What needs a later systemd than 250 is not in it.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Final

from gateway.config import Config
from gateway.deploying.needs import needs_low_port

UNIT: Final = "gateway.service"
STATE: Final = "/var/lib/gateway"
CREDENTIALS: Final = f"/run/credentials/{UNIT}"  # where the service finds what LoadCredential names
STARTS_S: Final = 600  # models to be loaded
_ENDS_S: Final = 10  # after the drain: at most 3, docs/deploy.md says
_FILES: Final = 65536
_METADATA: Final = "169.254.169.254 fd00:ec2::254"
_ENVIRONMENT: Final = {
    "HOME": STATE,
    "PYTHONUNBUFFERED": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # as docs/deploy.md has it of nodes
}


PROTECTED: Final = (
    "UMask=0077",
    "NoNewPrivileges=yes",
    "ProtectSystem=strict",
    "ProtectHome=yes",
    "PrivateTmp=yes",
    "ProtectControlGroups=yes",
    "ProtectHostname=yes",
    "ProtectKernelLogs=yes",
    "ProtectKernelModules=yes",
    "ProtectKernelTunables=yes",
    "LockPersonality=yes",
    "RestrictNamespaces=yes",
    "RestrictSUIDSGID=yes",
    "RemoveIPC=yes",
    "RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK",
    "SystemCallArchitectures=native",
)
"""What every service of ours does without."""


def stop_s(config: Config, *, on_ray: bool) -> int:
    """How long it may take to end: see docs/deploy.md."""
    drain_s = config.server.drain_timeout_s
    return math.ceil((2 * drain_s + 10 if on_ray else drain_s) + _ENDS_S)


def unit(config: Config, command: Sequence[str], *, secrets: Mapping[str, str], devices: bool, on_ray: bool) -> str:
    """command: an absolute path and its arguments. secrets: names -> the files that only root reads. devices: it needs some."""
    files = max(_FILES, 2 * config.server.limits.connections)
    capabilities = "CAP_NET_BIND_SERVICE" if needs_low_port(config) else ""
    lines = [
        "[Unit]",
        "Description=Serving gateway",
        "Wants=network-online.target",
        "After=network-online.target",
        "StartLimitIntervalSec=600",
        "StartLimitBurst=5",
        "",
        "[Service]",
        "# Started is what answers: the gateway says when. On Ray a process of its own says it.",
        "Type=notify",
        "NotifyAccess=all",
        f"TimeoutStartSec={STARTS_S}",
        f"ExecStart={' '.join(map(word, command))}",
        *(f"Environment={name}={value}" for name, value in _ENVIRONMENT.items()),
        *(f"LoadCredential={name}:{path}" for name, path in secrets.items()),
        "",
        "# SIGTERM drains. What is left after that is killed.",
        f"TimeoutStopSec={stop_s(config, on_ray=on_ray)}",
        "KillMode=mixed",
        "Restart=on-failure",
        "RestartSec=2",
        "# A faulty configuration stays faulty; asked to stop before it began to load models, it did not fail.",
        "RestartPreventExitStatus=2",
        "SuccessExitStatus=143",
        "# A session's process that ran out of memory is replaced by the gateway.",
        "OOMPolicy=continue",
        f"LimitNOFILE={files}",
        "",
        "DynamicUser=yes",
        "StateDirectory=gateway",
        f"CapabilityBoundingSet={capabilities}",
        f"AmbientCapabilities={capabilities}",
        *PROTECTED,
        # GPUs and NeuronCores are devices of the machine; ProtectClock closes all that are not named.
        *([] if devices else ["PrivateDevices=yes", "ProtectClock=yes"]),
        "ProtectProc=invisible",
        "RestrictRealtime=yes",
        "SystemCallFilter=@system-service",
        "SystemCallErrorNumber=EPERM",
        "# Neither it nor the code of a model gets the keys of the machine's role.",
        f"IPAddressDeny={_METADATA}",
        "",
        "[Install]",
        "WantedBy=multi-user.target",
    ]
    return "\n".join(lines) + "\n"


def word(word: str) -> str:
    """As systemd reads a word of a command."""
    return word.replace("%", "%%").replace("$", "$$")
