"""Which signal ended a run, also where another exception was raised on its way."""

import signal

import pytest

from harness.util.signals import Signalled, deferred, ended_by, interrupt, raise_once, signal_of

NUMBERS = {"INT": signal.SIGINT, "TERM": signal.SIGTERM, "HUP": signal.SIGHUP}


@pytest.fixture(autouse=True)
def handlers():
    before = {number: signal.signal(number, interrupt) for number in NUMBERS.values()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("manner", ["at once", "once", "deferred", "then another"])
def test_the_signal_is_known_by_the_exception(name, manner):
    with pytest.raises(BaseException) as raised:
        if manner == "once":
            with raise_once():
                signal.raise_signal(NUMBERS[name])
        elif manner == "deferred":
            with deferred():
                signal.raise_signal(NUMBERS[name])
        elif manner == "then another":
            # As typer does.
            try:
                signal.raise_signal(NUMBERS[name])
            except KeyboardInterrupt as error:
                raise SystemExit(130) from error
        else:
            signal.raise_signal(NUMBERS[name])
    assert signal_of(raised.value) == name


def test_of_several_signals_the_first_counts():
    with pytest.raises(Signalled) as raised:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGINT)
    assert signal_of(raised.value) == "TERM"


def test_only_ctrl_c_is_said_to_be_the_user():
    assert signal_of(KeyboardInterrupt()) == signal_of(Signalled(signal.SIGINT)) == "INT"
    assert [name for name in NUMBERS if "by the user" in ended_by(name)] == ["INT"]
    # Records of earlier versions do not tell.
    assert ended_by(None) == "interrupted by Ctrl-C or a signal"
