// The playground: a chat over /v1/chat/completions that shows the source of every token.
// This tab's session storage keeps the chat for reloads; the API key is only in its input element.

import { renderMarkdown } from "./markdown.js";

const $ = (id) => document.getElementById(id);

/** Create an element with properties and children; texts become text nodes, never markup. */
function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

/** An error that the user can correct. field: the input to correct; refused: the server refused the request. */
class Problem extends Error {
  constructor(message, field = null, refused = false) {
    super(message);
    this.field = field;
    this.refused = refused;
  }
}

/** Return the input of a request's field, such as temperature. */
function fieldNamed(name) {
  return [...document.querySelectorAll("[data-field]")].find((e) => e.dataset.field === name);
}

// --- Requests ---------------------------------------------------------------------------------

function headers() {
  const key = $("key").value.trim();
  return key ? { Authorization: `Bearer ${key}` } : {};
}

/** Send a GET, or a POST with a body, and return the response. Throws a Problem with the server's message. */
async function call(path, body, signal) {
  const options = { headers: headers(), signal };
  if (body) {
    options.method = "POST";
    options.headers["Content-Type"] = "application/json";
    options.body = JSON.stringify(body);
  }
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem("The server cannot be reached. Is it still running?");
  }
  if (response.ok) return response;
  const content = await response.json().catch(() => ({}));
  const message = content.error?.message ?? `The server returned status ${response.status}.`;
  const field = response.status === 401 ? $("key") : fieldNamed(content.error?.param);
  throw new Problem(message, field, response.status < 500);
}

