"""Log lines of what clients send."""

import logging

from lockstep.serve.logs import LONGEST, OneLine, escaped


def record(message: str, *args: object, name: str = "lockstep.serve") -> logging.LogRecord:
    return logging.LogRecord(name, logging.WARNING, "file", 1, message, args, None)


def test_one_line_whatever_is_in_it():
    line = record("fields were ignored: %s", "a\nERROR forged\r\x1b[31m\u2028end é")
    assert OneLine().filter(line)
    assert line.getMessage() == ("fields were ignored: a\\nERROR forged\\r\\x1b[31m\\u2028end é")
    assert len(escaped("x" * 10**6)) < LONGEST + 10


def test_the_same_line_once():
    one = OneLine()
    assert [one.filter(record("invalid")) for _ in range(5)] == [True, *[False] * 4]
    assert one.filter(record("something else"))


def test_access_lines_are_all_written():
    one = OneLine()
    for _ in range(3):
        line = record('%s - "%s %s"', "client", "GET", "/x\ny", name="uvicorn.access")
        assert one.filter(line) and "\n" not in line.getMessage()
