"""The playground in Chromium, driven by playwright, against servers in this process."""

import json
import re
import shlex
import shutil
import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect, sync_playwright

from lockstep import LLM
from lockstep.serve.app import create_app
from lockstep.serve.http.access import AccessRules
from lockstep.serve.requests.service import Service
from tests.serve.live_server import MTP, SETTINGS, serving
from tests.waiting import wait_until

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium"),
]
TOOL = '[{"type": "function", "function": {"name": "get", "parameters": {"type": "object"}}}]'
CALL = "<tool_call>\n<function=get>\n<parameter=city>\nRio\n</parameter>\n</function>\n</tool_call>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_playwright() as playwright:
        result = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield result
        result.close()


@pytest.fixture
def url(server: SimpleNamespace) -> Iterator[str]:
    """Yield the URL of the application over the fake client."""
    yield from listening(server.app)


def listening(app: Any) -> Iterator[str]:
    """Yield the URL of an application while it serves."""
    running = uvicorn.Server(uvicorn.Config(app, log_level="error", ws="none", lifespan="off"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=running.run, args=([listener],))
        thread.start()
        wait_until(lambda: running.started)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        running.should_exit = True
        running.force_exit = True
        thread.join(60)


@pytest.fixture
def page(browser: Any) -> Iterator[Page]:
    """Yield a page that logs no error and sends requests only to its server."""
    context = browser.new_context()
    result = context.new_page()
    errors: list[str] = []
    result.on("pageerror", lambda error: errors.append(str(error)))
    result.on(
        "console", lambda message: errors.append(message.text) if message.type == "error" else None
    )
    requested: list[str] = []
    result.on("request", lambda request: requested.append(request.url))
    yield result
    context.close()
    refused = "Failed to load resource: the server responded with a status of 4"
    assert [text for text in errors if not text.startswith(refused)] == []
    assert {re.sub(r":\d+/.*", "", address) for address in requested} == {"http://127.0.0.1"}


def send_message(page: Page, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def test_answer_is_colored_by_token_source(page: Page, url: str, server: SimpleNamespace) -> None:
    server.text = "hello lazy fox"
    page.goto(url)
    expect(page.locator("#model")).to_have_text("tiny")
    send_message(page, "the fox")
    expect(page.locator("#status")).to_contain_text("Done: ")
    answer = page.locator(".answer")
    assert answer.text_content() == "hello lazy fox"
    (request,) = server.client.requests
    tokens = answer.locator(".token")
    assert tokens.count() == len(request.output_token_ids) - 1, "the end's token has no text"
    kinds = [tokens.nth(i).get_attribute("class") for i in range(3)]
    assert kinds == ["token draft", "token draft", "token bonus"]
    expect(page.locator("#model")).to_have_text("tiny, ls-test")
    counted = [int(page.locator(f"#count-{k}").inner_text()) for k in ("draft", "bonus", "plain")]
    assert sum(counted) == len(request.output_token_ids) and counted[2] == 0
    expect(page.locator("#length")).not_to_have_text("–")
    expect(page.locator("#cache-share")).to_have_text("0.0 %")
    tints = "e => getComputedStyle(e).backgroundColor"
    assert tokens.nth(0).evaluate(tints) != tokens.nth(2).evaluate(tints)
    page.get_by_label("Color tokens by source").uncheck()
    assert tokens.nth(0).evaluate(tints) == tokens.nth(2).evaluate(tints)


def test_compare_detects_differences(
    page: Page, url: str, server: SimpleNamespace, processor: Any
) -> None:
    page.goto(url)
    page.keyboard.press("Alt+c")
    send_message(page, "the fox")
    verdict = page.locator(".agreement")
    expect(verdict).to_have_text(re.compile(r"All \d+ tokens are equal\."))
    one, other = server.client.requests
    assert (one.speculate, other.speculate) == (True, False)
    assert other.seed == one.seed
    assert one.prompt_token_ids == other.prompt_token_ids
    assert page.locator(".run").nth(1).locator(".draft, .bonus").count() == 0
    assert page.locator(".token.other").count() == 0
    plain = server.client.answer
    (wrong, *_) = processor.tokenizer.encode("zebra")
    server.client.answer = lambda request: (
        plain(request) if request.speculate else [plain(request)[0], wrong, server.eos]
    )
    page.keyboard.press("Alt+r")
    expect(page.locator("#status")).to_have_text("The answers differ from token 2 on.")
    assert page.locator(".token.other").count() >= 1


def test_keyboard_shortcuts(page: Page, url: str, server: SimpleNamespace) -> None:
    page.goto(url)
    field = page.get_by_label("Message", exact=True)
    expect(field).to_be_focused()
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    expect(field).to_have_value("one\ntwo")
    page.keyboard.press("Alt+s")
    expect(page.locator("#settings")).to_be_hidden()
    expect(page.locator("#show-settings")).to_have_attribute("aria-expanded", "false")
    page.keyboard.press("Alt+h")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_be_hidden()
    page.keyboard.press("Alt+t")
    expect(page.locator("html")).to_have_attribute("data-theme", "light")
    page.keyboard.press("Enter")
    expect(page.locator("#status")).to_contain_text("Done: ")
    expect(page.locator(".user .text")).to_have_text("one\ntwo")
    page.keyboard.press("Alt+n")
    expect(page.locator(".message")).to_have_count(0)
    expect(field).to_be_focused()


def test_escape_stops_generation(page: Page, url: str, server: SimpleNamespace) -> None:
    server.client.hang = True
    server.client.answer = lambda request: request.prompt_token_ids[:6]
    page.goto(url)
    send_message(page, "the quick fox")
    expect(page.locator("#log")).to_have_attribute("aria-busy", "true")
    expect(page.locator(".assistant .figures")).to_contain_text("tokens")
    page.keyboard.press("Escape")
    expect(page.locator("#status")).to_contain_text("Stopped after ")
    expect(page.locator("#log")).to_have_attribute("aria-busy", "false")
    wait_until(lambda: len(server.client.aborted) == 1)
    server.client.hang = False
    page.keyboard.press("Alt+r")
    expect(page.locator("#status")).to_contain_text("Done: ")


def test_tool_results_continue_the_chat(
    page: Page, url: str, server: SimpleNamespace, processor: Any
) -> None:
    page.goto(url)
    page.get_by_label("Tools (JSON list)").fill(TOOL)
    server.text = CALL
    send_message(page, "the fox")
    card = page.locator(".call")
    expect(card.locator("h3")).to_have_text("get")
    expect(card.locator("pre")).to_contain_text('"city": "Rio"')
    written = page.locator(".written")
    assert written.locator(".text").text_content() == CALL
    assert written.locator(".draft").count() > written.locator(".bonus").count() > 0
    field = page.get_by_label("Result of get")
    expect(field).to_be_focused()
    send_message(page, "something else")
    expect(page.locator("#status")).to_contain_text("results of the tool calls first")
    server.text = "hello"
    field.fill("sunny")
    field.press("Control+Enter")
    expect(page.locator("#status")).to_contain_text("Done: ")
    last = server.client.requests[-1]
    assert "sunny" in processor.decode(last.prompt_token_ids)


def test_schema_field_constrains_the_answer(page: Page, url: str, server: SimpleNamespace) -> None:
    page.goto(url)
    field = page.get_by_label("JSON schema of the answer")
    field.fill("[1]")
    send_message(page, "the fox")
    expect(page.locator("#schema-problem")).to_have_text("Allowed: an object with a JSON schema.")
    assert server.client.requests == []
    field.fill('{"type": "object"}')
    page.keyboard.press("Alt+r")
    expect(page.locator("#status")).to_contain_text("Done: ")
    (request,) = server.client.requests
    assert request.params.structured_outputs.json == {"type": "object"}


def test_reasoning_is_shown_separately(page: Page, url: str, server: SimpleNamespace) -> None:
    server.text = "so it is\n</think>\n\nyes"
    page.route("**/v1/chat/completions", thinking)
    page.goto(url)
    send_message(page, "the fox")
    expect(page.locator("#status")).to_contain_text("Done: ")
    assert page.locator(".reasoning .text").text_content() == "so it is"
    assert page.locator(".answer").text_content() == "yes"
    assert page.locator(".reasoning .token.draft").count() > 0
    assert page.locator(".answer .token").count() > 0


def thinking(route: Any) -> None:
    """Forward a request with the model's reasoning switched on."""
    body = route.request.post_data_json | {"chat_template_kwargs": {"enable_thinking": True}}
    route.continue_(post_data=json.dumps(body))


def test_invalid_fields_are_focused(page: Page, url: str, server: SimpleNamespace) -> None:
    page.goto(url)
    tools = page.get_by_label("Tools (JSON list)")
    tools.fill("[{")
    send_message(page, "the fox")
    expect(page.locator("#tools-problem")).to_contain_text("This is not valid JSON")
    expect(tools).to_have_attribute("aria-invalid", "true")
    expect(tools).to_be_focused()
    assert server.client.requests == []
    tools.fill("")
    page.locator("[data-field=min_p]").fill("1")
    page.get_by_label("Max tokens").fill("100000000000")
    page.keyboard.press("Alt+r")
    expect(page.locator("#status")).to_contain_text("max_tokens=100000000000 is not allowed")
    expect(page.get_by_label("Max tokens")).to_be_focused()


def test_api_key_is_requested(page: Page, server: SimpleNamespace, processor: Any) -> None:
    service = Service(server.client, processor, "tiny", "ls-test")
    for url in listening(create_app(service, AccessRules(keys=("secret",)))):
        page.goto(url)
        key = page.get_by_label("API key")
        expect(key).to_be_focused()
        key.fill("secret")
        key.press("Tab")
        expect(page.locator("#model")).to_have_text("tiny")
        send_message(page, "the fox")
        expect(page.locator("#status")).to_contain_text("Done: ")
        assert page.evaluate("localStorage.length") == 0
        assert "secret" not in page.evaluate("JSON.stringify(sessionStorage)")
        assert page.evaluate("document.cookie") == ""


def test_model_text_is_never_markup(page: Page, url: str, server: SimpleNamespace) -> None:
    server.text = "<img src=x onerror=alert(1)> <b>fox</b>"
    page.goto(url)
    send_message(page, "<script>alert(1)</script>")
    expect(page.locator("#status")).to_contain_text("Done: ")
    assert page.locator(".answer").text_content() == server.text
    assert page.locator(".message img, .message b, .message script").count() == 0


def test_markdown_keeps_tokens_without_markup(
    page: Page, url: str, server: SimpleNamespace
) -> None:
    server.text = (
        "# A *head*\n\n- one **two**\n- `a*b*c` <b>\n\n```py\nx = [1]\n```\n"
        "[ok](https://a.example/) [no](javascript:alert(1)) ![i](data:x)"
    )
    page.goto(url)
    send_message(page, "the fox")
    expect(page.locator("#status")).to_contain_text("Done: ")
    answer = page.locator(".answer")
    assert answer.locator(".heading em").text_content() == "head"
    assert answer.locator("li").all_text_contents() == ["one two", "a*b*c <b>"]
    assert answer.locator("pre code").text_content() == "x = [1]"
    links = answer.locator("a")
    assert [links.nth(i).get_attribute("href") for i in range(links.count())] == [
        "https://a.example/"
    ]
    assert answer.locator("b, img, script").count() == 0
    assert answer.locator(".token.draft").count() > 0
    page.get_by_label("Render Markdown").uncheck()
    page.keyboard.press("Alt+r")
    expect(page.locator("#status")).to_contain_text("Done: ")
    assert page.locator(".answer").text_content() == server.text


def test_examples_are_sent_by_click(page: Page, url: str, server: SimpleNamespace) -> None:
    page.goto(url)
    examples = page.locator(".example")
    assert examples.count() == 3
    examples.nth(2).click()
    expect(page.locator("#status")).to_contain_text("Done: ")
    expect(page.locator(".user .text")).to_have_text(examples.nth(2).text_content() or "")
    assert "get_weather" in page.get_by_label("Tools (JSON list)").input_value()


def test_chat_survives_reload(
    page: Page, url: str, server: SimpleNamespace, processor: Any
) -> None:
    server.text = "hello **lazy** fox"
    page.goto(url)
    send_message(page, "the fox")
    expect(page.locator("#status")).to_contain_text("Done: ")
    page.reload()
    expect(page.locator(".user .text")).to_have_text("the fox")
    expect(page.locator(".answer strong")).to_have_text("lazy")
    send_message(page, "the dog")
    expect(page.locator("#status")).to_contain_text("Done: ")
    prompt = processor.decode(server.client.requests[-1].prompt_token_ids)
    assert "the fox" in prompt and "hello **lazy** fox" in prompt
    page.keyboard.press("Alt+n")
    page.reload()
    expect(page.locator(".message")).to_have_count(0)
    expect(page.locator("#cache-share")).to_have_text("0.0 %")


def test_refused_message_is_removed_from_the_chat(
    page: Page, url: str, server: SimpleNamespace
) -> None:
    page.goto(url)
    page.get_by_label("Max tokens").fill("100000000000")
    send_message(page, "the fox")
    refused = page.locator(".refused .problem")
    expect(refused).to_contain_text("Not part of the chat: max_tokens=100000000000")
    expect(page.get_by_label("Message", exact=True)).to_have_value("the fox")
    page.get_by_label("Max tokens").fill("")
    page.get_by_label("Message", exact=True).fill("the dog")
    page.get_by_role("button", name="Send", exact=True).click()
    expect(page.locator("#status")).to_contain_text("Done: ")
    assert page.evaluate("JSON.parse(sessionStorage['lockstep-chat']).messages.length") == 2


def test_truncated_answer_is_marked(page: Page, url: str, server: SimpleNamespace) -> None:
    server.text = "hello lazy fox"
    page.goto(url)
    page.get_by_label("Max tokens").fill("2")
    send_message(page, "the fox")
    expect(page.locator("#status")).to_contain_text("Done: ")
    expect(page.locator(".cut")).to_contain_text(
        "Cut: the answer reached the maximum number of tokens"
    )


def test_request_is_copied_as_curl(page: Page, url: str, server: SimpleNamespace) -> None:
    """The line, split by a shell, sends the same request."""
    page.goto(url)
    page.evaluate("void (navigator.clipboard.writeText = () => Promise.reject())")
    page.get_by_label("API key").fill("secret")
    send_message(page, "the fox's")
    expect(page.locator("#status")).to_contain_text("Done: ")
    page.get_by_role("button", name="Copy as curl").click()
    words = shlex.split(page.get_by_label("The request as curl").input_value())
    assert words[:3] == ["curl", "-s", f"{url}/v1/chat/completions"]
    assert words[words.index("-H", 5) + 1] == "Authorization: Bearer KEY"
    body = json.loads(words[-1])
    assert body == {"messages": [{"role": "user", "content": "the fox's"}]}


def test_page_fits_320_pixels(browser: Any, url: str, server: SimpleNamespace) -> None:
    server.text = "hello " + "x" * 300 + "\n\n```\n" + "y" * 300 + "\n```"
    context = browser.new_context(viewport={"width": 320, "height": 640})
    page = context.new_page()
    page.goto(url)
    expect(page.locator("#settings")).to_be_hidden()
    page.get_by_label("Compare without speculation").check()
    send_message(page, "the fox")
    expect(page.locator(".agreement.good")).to_be_visible()
    for shown in (None, "Alt+s"):
        if shown:
            page.keyboard.press(shown)
        wide = "[...document.querySelectorAll('body *')].filter(e => e.getClientRects().length"
        wide += " && e.getBoundingClientRect().right > 321 && !e.closest('pre, .skip'))"
        assert page.evaluate(f"{wide}.map(e => e.outerHTML.slice(0, 80))") == []
    context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_violation(
    browser: Any, url: str, server: SimpleNamespace, scheme: str
) -> None:
    """A page with all elements visible satisfies axe's rules of WCAG and best practices."""
    context = browser.new_context(color_scheme=scheme)
    page = context.new_page()
    page.goto(url)
    page.get_by_label("Compare without speculation").check()
    send_message(page, "the fox")
    expect(page.locator(".agreement.good")).to_be_visible()
    page.get_by_label("Tools (JSON list)").fill(TOOL)
    server.text = f"so it is\n</think>\n\n{CALL}"
    send_message(page, "the fox")
    expect(page.locator(".call")).to_be_visible()
    for shown in (None, "Alt+h"):
        if shown:
            page.keyboard.press(shown)
        result = Axe().run(page)
        assert result.violations_count == 0, result.generate_report()
    context.close()


def test_axe_detects_low_contrast(page: Page, url: str) -> None:
    page.goto(url)
    faint = "document.documentElement.style.setProperty('--quiet', '#dddddd')"
    page.evaluate(faint)
    result = Axe().run(page)
    assert "color-contrast" in [violation["id"] for violation in result.response["violations"]]


def test_bundled_model_compares_equal(page: Page) -> None:
    """On a real server: sampled tokens, with drafts of the model's own module and without."""
    with serving(LLM(speculative_config=MTP, **SETTINGS)) as stack:
        page.goto(str(stack.http.base_url))
        page.get_by_label("Compare without speculation").check()
        page.get_by_label("Temperature").fill("0.8")
        page.get_by_label("Max tokens").fill("60")
        send_message(page, "List the first 12 primes.")
        verdict = page.locator(".agreement")
        expect(verdict).to_have_text(re.compile(r"All \d+ tokens are equal"), timeout=60_000)
        first, second = (page.locator(".run").nth(i) for i in range(2))
        assert first.locator(".answer").text_content() == second.locator(".answer").text_content()
        assert first.locator(".draft").count() > 0
        assert second.locator(".draft, .bonus").count() == 0