/** Yield the chunks of a streamed response. */
async function* stream(body, signal) {
  const response = await call("v1/chat/completions", body, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      for (const event of events) {
        const data = event.replace(/^(id: .*\n)?data: /, "");
        if (data === "[DONE]") return;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new Problem(chunk.error.message, fieldNamed(chunk.error.param));
        yield chunk;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// --- Settings ---------------------------------------------------------------------------------

/** Return the value of a JSON input; undefined if it is empty. allowed: description of valid values. */
function readJson(id, fits, allowed) {
  const text = $(id).value.trim();
  let problem = "";
  let value;
  if (text) {
    try {
      value = JSON.parse(text);
      if (!fits(value)) problem = `Allowed: ${allowed}.`;
    } catch (error) {
      problem = `This is not valid JSON: ${error.message}.`;
    }
  }
  $(`${id}-problem`).textContent = problem;
  $(id).removeAttribute("aria-invalid");
  if (problem) throw new Problem(`${$(id).labels[0].textContent}: ${problem}`, $(id));
  return value;
}

const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
const readTools = () => readJson("tools", Array.isArray, "a list of tools");
const readSchema = () => readJson("schema", isObject, "an object with a JSON schema");

/** Return the numbers that are set, by the names of their fields. */
function readNumbers() {
  const numbers = {};
  for (const input of document.querySelectorAll("input[type=number]")) {
    if (!input.checkValidity()) {
      const name = input.labels[0].textContent.trim();
      throw new Problem(`${name}: ${input.validationMessage}`, input);
    }
    if (input.value !== "") numbers[input.dataset.field] = Number(input.value);
  }
  return numbers;
}

/** Return the body of a request for the present conversation. Throws a Problem. */
function request() {
  const body = {
    messages: conversation.messages(),
    ...readNumbers(),
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
    return_token_ids: true,
    return_token_sources: true,
  };
  const stops = $("stops").value.split("\n").filter((line) => line);
  if (stops.length) body.stop = stops;
  if ($("reasoning_effort").value) body.reasoning_effort = $("reasoning_effort").value;
  const tools = readTools();
  if (tools?.length) {
    body.tools = tools;
    body.tool_choice = $("tool_choice").value;
  }
  const schema = readSchema();
  if (schema) {
    const format = { name: "answer", schema, strict: true };
    body.response_format = { type: "json_schema", json_schema: format };
  }
  return body;
}

// --- One run of a request ---------------------------------------------------------------------

const SOURCES = {
  draft: "accepted draft token",
  bonus: "token of the model after drafts",
  plain: "token of a step without drafts",
};

/** Statistics of a run: tokens, steps and time. */
class Statistics {
  constructor() {
    this.counts = { draft: 0, bonus: 0, plain: 0 };
    this.first = 0;
    this.latest = 0;
    this.firstTokens = 0;
    this.last = null;
    this.usage = null;
  }

  add(sources, usage) {
    this.usage = usage ?? this.usage;
    if (!sources.length) return;
    this.latest = performance.now();
    if (!this.tokens) {
      this.first = this.latest;
      this.firstTokens = sources.length;
    }
    for (const { source } of sources) this.counts[source] += 1;
    this.last = sources.at(-1).source;
  }

  get tokens() {
    return this.counts.draft + this.counts.bonus + this.counts.plain;
  }

  /** Tokens per second after the first chunk; null before the second one. */
  get speed() {
    const seconds = (this.latest - this.first) / 1000;
    return seconds > 0 ? (this.tokens - this.firstTokens) / seconds : null;
  }

  /**
   * Acceptance length: tokens per decode step; null before the first step. A step ends with a token
   * that was no draft, unless a draft ends the answer. The step of the prompt gave the first token.
   */
  get length() {
    const cutOff = this.last === "draft" ? 1 : 0;
    const steps = this.counts.bonus + this.counts.plain - 1 + cutOff;
    return steps > 0 ? (this.tokens - 1) / steps : null;
  }

  /** Acceptance rate of drafts, from 0 to 1; null without drafts. */
  get accepted() {
    const details = this.usage?.completion_tokens_details;
    const accepted = details?.accepted_prediction_tokens ?? 0;
    const drafted = accepted + (details?.rejected_prediction_tokens ?? 0);
    return drafted ? accepted / drafted : null;
  }

  toString() {
    const parts = [`${this.tokens} tokens`];
    if (this.speed !== null) parts.push(`${this.speed.toFixed(1)} tokens/s`);
    if (this.length !== null) parts.push(`acceptance length ${this.length.toFixed(2)}`);
    return parts.join(", ");
  }
}

/** Map from the text of an answer to its tokens. */
class TokenMap {
  constructor() {
    this.text = "";
    this.tokens = [];
    this.at = 0;
    this.next = 0;
  }

  add(ids, sources) {
    sources.forEach(({ text, source }, i) => {
      this.text += text;
      this.tokens.push({ id: ids[i], source, index: this.tokens.length, end: this.text.length });
    });
  }

  /** Yield the parts of a text as [part, token]. Text before it that parsers removed is skipped. */
  *parts(text) {
    const begin = this.text.indexOf(text, this.at);
    if (begin < 0) {
      yield [text, null];
      return;
    }
    const end = begin + text.length;
    this.at = begin;
    while (this.at < end) {
      while (this.tokens[this.next].end <= this.at) this.next += 1;
      const token = this.tokens[this.next];
      const stop = Math.min(token.end, end);
      yield [this.text.slice(this.at, stop), token];
      this.at = stop;
    }
  }
}

const CUT = "Cut: the answer reached the maximum number of tokens, or the model\u2019s context is full. Raise Max tokens, or ask for the rest.";

/** A running request, and the element that shows its answer. other: token ids to compare with. */
class Run {
  constructor(body, title, other = null) {
    this.body = body;
    this.other = other;
    this.ids = [];
    this.content = "";
    this.reasoning = "";
    this.calls = [];
    this.seed = null;
    this.finish = null;
    this.statistics = new Statistics();
    this.tokenMap = new TokenMap();
    this.reasoningText = make("div", { className: "text" });
    this.reasoningDetails = make("details", { className: "reasoning", hidden: true, open: true },
      make("summary", {}, "Reasoning"), this.reasoningText);
    this.shown = [];
    this.text = make("div", { className: "text answer" });
    this.summary = make("p", { className: "figures" });
    this.element = make("div", { className: "run" }, this.reasoningDetails, this.text, this.summary);
    if (title) this.element.prepend(make("h3", {}, title));
  }

  async read(signal, onChunk) {
    for await (const chunk of stream(this.body, signal)) {
      this.take(chunk);
      onChunk(this, chunk);
    }
  }

  take(chunk) {
    const choice = chunk.choices[0];
    const sources = choice?.token_sources ?? [];
    this.statistics.add(sources, chunk.usage);
    if (!choice) return;
    this.ids.push(...choice.token_ids);
    this.tokenMap.add(choice.token_ids, sources);
    this.seed = choice.seed ?? this.seed;
    this.finish = choice.finish_reason ?? this.finish;
    const { content, reasoning_content: reasoning, tool_calls: calls } = choice.delta;
    if (reasoning) {
      this.reasoningDetails.hidden = false;
      this.reasoning += reasoning;
      this.show(reasoning, this.reasoningText);
    }
    if (content) {
      for (const [piece, token] of this.tokenMap.parts(content)) {
        const start = this.content.length;
        this.content += piece;
        this.shown.push({ start, end: this.content.length, token });
        this.text.append(this.span(piece, token));
      }
    }
    for (const call of calls ?? []) this.addCall(call);
    if (choice.error) throw new Problem(choice.error);
    this.summary.textContent = String(this.statistics);
  }

  show(text, into) {
    for (const [piece, token] of this.tokenMap.parts(text)) into.append(this.span(piece, token));
  }

  /** Return a part of a token's text in the token's color. token: null if it is unknown. */
  span(part, token) {
    const span = make("span", { className: "token", textContent: part });
    if (token) {
      span.classList.add(token.source);
      span.title = `token ${token.index + 1}, id ${token.id}: ${SOURCES[token.source]}`;
      const differs = this.other && this.other[token.index] !== token.id;
      span.classList.toggle("other", Boolean(differs));
    }
    return span;
  }

  /** Render the complete answer as Markdown with colored tokens, and report whether it was cut. */
  end() {
    if ($("markdown").checked) {
      this.text.classList.add("markdown");
      renderMarkdown(this.text, this.content, (start, end) => this.leaf(start, end));
    }
    if (this.finish === "length") this.element.append(make("p", { className: "cut" }, CUT));
  }

  /** Return the spans of a range of the content. */
  leaf(start, end) {
    const parts = this.shown.filter((part) => part.end > start && part.start < end);
    return parts.map((part) => {
      const piece = this.content.slice(Math.max(part.start, start), Math.min(part.end, end));
      return this.span(piece, part.token);
    });
  }

  /** Return all text of the model, with the markup of calls and reasoning. */
  asWritten() {
    const text = make("div", { className: "text" });
    let begin = 0;
    for (const token of this.tokenMap.tokens) {
      text.append(this.span(this.tokenMap.text.slice(begin, token.end), token));
      begin = token.end;
    }
    const summary = make("summary", {}, "Raw text of the model");
    return make("details", { className: "written" }, summary, text);
  }

  addCall({ index, id, function: called }) {
    const known = this.calls[index];
    if (known) {
      known.function.arguments += called.arguments ?? "";
    } else {
      const { name, arguments: text = "" } = called;
      this.calls[index] = { id, type: "function", function: { name, arguments: text } };
    }
  }

  /** Complete calls; an answer that was cut has none. */
  get completeCalls() {
    return this.finish === "tool_calls" ? this.calls : [];
  }

  /** Return the message for the next request. */
  message() {
    const message = { role: "assistant", content: this.content };
    if (this.reasoning) message.reasoning_content = this.reasoning;
    if (this.completeCalls.length) message.tool_calls = this.completeCalls;
    return message;
  }
}

// --- The conversation -------------------------------------------------------------------------

/** Messages in order, with their elements. */
class Conversation {
  constructor() {
    this.entries = [];
  }

  /** Return all messages for a request. */
  messages() {
    const system = $("system").value.trim();
    const messages = this.entries.map((entry) => entry.message);
    return system ? [{ role: "system", content: system }, ...messages] : messages;
  }

  add(message, element) {
    this.entries.push({ message, element });
    this.save();
  }

  /** Save the messages for a reload of this tab; a chat that is too large is not saved. */
  save() {
    const messages = this.entries.map((entry) => entry.message);
    try {
      sessionStorage.setItem(STORAGE_KEY, JSON.stringify({ system: $("system").value, messages }));
    } catch {
      sessionStorage.removeItem(STORAGE_KEY);
    }
  }

  /** Remove the latest messages of the user or of tools, which the server refused. */
  removeRefused(reason) {
    while (this.entries.length && this.entries.at(-1).message.role !== "assistant") {
      const { message, element } = this.entries.pop();
      element.classList.add("refused");
      element.append(make("p", { className: "problem" }, `Not part of the chat: ${reason}`));
      if (message.role === "user") {
        if (!$("ask").value) $("ask").value = message.content;
        break;
      }
    }
    const send = this.entries.at(-1)?.element.querySelector(".send");
    if (send) send.disabled = false;
    this.save();
  }

  /** Calls of the latest message, whose results are missing. */
  get pendingCalls() {
    return this.entries.at(-1)?.message.tool_calls ?? [];
  }

  /** Remove the latest answer, so that it can be generated again. */
  removeAnswer() {
    while (this.entries.at(-1)?.message.role === "assistant") this.entries.pop().element.remove();
    this.save();
  }
}

const STORAGE_KEY = "lockstep-chat";
let conversation = new Conversation();
let running = null;

function shownMessage(who, kind, ...children) {
  const heading = make("h2", {}, who);
  const element = make("article", { className: `message ${kind}` }, heading, ...children);
  element.setAttribute("aria-label", who);
  $("welcome").hidden = true;
  $("log").append(element);
  scroll();
  return element;
}

function addText(role, who, content, more = {}) {
  const text = make("div", { className: "text", textContent: content });
  conversation.add({ role, content, ...more }, shownMessage(who, role, text));
}

/** Scroll to the end of the log. always: false scrolls only if the end is nearly visible. */
function scroll(always = true) {
  const log = $("log");
  const near = log.scrollHeight - log.scrollTop - log.clientHeight < 120;
  if (always || near) log.scrollTop = log.scrollHeight;
}

function say(text, isProblem = false) {
  $("status").textContent = text;
  $("status").classList.toggle("problem", isProblem);
}

/** Show an error, and move the focus to the input that can correct it. */
function report(error) {
  say(error.message, true);
  if (!(error instanceof Problem)) throw error;
  if (error.field) {
    showSettings(true);
    error.field.setAttribute("aria-invalid", "true");
    error.field.focus();
  }
}

/** Request the next message of the conversation. */
async function ask() {
  if (running) return;
  let body;
  try {
    body = request();
  } catch (error) {
    report(error);
    return;
  }
  running = new AbortController();
  setBusy(true);
  say("The model is writing.");
  const here = conversation;
  const compares = $("compare").checked;
  const runs = make("div", { className: "runs" });
  const element = shownMessage("Model", "assistant", runs);
  const first = new Run(body, compares ? "With speculation" : "");
  runs.append(first.element);
  const polling = setInterval(showCache, 1000);
  try {
    await first.read(running.signal, showStatistics);
    if (compares) await compare(first, element, runs);
    else say(`Done: ${first.statistics}.`);
  } catch (error) {
    if (error.name === "AbortError") say(`Stopped after ${first.statistics.tokens} tokens.`);
    else {
      if (error.refused && !first.ids.length) here.removeRefused(error.message);
      report(error);
    }
  } finally {
    clearInterval(polling);
    running = null;
    if (first.ids.length) {
      first.end();
      element.append(copyButton(first.body));
      if (here === conversation) here.add(first.message(), element);
    } else element.remove();
    setBusy(false);
    showCache();
    addCalls(first.completeCalls, element, first.asWritten());
  }
}

/** Run the same request again with the same seed and without drafts. */
async function compare(first, element, runs) {
  const body = { ...first.body, seed: first.seed, speculate: false };
  const second = new Run(body, "Without speculation", first.ids);
  const verdict = make("p", { className: "agreement" });
  runs.append(second.element);
  element.append(verdict);
  say("The same request runs without speculation.");
  await second.read(running.signal, (run) => {
    verdict.textContent = agreement(first.ids, run.ids);
    scroll(false);
  });
  second.end();
  const same = String(first.ids) === String(second.ids);
  verdict.classList.add(same ? "good" : "bad");
  const allEqual = `All ${first.ids.length} tokens are equal.`;
  verdict.textContent = same ? allEqual : agreement(first.ids, second.ids);
  say(verdict.textContent);
}

function agreement(ids, others) {
  const index = others.findIndex((id, i) => ids[i] !== id);
  if (index >= 0) return `The answers differ from token ${index + 1} on.`;
  return `${others.length} of ${ids.length} tokens are equal so far.`;
}

/** Return the request as a shell command. The API key is replaced, since commands are often shared. */
function shellLine(body) {
  const { stream, stream_options, return_token_ids, return_token_sources, ...sent } = body;
  const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
  const parts = ["curl", "-s", quoted(new URL("v1/chat/completions", document.baseURI).href)];
  parts.push("-H", quoted("Content-Type: application/json"));
  if ($("key").value.trim()) parts.push("-H", quoted("Authorization: Bearer KEY"));
  return [...parts, "-d", quoted(JSON.stringify(sent))].join(" ");
}

/** Return a button that copies a request. If the browser forbids that, it shows the text to copy. */
function copyButton(body) {
  const button = make("button", { type: "button", className: "copy", textContent: "Copy as curl" });
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(shellLine(body));
      say("Copied.");
    } catch {
      const field = make("textarea", { readOnly: true, rows: 4, className: "code", value: shellLine(body) });
      button.replaceWith(make("label", {}, "The request as curl", field));
      field.select();
    }
  });
  return button;
}

