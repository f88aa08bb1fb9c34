"""Options of the server: model names, sampling defaults, root path, CORS, limit of logprobs."""

import asyncio

import httpx
import pytest

from lockstep.serve.app import CrossOrigin, create_app
from lockstep.serve.http.access import AccessRules
from lockstep.serve.requests.service import Limits, Service
from lockstep.text.processor import Processor
from lockstep.text.settings import TextSettings
from lockstep.text.tokenizers.tokenizer import Tokenizer
from tests.text.tiny_tokenizer import make_folder


@pytest.fixture
def bounded(tmp_path):
    """Return a processor with the user's defaults and at most 2 new tokens."""
    folder = make_folder(tmp_path)
    chosen = {"temperature": 0.25, "max_new_tokens": 2}
    settings = TextSettings(generation_config="vllm", override_generation_config=chosen)
    return Processor.for_model(Tokenizer(folder), folder, 512, settings)


def send(server, processor, method, path, *, limits=None, aliases=(), app=None, **options):
    service = Service(server.client, processor, "first", "ls-test", limits, aliases)
    application = create_app(service, **(app or {}))
    transport = httpx.ASGITransport(app=application, raise_app_exceptions=False)

    async def run():
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, **options)

    return asyncio.run(run())


@pytest.mark.parametrize(("name", "status"), [("first", 200), ("second", 200), ("third", 404)])
def test_every_served_model_name_answers(server, processor, name, status):
    requested = {"model": name, "prompt": "the", "max_tokens": 5}
    response = send(
        server, processor, "POST", "/v1/completions", aliases=["second"], json=requested
    )
    assert response.status_code == status
    if status == 200:
        assert response.json()["model"] == "first"
    else:
        assert "'first', 'second'" in response.json()["error"]["message"]
    one = send(server, processor, "GET", f"/v1/models/{name}", aliases=["second"])
    assert one.status_code == status


def test_models_list_names_and_defaults(server, bounded):
    data = send(server, bounded, "GET", "/v1/models", aliases=["second", "first"]).json()["data"]
    assert [(one["id"], one["root"]) for one in data] == [("first", "first"), ("second", "first")]
    assert data[0]["default_sampling_params"] == {"temperature": 0.25, "max_tokens": 2}


@pytest.mark.parametrize(
    ("sent", "maximum"), [({}, 2), ({"max_tokens": 9}, 2), ({"max_tokens": 1}, 1)]
)
def test_sampling_defaults_and_limits_of_requests(server, bounded, sent, maximum):
    for path, body in (
        ("/v1/completions", {"prompt": "the"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "the"}]}),
    ):
        server.client.requests.clear()
        assert send(server, bounded, "POST", path, json={**body, **sent}).status_code == 200
        (request,) = server.client.requests
        assert (request.params.temperature, request.params.max_tokens) == (0.25, maximum)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "the", "logprobs": 3}),
        ("/v1/completions", {"prompt": "the", "prompt_logprobs": 3}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 3},
        ),
    ],
)
def test_max_logprobs(server, processor, path, body):
    response = send(server, processor, "POST", path, limits=Limits(max_logprobs=2), json=body)
    assert response.status_code == 400 and "0 to 2 (--max-logprobs)" in response.text
    assert send(
        server, processor, "POST", path, limits=Limits(max_logprobs=3), json=body
    ).is_success


@pytest.mark.parametrize("prefix", ["", "/llm"])
def test_root_path_behind_a_proxy(server, processor, prefix):
    """A proxy may remove its path or keep it; the API's page names it."""
    app = {"rules": AccessRules(keys=("k",), root_path="/llm")}
    assert send(server, processor, "GET", f"{prefix}/health", app=app).status_code == 200
    assert send(server, processor, "GET", f"{prefix}/v1/models", app=app).status_code == 401
    key = {"Authorization": "Bearer k"}
    response = send(server, processor, "GET", f"{prefix}/v1/models", app=app, headers=key)
    assert response.status_code == 200
    docs = send(server, processor, "GET", f"{prefix}/docs", app=app, headers=key)
    assert "/llm/openapi.json" in docs.text


ORIGIN = {"Origin": "https://page.example"}
BEFORE = {**ORIGIN, "Access-Control-Request-Method": "POST"}


def test_allowed_origins(server, processor):
    """Browsers send a preflight request first, without a key."""
    app = {
        "rules": AccessRules(keys=("k",)),
        "cross_origin": CrossOrigin(("https://page.example",)),
    }
    path = "/v1/completions"
    first = send(server, processor, "OPTIONS", path, app=app, headers=BEFORE)
    assert first.status_code == 200
    assert first.headers["access-control-allow-origin"] == "https://page.example"
    other = {**BEFORE, "Origin": "https://other.example"}
    refused = send(server, processor, "OPTIONS", path, app=app, headers=other)
    assert refused.status_code == 400
    without_key = send(server, processor, "GET", "/v1/models", app=app, headers=ORIGIN)
    assert without_key.status_code == 401, "an origin is no key"
    shut = send(server, processor, "GET", "/health", headers=ORIGIN)
    assert "access-control-allow-origin" not in shut.headers
