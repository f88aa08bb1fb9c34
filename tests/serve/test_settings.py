"""Settings of the server: lists of names from the command line and from a file."""

from typing import Any

import pytest

from lockstep.errors import ConfigError
from lockstep.serve.settings import ServerSettings


@pytest.mark.parametrize(("value", "expected"), [(None, ()), ([], ()), (["a", "b"], ("a", "b"))])
def test_names_are_read_as_lists(value: Any, expected: tuple[str, ...]) -> None:
    assert ServerSettings(api_key=value).api_key == expected
    assert ServerSettings(served_model_name=value).served_model_name == expected


@pytest.mark.parametrize("value", ["secret", 5, {"a": 1}, [5], range(10**12)])
def test_invalid_lists_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="api_key=.*allowed: keys of printable text"):
        ServerSettings(api_key=value)
    with pytest.raises(ConfigError, match="allowed_origins=.* is not allowed"):
        ServerSettings(allowed_origins=value)