/** Show the chat that was saved before a reload. */
function restore() {
  let saved;
  try {
    saved = JSON.parse(sessionStorage.getItem(STORAGE_KEY));
  } catch {
    return;
  }
  if (!saved?.messages?.length) return;
  $("system").value = saved.system ?? "";
  for (const message of saved.messages) {
    const text = make("div", { className: "text", textContent: message.content });
    const answers = message.role === "assistant";
    if (answers && $("markdown").checked) {
      text.classList.add("answer", "markdown");
      renderMarkdown(text, message.content, (start, end) => [message.content.slice(start, end)]);
    }
    const who = answers ? "Model" : message.role === "user" ? "You" : "Result";
    conversation.add(message, shownMessage(who, message.role, text));
  }
  const { message, element } = conversation.entries.at(-1);
  addCalls(message.tool_calls ?? [], element);
  $("retry").disabled = false;
}

/** Add a card for each tool call, with an input for its result. */
function addCalls(calls, element, written = "") {
  if (!calls.length) return;
  const fields = calls.map((called) => {
    const { name, arguments: text } = called.function;
    const field = make("textarea", { rows: 2, className: "code", spellcheck: false });
    const label = make("label", {}, `Result of ${name}`, field);
    const card = make("section", { className: "call" }, make("h3", {}, name),
      make("pre", {}, pretty(text)), label);
    element.append(card);
    return field;
  });
  const send = make("button", { type: "button", className: "send", textContent: "Send results" });
  const submit = () => {
    if (running || conversation.entries.at(-1)?.element !== element) return;
    send.disabled = true;
    $("ask").focus();
    calls.forEach((called, i) => {
      const name = called.function.name;
      const more = { tool_call_id: called.id };
      addText("tool", `Result of ${name}`, fields[i].value, more);
    });
    ask();
  };
  send.addEventListener("click", submit);
  for (const field of fields) {
    field.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && event.ctrlKey) submit();
    });
  }
  element.append(send, written);
  fields[0].focus();
  say("The model calls tools. Enter their results.");
  scroll();
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

