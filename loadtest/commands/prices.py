"""`loadtest prices [list | show TYPE | refresh]`: what instances cost, with source and date."""

import argparse
import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gateway.process.command_line import add_command
from loadtest.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from gateway.instances.facts import PriceBasis
    from loadtest.prices.catalogue import Catalogue


_BASES: Final[tuple["PriceBasis", ...]] = ("ec2", "spot", "sagemaker")


def add_parser(subparsers: Any) -> None:
    parser = add_command(
        subparsers,
        "prices",
        "what instances cost, with source and date",
        "loadtest prices list c7i",
        "loadtest prices show inf2.xlarge",
        "loadtest prices show inf2.xlarge --json",
        "loadtest prices refresh c7i.large --region eu-central-1",
    )
    parser.add_argument("action", nargs="?", choices=("list", "show", "refresh"), default="list")
    parser.add_argument("instances", nargs="*", metavar="TYPE", help="types; list: prefixes (c7i); none: all")
    parser.add_argument(
        "--region", default="us-east-1", help="whose prices; of others than the default us-east-1, those refreshed"
    )
    parser.add_argument("--cache", type=Path, metavar="PATH", help="where fetched prices are kept")
    parser.add_argument("--json", action="store_true", help="as JSON, and nothing else")
    parser.set_defaults(execute=_execute)


def _execute(arguments: argparse.Namespace) -> int:
    from loadtest.load.signing import check_region
    from loadtest.prices.catalogue import load_catalogue
    from loadtest.prices.live_prices import CACHE, current_catalogue, fetch, write_cache
    from loadtest.reports.consoles import results

    check_region("--region", arguments.region)
    now = datetime.datetime.now(datetime.UTC)
    console = results(hidden=arguments.json)
    cache = arguments.cache or CACHE
    if arguments.action == "refresh":
        bundled = load_catalogue()
        for name in arguments.instances:
            bundled.instance(name)
        names = [name.removeprefix("ml.") for name in arguments.instances] or list(bundled.instances)
        live, missing = fetch(names, arguments.region, now)
        write_cache(cache, live, now)
        for line in missing:
            console.print(line, style="yellow")
        console.print(f"{len(live)} prices of {arguments.region} fetched into {cache}", soft_wrap=True)
        if arguments.json:
            _write({"region": arguments.region, "fetched": len(live), "cache": str(cache), "missing": missing})
        return 0 if live else 1
    catalogue = current_catalogue(now, cache=cache, region=arguments.region)
    if arguments.action == "show":
        if not arguments.instances:
            raise UsageError("prices show: name at least one instance type")
        for name in arguments.instances:
            _show(console, catalogue, name, now.date())
        names = [name.removeprefix("ml.") for name in arguments.instances]
    else:
        prefixes = tuple(name.removeprefix("ml.") for name in arguments.instances) or ("",)
        names = [name for name in catalogue.instances if name.startswith(prefixes)]
        _list(console, catalogue, names, now.date())
    if arguments.json:
        _write({"region": catalogue.region, "instances": [_described(catalogue, name, now.date()) for name in names]})
    return 0


def _write(document: dict[str, Any]) -> None:
    print(json.dumps(document, indent=2, default=str))  # str: dates


def _described(catalogue: "Catalogue", name: str, today: datetime.date) -> dict[str, Any]:
    """All that is known of a type. prices: null where none is."""
    instance = catalogue.instance(name)
    prices: dict[str, Any] = {}
    for basis in _BASES:
        try:
            price = catalogue.price(name, basis)
        except UsageError:
            prices[basis] = None
        else:
            prices[basis] = {**price.model_dump(), "flags": price.flags(today)}
    hosted = catalogue.hosted(name)
    return {"type": name, **instance.model_dump(exclude={"prices"}), "hosted_by_sagemaker": hosted, "prices": prices}


def _list(console: "Console", catalogue: "Catalogue", names: Sequence[str], today: datetime.date) -> None:
    from rich.table import Table

    table = Table(
        title=f"USD per hour, {catalogue.region}",
        caption="* estimated, † stale or undated: `loadtest prices show TYPE` says why",
    )
    for column in ("type", "vCPU", "GiB", "accelerator"):
        table.add_column(column, justify="right" if column in ("vCPU", "GiB") else "left")
    for basis in ("EC2", "spot", "SageMaker"):
        table.add_column(basis, justify="right")
    for name in names:
        instance = catalogue.instance(name)
        accelerator = instance.accelerator
        device = f"{accelerator.count:g} × {accelerator.name}" if accelerator else ""
        cells = [_cell(catalogue, name, basis, today) for basis in _BASES]
        table.add_row(name, str(instance.vcpu), f"{instance.memory_gib:g}", device, *cells)
    console.print(table)


def _cell(catalogue: "Catalogue", name: str, basis: "PriceBasis", today: datetime.date) -> str:
    try:
        price = catalogue.price(name, basis)
    except UsageError:
        return _without_price(catalogue, name, basis)
    flags = price.flags(today)
    return f"{price.usd_per_hour:.4f}" + "*" * price.estimated + "†" * (len(flags) > price.estimated)


def _without_price(catalogue: "Catalogue", name: str, basis: "PriceBasis") -> str:
    return "EC2 only" if basis == "sagemaker" and not catalogue.hosted(name) else "unknown"


def _show(console: "Console", catalogue: "Catalogue", name: str, today: datetime.date) -> None:
    from rich.table import Table

    instance = catalogue.instance(name)
    bare = name.removeprefix("ml.")
    table = Table(
        "basis",
        "USD/h",
        "date",
        "flags",
        "source",
        title=f"{bare}: {instance.vcpu} vCPU, {instance.memory_gib:g} GiB, {instance.architecture}",
    )
    for basis in _BASES:
        try:
            price = catalogue.price(bare, basis)
        except UsageError:
            table.add_row(basis, _without_price(catalogue, bare, basis), "", "", "")
            continue
        table.add_row(basis, f"{price.usd_per_hour:.5g}", str(price.date or ""), ", ".join(price.flags(today)), price.source)
    console.print(table)
    if instance.spot is not None:
        console.print(f"spot capacity taken back in a month: {instance.spot.interruption} of instances")
