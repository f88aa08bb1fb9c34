"""The playground page at /, and its API fields: token sources, and runs without drafts."""

import asyncio
import json
import re

import pytest

from lockstep.serve.app import create_app
from lockstep.serve.http.access import OPEN_PATHS, AccessRules
from lockstep.serve.playground import FILES
from lockstep.serve.requests.service import Service

USER = [{"role": "user", "content": "the fox"}]
CHAT = {"messages": USER, "max_tokens": 50}
TEXT = {"prompt": "the", "max_tokens": 50}
TYPES = {
    "/": "text/html",
    "/playground/app.css": "text/css",
    "/playground/app.js": "text/javascript",
    "/playground/markdown.js": "text/javascript",
}


def fetch(server, method, path, **options):
    async def run():
        async with server.http() as client:
            return await client.request(method, path, **options)

    return asyncio.run(run())


def chunks(server, path, body):
    """Return the chunks of a stream."""
    answer = fetch(server, "POST", path, json=body | {"stream": True})
    assert answer.status_code == 200, answer.text
    events = [event.removeprefix("data: ") for event in answer.text.split("\n\n") if event]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


@pytest.mark.parametrize("path", TYPES)
def test_page_files_and_headers(server, path):
    answer = fetch(server, "GET", path)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == f"{TYPES[path]}; charset=utf-8"
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
    assert "unsafe" not in policy and "*" not in policy and "http" not in policy
    assert "frame-ancestors 'none'" in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"


def test_page_links_no_other_origin(server):
    for file in FILES:
        text = fetch(server, "GET", file.path).text
        assert not re.search(r"https?:|//[a-z]|@import|url\(", text.replace("// ", "")), file.name


def test_content_security_policy_allows_the_page(server):
    """The page has no inline script or style, and the server has all files that it links."""
    page = fetch(server, "GET", "/").text
    assert not re.search(r"<style|style=|\son\w+=|<script(?![^>]*src=)", page)
    linked = re.findall(r'(?:src|href)="([^"#:]+)"', page)
    assert sorted(f"/{path}" for path in linked) == sorted(f.path for f in FILES if f.path != "/")


def test_script_uses_existing_elements(server):
    page = fetch(server, "GET", "/").text
    script = fetch(server, "GET", "/playground/app.js").text
    ids = set(re.findall(r'\bid="([\w-]+)"', page))
    named = set(re.findall(r'\$\("([\w-]+)"\)', script))
    assert named and named <= ids
    labelled = set(re.findall(r'\b(?:for|aria-labelledby|aria-controls)="([\w-]+)"', page))
    described = set(re.findall(r'\baria-describedby="([\w-]+)"', page))
    assert labelled | described <= ids


def test_every_control_has_a_label(server):
    page = fetch(server, "GET", "/").text
    for control in re.finditer(r"<(?:input|select|textarea)\b[^>]*>", page):
        result = re.search(r'\bid="([\w-]+)"', control[0])
        before = page[: control.start()]
        inside = before.rfind("<label") > before.rfind("</label>")
        assert inside or (result and f'for="{result[1]}"' in page), control[0]


def test_page_needs_no_api_key(server, processor):
    service = Service(server.client, processor, "tiny", "ls-test")
    server.app = create_app(service, AccessRules(keys=("secret",)))
    assert {file.path for file in FILES} <= set(OPEN_PATHS)
    for file in FILES:
        assert fetch(server, "GET", file.path).status_code == 200
    assert fetch(server, "POST", "/v1/chat/completions", json=CHAT).status_code == 401
    assert fetch(server, "GET", "/metrics").status_code == 401


def test_playground_can_be_disabled(server, processor):
    service = Service(server.client, processor, "tiny", "ls-test")
    server.app = create_app(service, playground=False)
    for file in FILES:
        assert fetch(server, "GET", file.path).status_code == 404