// --- State of the server --------------------------------------------------------

function showStatistics(run, chunk) {
  const { statistics } = run;
  const shown = (value, digits) => (value === null ? "–" : value.toFixed(digits));
  $("speed").textContent = shown(statistics.speed, 1);
  $("length").textContent = shown(statistics.length, 2);
  const rate = statistics.accepted;
  $("accepted").textContent = rate === null ? "–" : `${(rate * 100).toFixed(0)} %`;
  for (const [source, count] of Object.entries(statistics.counts)) {
    $(`count-${source}`).textContent = count;
  }
  if (chunk.system_fingerprint) showModel(chunk.model, chunk.system_fingerprint);
  scroll(false);
}

function showModel(name, numerics) {
  $("model").textContent = numerics ? `${name}, ${numerics}` : name;
}

/** Show the used fraction of the cache's pages, from /metrics. */
async function showCache() {
  try {
    const text = await (await call("metrics")).text();
    const match = text.match(/^\w+:kv_cache_usage_perc\{[^\n]*\} (\S+)$/m);
    if (!match) return;
    const usage = Number(match[1]);
    $("cache").value = usage;
    $("cache-share").textContent = `${(usage * 100).toFixed(1)} %`;
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    $("cache-share").textContent = "–";
  }
}

/** Show the model's name, and its defaults as placeholders of the sampling inputs. */
async function showServer() {
  try {
    const [model] = (await (await call("v1/models")).json()).data;
    showModel(model.id);
    for (const [name, value] of Object.entries(model.default_sampling_params)) {
      const field = fieldNamed(name);
      if (field) field.placeholder = value;
    }
    say("");
    showCache();
  } catch (error) {
    report(error);
  }
}

