"""How an ingress ends those in whose place it answers, and how it ends itself: without Ray."""

import asyncio
import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest
import ray

from gateway.cluster import leaving
from gateway.cluster.deployments import IngressReplica
from gateway.cluster.leaving import Leaving, elsewhere
from gateway.errors import InternalError

PREFIX = "SERVE_REPLICA::g#ingress#"
ME, OLD, FAR, WAITS = (f"{PREFIX}{name}" for name in ("me", "old", "far", "waits"))


class Node:
    """What Ray and Serve's controller know, and what was asked of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **nodes: str | None) -> None:
        self.nodes = {f"{PREFIX}{name}": node for name, node in nodes.items()}
        self.fault: Exception | None = None
        self.looks = self.asked = 0
        self.shut_down: list[str] = []
        self.killed: list[str] = []
        self.drained = asyncio.Event()
        monkeypatch.setattr(leaving, "_SUCCEED_S", 0)
        monkeypatch.setattr(leaving, "replicas_of", self._replicas_of)
        monkeypatch.setattr(Leaving, "_ask_on", self._nothing)
        monkeypatch.setattr(Leaving, "_details", lambda _: self._details())
        monkeypatch.setattr(ray, "get_actor", self._actor)
        monkeypatch.setattr(ray, "kill", self._kill)

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(5):
            while not condition():  # noqa: ASYNC110  # of what threads change as well
                await asyncio.sleep(0)

    async def looked_twice(self) -> None:
        looks = self.looks
        await self.until(lambda: self.looks >= looks + 2)

    async def _nothing(self, *_: object) -> None: ...

    def _replicas_of(self, application: str) -> set[str]:
        self.looks += 1
        return {*self.nodes, f"SERVE_REPLICA::{application}#backend#x"}

    async def _details(self) -> dict[str, Any]:
        self.asked += 1
        if self.fault is not None:
            fault, self.fault = self.fault, None
            raise fault
        # Serve tells no key of what is not known.
        there: list[dict[str, Any]] = [
            {"actor_name": name, "state": "STARTING"}
            if node is None
            else {"actor_name": name, "state": "RUNNING", "node_id": node}
            for name, node in self.nodes.items()
        ]
        return {"deployments": {"ingress": {"required_resources": {"mine": 1.0}, "replicas": there}}}

    def _actor(self, name: str, namespace: str) -> Any:
        async def shut_down() -> None:
            self.shut_down.append(name)
            await self.drained.wait()

        return SimpleNamespace(name=name, perform_graceful_shutdown=SimpleNamespace(remote=shut_down))

    def _kill(self, actor: Any) -> None:
        self.killed.append(actor.name)
        del self.nodes[actor.name]


def test_an_ingress_ends_the_old_one_of_its_node_and_kills_it_once_it_has_drained(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        node = Node(monkeypatch, me="a", old="a", far="b")
        ours = Leaving("g", but="ingress")
        ours.succeed(ME, "mine", 60.0)
        await node.until(lambda: node.shut_down == [OLD])
        assert node.killed == []
        node.drained.set()
        await node.until(lambda: node.killed == [OLD])
        await ours.close()

    asyncio.run(test())


def test_an_ingress_that_stops_answering_ends_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        node = Node(monkeypatch, me="a", old="a")
        ours = Leaving("g", but="ingress")
        ours.succeed(ME, "mine", 60.0)
        await node.until(lambda: node.shut_down)
        ours.succeed_no_more()
        node.drained.set()
        for _ in range(20):
            await asyncio.sleep(0)
        assert (node.killed, node.asked) == ([], 1)
        await ours.close()

    asyncio.run(test())


def test_serves_controller_is_asked_only_while_an_ingress_may_be_on_this_node(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        node = Node(monkeypatch, me="a")
        ours = Leaving("g", but="ingress")
        ours.succeed(ME, "mine", 60.0)
        await node.looked_twice()
        assert node.asked == 0
        node.nodes[FAR] = "b"
        await node.until(lambda: node.asked)
        await node.looked_twice()
        assert node.asked == 1  # it stays there
        node.nodes[WAITS] = None
        await node.until(lambda: node.asked >= 3)
        await ours.close()

    asyncio.run(test())


def test_what_serve_tells_otherwise_than_expected_is_logged_and_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        node = Node(monkeypatch, me="a", old="a")
        node.fault = KeyError("replicas")
        ours = Leaving("g", but="ingress")
        ours.succeed(ME, "mine", 60.0)
        with caplog.at_level(logging.ERROR):
            await node.until(lambda: node.shut_down == [OLD])
        assert "in whose place this one answers could not be told" in caplog.text
        await ours.close()

    asyncio.run(test())


def test_who_is_elsewhere_is_known_of_those_that_have_a_node() -> None:
    nodes = {"me": "a", "beside": "a", "far": "b", "waits": None}
    details = {
        "deployments": {"ingress": {"replicas": [{"actor_name": name, "node_id": node} for name, node in nodes.items()]}}
    }
    assert elsewhere(details, "ingress", "me") == {"far"}
    assert (
        elsewhere(details, "ingress", "waits")
        == elsewhere(details, "ingress", "gone")
        == elsewhere({}, "ingress", "me")
        == set()
    )


class Draining(IngressReplica):
    """An ingress whose request in flight takes until it is told."""

    async def __init__(self, *, listened: bool = True) -> None:  # type: ignore[misc]  # as that of the class it is made of
        self.answered = asyncio.Event()
        self.ended: list[str] = []
        self._listened = listened
        self._control = None
        self._ingress = cast(Any, SimpleNamespace(drain=self.answered.wait, pools=[]))
        self._keeper = cast(Any, SimpleNamespace(close=self._nothing))
        self._held = cast(Any, SimpleNamespace(close=lambda: None))
        self._leaving = cast(Any, SimpleNamespace(close=self._nothing, succeed_no_more=lambda: self.ended.append("succeeding")))

    async def _nothing(self) -> None: ...


async def draining(**options: Any) -> Draining:
    made = Draining.__new__(Draining)
    await cast(Any, made.__init__)(**options)  # type: ignore[misc]  # as Serve makes it
    return made


def test_an_ingress_that_was_shut_down_ends_no_other_and_tells_so_while_it_drains() -> None:
    async def test() -> None:
        ingress = await draining()
        await ingress.check_health()
        shutdown = asyncio.ensure_future(cast(Any, ingress.__del__()))
        await asyncio.sleep(0)
        assert ingress.ended == ["succeeding"]
        with pytest.raises(InternalError, match="it has closed"):
            await ingress.check_health()
        assert not shutdown.done()  # what is in flight is answered
        ingress.answered.set()
        await shutdown

    asyncio.run(test())


def test_an_ingress_that_a_call_closes_tells_so_once_it_has_drained_and_one_that_loaded_does_not() -> None:
    """Serve would end the first at once, with what is in flight, and print a traceback of the other."""

    async def test() -> None:
        ingress = await draining()
        closing = asyncio.ensure_future(ingress.close())
        await asyncio.sleep(0)
        await ingress.check_health()
        ingress.answered.set()
        await closing
        with pytest.raises(InternalError, match="it has closed"):
            await ingress.check_health()
        loading = await draining(listened=False)
        loading.answered.set()
        await cast(Any, loading.__del__())
        await loading.check_health()

    asyncio.run(test())
