"""Settings of the server: lists of names, as the command line and a file give them."""

from typing import Any

import pytest

from lockstep.errors import ConfigError
from lockstep.serve.settings import ServerSettings


@pytest.mark.parametrize(("given", "found"), [(None, ()), ([], ()), (["a", "b"], ("a", "b"))])
def test_names_are_a_list(given: Any, found: tuple[str, ...]) -> None:
    assert ServerSettings(api_key=given).api_key == found
    assert ServerSettings(served_model_name=given).served_model_name == found


@pytest.mark.parametrize("given", ["secret", 5, {"a": 1}, [5], range(10**12)])
def test_what_is_no_list_of_texts_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match="api_key=.*allowed: keys of printable text"):
        ServerSettings(api_key=given)
    with pytest.raises(ConfigError, match="allowed_origins=.* is not allowed"):
        ServerSettings(allowed_origins=given)