// --- Controls ---------------------------------------------------------------------------------

function setBusy(busy) {
  $("log").setAttribute("aria-busy", String(busy));
  $("send").disabled = busy;
  $("stop").disabled = !busy;
  $("retry").disabled = busy || !conversation.entries.length;
}

function send() {
  const text = $("ask").value;
  if (running || !text.trim()) return;
  if (conversation.pendingCalls.length) {
    report(new Problem("Send the results of the tool calls first, or start a new chat."));
    return;
  }
  addText("user", "You", text);
  $("ask").value = "";
  ask();
}

function retry() {
  if (running || !conversation.entries.length) return;
  conversation.removeAnswer();
  ask();
}

function stop() {
  running?.abort();
}

function begin() {
  stop();
  for (const message of document.querySelectorAll(".message")) message.remove();
  conversation = new Conversation();
  conversation.save();
  $("welcome").hidden = false;
  $("retry").disabled = true;
  say("");
  $("ask").focus();
}

function showSettings(shown = $("settings").hidden) {
  $("settings").hidden = !shown;
  $("show-settings").setAttribute("aria-expanded", String(shown));
}

const THEMES = ["system", "light", "dark"];

function nextTheme() {
  const root = document.documentElement;
  const now = root.dataset.theme ?? "system";
  const next = THEMES[(THEMES.indexOf(now) + 1) % THEMES.length];
  root.dataset.theme = next;
  $("theme").textContent = `Theme: ${next}`;
}

