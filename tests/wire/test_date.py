from datetime import UTC, datetime

import pytest

from gateway.wire import date


def test_it_has_the_form_of_the_standard_and_follows_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 784111777.25  # the example of RFC 9110, 5.6.7
    monkeypatch.setattr(date.time, "time", lambda: now_s)
    assert date.date_line() == b"Date: Sun, 06 Nov 1994 08:49:37 GMT\r\n"
    now_s += 0.7
    assert date.date_line() == b"Date: Sun, 06 Nov 1994 08:49:37 GMT\r\n"
    now_s += 0.1
    assert date.date_line() == b"Date: Sun, 06 Nov 1994 08:49:38 GMT\r\n"
    now_s -= 3600  # a clock that is set back
    assert date.date_line() == b"Date: Sun, 06 Nov 1994 07:49:38 GMT\r\n"


def test_it_is_of_now() -> None:
    told = date.date_line().decode().removeprefix("Date: ").strip()
    moment = datetime.strptime(told, "%a, %d %b %Y %H:%M:%S GMT").replace(tzinfo=UTC)
    assert abs((datetime.now(UTC) - moment).total_seconds()) < 5
