"""Access rules: hosts, API keys, request bodies."""

import asyncio
import json

import httpx
import pytest

from lockstep.serve.app import create_app
from lockstep.serve.http.access import AccessRules, default_hosts
from lockstep.serve.requests.service import Service
from tests.serve.api_calls import TEXT_PATH


def send(server, processor, rules, method="GET", path="/health", docs=True, more=None, **options):
    service = Service(server.client, processor, "tiny", "ls-test")
    app = create_app(service, rules, docs, **(more or {}))
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)

    async def run():
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, **options)

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (None, 401),
        ("Bearer", 401),
        ("Bearer ", 401),
        ("Bearer wrong", 401),
        ("Basic one", 401),
        ("one", 401),
        ("Bearer one", 200),
        ("bearer two", 200),
    ],
)
def test_api_keys(server, processor, sent, status):
    rules = AccessRules(keys=("one", "two"))
    headers = {"Authorization": sent} if sent else {}
    response = send(server, processor, rules, path="/v1/models", headers=headers)
    assert response.status_code == status
    if status == 401:
        assert response.json()["error"]["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"
    for path in ("/metrics", "/openapi.json", "/docs", "/nowhere"):
        assert send(server, processor, rules, path=path).status_code == 401
    assert send(server, processor, rules).status_code == 200, "probes have no key"


def test_docs_can_be_disabled(server, processor):
    for path in ("/docs", "/redoc", "/openapi.json"):
        assert send(server, processor, AccessRules(), path=path, docs=False).status_code == 404


def test_tokenizer_info_requires_opt_in(server, processor):
    path = "/tokenizer_info"
    assert send(server, processor, AccessRules(), path=path).status_code == 404
    info = send(server, processor, AccessRules(), path=path, more={"tokenizer_info": True}).json()
    tokenizer = processor.tokenizer
    assert info["chat_template"] == tokenizer.chat_template
    assert info["eos_token"] == tokenizer.special_tokens["eos_token"]
    assert len(tokenizer.encode(info["eos_token"], False)) == 1
    assert info.keys() >= tokenizer.config.keys()


def test_reset_prefix_cache_requires_opt_in(server, processor):
    path = "/reset_prefix_cache"
    assert send(server, processor, AccessRules(), "POST", path).status_code == 404
    response = send(server, processor, AccessRules(), "POST", path, more={"cache_reset": True})
    assert (response.status_code, server.client.resets) == (200, 1)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LocalHost:8000", 200),
        ("127.0.0.1:80", 200),
        ("[::1]:80", 200),
        ("[::1]", 200),
        ("evil.example", 400),
        ("localhost.evil.example", 400),
        ("evil.example:localhost", 400),
        ("", 400),
    ],
)
def test_allowed_hosts(server, processor, host, status):
    rules = AccessRules(hosts=default_hosts("127.0.0.1"))
    response = send(server, processor, rules, headers={"Host": host})
    assert response.status_code == status
    if status == 400:
        assert "--allowed-hosts" in response.json()["error"]["message"]


def test_default_hosts_of_addresses():
    assert default_hosts("0.0.0.0") == default_hosts("::") == default_hosts("10.1.2.3") == ("*",)
    assert "127.0.0.5" in default_hosts("127.0.0.5")


def test_too_large_body_by_header_and_by_length(server, processor):
    rules = AccessRules(max_body_bytes=1000)
    body = json.dumps({"prompt": "x" * 2000}).encode()
    headers = {"Content-Type": "application/json"}
    response = send(server, processor, rules, "POST", TEXT_PATH, content=body, headers=headers)
    assert response.status_code == 413 and "--max-body-size" in response.json()["error"]["message"]

    async def parts():
        for at in range(0, len(body), 100):
            yield body[at : at + 100]

    response = send(server, processor, rules, "POST", TEXT_PATH, content=parts(), headers=headers)
    assert (
        response.status_code == 413 and response.json()["error"]["type"] == "invalid_request_error"
    )
    small = send(server, processor, rules, "POST", TEXT_PATH, json={"prompt": "x"})
    assert small.status_code == 200


def test_content_length_with_transfer_encoding_is_refused(server, processor):
    headers = {"Content-Length": "3", "Transfer-Encoding": "chunked"}
    response = send(
        server, processor, AccessRules(), "POST", TEXT_PATH, content=b"{}x", headers=headers
    )
    assert (
        response.status_code == 400 and "exclude each other" in response.json()["error"]["message"]
    )
    assert response.headers["connection"] == "close"


@pytest.mark.parametrize("length", ["-1", "x", "9" * 5000])
def test_invalid_content_lengths_are_refused(server, processor, length):
    headers = {"Content-Length": length}
    response = send(
        server, processor, AccessRules(), "POST", TEXT_PATH, content=b"", headers=headers
    )
    assert response.status_code in (400, 413) and response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("encoding", "status"), [("gzip", 415), ("identity", 200), ("br, gzip", 415)]
)
def test_compressed_bodies_are_refused(server, processor, encoding, status):
    """Also one that decompresses to a thousand times its size."""
    headers = {"Content-Encoding": encoding}
    response = send(
        server, processor, AccessRules(), "POST", TEXT_PATH, json={"prompt": "x"}, headers=headers
    )
    assert response.status_code == status
    assert status == 200 or "as it is" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "output"),
    [
        (b'{"prompt": "\xff"}', "codec can't decode"),
        (b'{"prompt": ' + b"[" * 10_000, "recursion depth"),
        (b'{"prompt": ' + b"9" * 5000 + b"}", "limit (4300 digits)"),
    ],
)
def test_invalid_json_bodies_are_refused(server, processor, body, output):
    headers = {"Content-Type": "application/json"}
    response = send(
        server, processor, AccessRules(), "POST", TEXT_PATH, content=body, headers=headers
    )
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert message.startswith("the body is not JSON: ")
    assert output in message


def scope_of(path=TEXT_PATH):
    headers = [(b"host", b"test"), (b"content-type", b"application/json")]
    return {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": headers,
        "http_version": "1.1",
        "scheme": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "root_path": "",
        "server": ("test", 80),
        "client": ("test", 1),
    }


def test_missing_body_times_out(server, processor):
    service = Service(server.client, processor, "tiny", "ls-test")
    app = create_app(service, AccessRules(max_body_seconds=0.05))
    sent = []

    async def receive():
        if not sent:
            sent.append(None)
            return {"type": "http.request", "body": b"{", "more_body": True}
        await asyncio.sleep(3600)

    result = []

    async def send(message):
        result.append(message)

    asyncio.run(asyncio.wait_for(app(scope_of(), receive, send), 5))
    assert result[0]["status"] == 408 and b"did not come" in result[1]["body"]