function showTints() {
  document.body.classList.toggle("tinted", $("tint").checked);
}

/** Actions by event.code, since Alt with a letter types another character on some keyboards. */
const SHORTCUTS = {
  KeyR: retry,
  KeyN: begin,
  KeyC: () => $("compare").click(),
  KeyS: () => showSettings(),
  KeyT: nextTheme,
  KeyH: () => $("shortcuts").showModal(),
};

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running && !$("shortcuts").open) {
    event.preventDefault();
    stop();
  } else if (event.altKey && !event.ctrlKey && !event.metaKey && SHORTCUTS[event.code]) {
    event.preventDefault();
    SHORTCUTS[event.code]();
  }
});

$("ask").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});

document.addEventListener("input", (event) => event.target.removeAttribute("aria-invalid"));

for (const read of [readTools, readSchema]) {
  const id = read === readTools ? "tools" : "schema";
  $(id).addEventListener("change", () => {
    try {
      read();
    } catch (error) {
      error.field.setAttribute("aria-invalid", "true");
    }
  });
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("stop").addEventListener("click", stop);
$("retry").addEventListener("click", retry);
$("new").addEventListener("click", begin);
$("theme").addEventListener("click", nextTheme);
$("help").addEventListener("click", () => $("shortcuts").showModal());
$("show-settings").addEventListener("click", () => showSettings());
$("tint").addEventListener("change", showTints);
$("key").addEventListener("change", showServer);

for (const example of document.querySelectorAll(".example")) {
  example.addEventListener("click", () => {
    $("ask").value = example.textContent;
    $("tools").value = example.dataset.tools ?? "";
    send();
  });
}
$("system").addEventListener("change", () => conversation.save());

showTints();
showSettings(window.innerWidth > 800);
restore();
showServer();