def test_page_works_under_root_path(server, processor):
    service = Service(server.client, processor, "tiny", "ls-test")
    server.app = create_app(service, AccessRules(keys=("secret",), root_path="/llm"))
    assert fetch(server, "GET", "/llm/").status_code == 200
    assert fetch(server, "GET", "/llm/playground/app.js").status_code == 200
    page = fetch(server, "GET", "/llm/").text
    assert 'src="playground/' in page, "paths are relative to the page's"


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)]
)
def test_token_sources_match_token_ids(server, path, body):
    server.text = "hello lazy fox"
    expected = body | {"return_token_sources": True, "return_token_ids": True}
    (choice,) = fetch(server, "POST", path, json=expected).json()["choices"]
    sources = choice["token_sources"]
    assert len(sources) == len(choice["token_ids"])
    assert "".join(entry["text"] for entry in sources) == server.text
    assert [entry["source"] for entry in sources[:3]] == ["draft", "draft", "bonus"]
    parts = [c for chunk in chunks(server, path, expected) for c in chunk["choices"]]
    assert [entry for part in parts for entry in part["token_sources"]] == sources
    for part in parts:
        assert len(part["token_sources"]) == len(part["token_ids"])


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)]
)
def test_token_sources_are_opt_in(server, path, body):
    answer = fetch(server, "POST", path, json=body)
    assert "token_sources" not in answer.json()["choices"][0]
    assert "token_sources" not in str(chunks(server, path, body))


@pytest.mark.parametrize("name", ["speculate", "return_token_sources"])
def test_invalid_switches_are_refused(server, name):
    answer = fetch(server, "POST", "/v1/chat/completions", json=CHAT | {name: "perhaps"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)]
)
def test_speculate_field_reaches_requests(server, path, body):
    for more, expected in (({}, True), ({"speculate": None}, True), ({"speculate": False}, False)):
        server.client.requests.clear()
        answer = fetch(server, "POST", path, json=body | more | {"return_token_sources": True})
        assert "X-Lockstep-Ignored-Fields" not in answer.headers
        assert [request.speculate for request in server.client.requests] == [expected]
        sources = {entry["source"] for entry in answer.json()["choices"][0]["token_sources"]}
        assert ("draft" in sources) == expected


def test_tokens_after_stop_string_have_no_source(server):
    server.text = "hello lazy fox"
    body = CHAT | {"stop": ["lazy"], "return_token_sources": True, "return_token_ids": True}
    (choice,) = fetch(server, "POST", "/v1/chat/completions", json=body).json()["choices"]
    assert choice["message"]["content"] == "hello "
    assert len(choice["token_sources"]) == len(choice["token_ids"])
    assert "".join(entry["text"] for entry in choice["token_sources"]) == "hello "


@pytest.mark.parametrize("tokens", range(1, 7))
def test_usage_counts_accepted_drafts_of_the_answer(server, tokens):
    """A step may verify more drafts than the answer has room for."""
    server.text = "hello lazy fox"
    body = CHAT | {"return_token_sources": True, "max_tokens": tokens}
    answer = fetch(server, "POST", "/v1/chat/completions", json=body).json()
    sources = [entry["source"] for entry in answer["choices"][0]["token_sources"]]
    details = answer["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] == sources.count("draft")
    (request,) = server.client.requests
    drafted = request.metrics.num_draft_tokens
    assert details["rejected_prediction_tokens"] == drafted - sources.count("draft")
    received = {"stream_options": {"include_usage": True}}
    last = chunks(server, "/v1/chat/completions", body | received)[-1]
    assert last["usage"] == answer["usage"]


def test_token_sources_only_in_chat_and_completions(server):
    for path, body in (
        ("/v1/responses", {"input": "the fox"}),
        ("/v1/messages", {"messages": USER, "max_tokens": 50, "model": "tiny"}),
    ):
        refused = fetch(server, "POST", path, json=body | {"return_token_sources": True})
        assert refused.status_code == 400 and "return_token_sources" in refused.text
        answer = fetch(server, "POST", path, json=body | {"speculate": False})
        assert answer.status_code == 200
        ignored = answer.headers.get("X-Lockstep-Ignored-Fields")
        assert ignored == ("speculate" if path == "/v1/messages" else None)
