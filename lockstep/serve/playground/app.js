// The playground: a chat over /v1/chat/completions that shows how every token came.
// The chat is kept for reloads in this tab's session storage; the API key lives in its input alone.

import { renderMarkdown } from "./markdown.js";

const $ = (id) => document.getElementById(id);

/** An element with these properties and children; texts become text nodes, never markup. */
function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

/** Something wrong that the reader can mend; field: the element to mend it in; refused: by the server. */
class Problem extends Error {
  constructor(message, field = null, refused = false) {
    super(message);
    this.field = field;
    this.refused = refused;
  }
}

/** A setting's element by the name of its field in a request, such as temperature. */
function fieldNamed(name) {
  return [...document.querySelectorAll("[data-field]")].find((e) => e.dataset.field === name);
}

// --- Requests ---------------------------------------------------------------------------------

function headers() {
  const key = $("key").value.trim();
  return key ? { Authorization: `Bearer ${key}` } : {};
}

/** The answer of the server to a GET or a POST. Throws a Problem that says what the server said. */
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
  const said = await response.json().catch(() => ({}));
  const message = said.error?.message ?? `The server answered ${response.status}.`;
  const field = response.status === 401 ? $("key") : fieldNamed(said.error?.param);
  throw new Problem(message, field, response.status < 500);
}

/** The chunks of a streamed answer. */
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
        const data = event.replace(/^data: /, "");
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

/** What a JSON field holds; undefined where it is empty. allowed: says what the value must be. */
function readJson(id, fits, allowed) {
  const text = $(id).value.trim();
  let problem = "";
  let value;
  if (text) {
    try {
      value = JSON.parse(text);
      if (!fits(value)) problem = `Allowed: ${allowed}.`;
    } catch (error) {
      problem = `Invalid JSON: ${error.message}.`;
    }
  }
  $(`${id}-problem`).textContent = problem;
  $(id).removeAttribute("aria-invalid");
  if (problem) throw new Problem(`${$(id).labels[0].textContent}: ${problem}`, $(id));
  return value;
}

const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
const readTools = () => readJson("tools", Array.isArray, "a list of tools");
const readSchema = () => readJson("schema", isObject, "an object, the schema");

/** The numbers that are set, by their fields' names. */
function readNumbers() {
  const found = {};
  for (const input of document.querySelectorAll("input[type=number]")) {
    if (!input.checkValidity()) {
      const name = input.labels[0].textContent.trim();
      throw new Problem(`${name}: ${input.validationMessage}`, input);
    }
    if (input.value !== "") found[input.dataset.field] = Number(input.value);
  }
  return found;
}

/** The body of a request for the conversation as it stands. Throws a Problem. */
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
    const named = { name: "answer", schema, strict: true };
    body.response_format = { type: "json_schema", json_schema: named };
  }
  return body;
}

// --- One run of a request ---------------------------------------------------------------------

const SOURCES = {
  draft: "accepted draft",
  bonus: "the target model’s token after the drafts",
  plain: "from a step without drafts",
};

/** Counts tokens, steps and time of a run. */
class Figures {
  constructor() {
    this.counts = { draft: 0, bonus: 0, plain: 0 };
    this.first = 0;
    this.latest = 0;
    this.early = 0;
    this.last = null;
    this.usage = null;
  }

  add(sources, usage) {
    this.usage = usage ?? this.usage;
    if (!sources.length) return;
    this.latest = performance.now();
    if (!this.tokens) {
      this.first = this.latest;
      this.early = sources.length;
    }
    for (const { source } of sources) this.counts[source] += 1;
    this.last = sources.at(-1).source;
  }

  get tokens() {
    return this.counts.draft + this.counts.bonus + this.counts.plain;
  }

  /** Tokens per second behind the first chunk; null while nothing came behind it. */
  get speed() {
    const seconds = (this.latest - this.first) / 1000;
    return seconds > 0 ? (this.tokens - this.early) / seconds : null;
  }

  /**
   * Tokens per decode step; null before the first. A step ends with a token that was no draft,
   * unless a draft ends the answer. The first token is that of the prompt's step.
   */
  get length() {
    const cutOff = this.last === "draft" ? 1 : 0;
    const steps = this.counts.bonus + this.counts.plain - 1 + cutOff;
    return steps > 0 ? (this.tokens - 1) / steps : null;
  }

  /** The share of drafts that were accepted; null without drafts. */
  get accepted() {
    const details = this.usage?.completion_tokens_details;
    const taken = details?.accepted_prediction_tokens ?? 0;
    const drafted = taken + (details?.rejected_prediction_tokens ?? 0);
    return drafted ? taken / drafted : null;
  }

  toString() {
    const parts = [`${this.tokens} tokens`];
    if (this.speed !== null) parts.push(`${this.speed.toFixed(1)} tokens/s`);
    if (this.length !== null) parts.push(`acceptance length ${this.length.toFixed(2)}`);
    return parts.join(", ");
  }
}

/** Finds the tokens that a piece of the answer's text came of. */
class Written {
  constructor() {
    this.text = "";
    this.tokens = [];
    this.at = 0;
    this.next = 0;
  }

  add(ids, sources) {
    sources.forEach(({ text, source }, place) => {
      this.text += text;
      this.tokens.push({ id: ids[place], source, index: this.tokens.length, end: this.text.length });
    });
  }

  /** The text as [piece, token]; what parsers took away before it is passed over. */
  *pieces(text) {
    const found = this.text.indexOf(text, this.at);
    if (found < 0) {
      yield [text, null];
      return;
    }
    const end = found + text.length;
    this.at = found;
    while (this.at < end) {
      while (this.tokens[this.next].end <= this.at) this.next += 1;
      const token = this.tokens[this.next];
      const stop = Math.min(token.end, end);
      yield [this.text.slice(this.at, stop), token];
      this.at = stop;
    }
  }
}

const CUT = "Cut off: the answer reached Max tokens, or the model\u2019s context is full. Raise Max tokens, or ask for the rest.";

/** A request on its way, and the element that shows its answer. other: token ids to agree with. */
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
    this.figures = new Figures();
    this.written = new Written();
    this.thoughts = make("div", { className: "text" });
    this.thinking = make("details", { className: "reasoning", hidden: true, open: true },
      make("summary", {}, "Reasoning"), this.thoughts);
    this.shown = [];
    this.text = make("div", { className: "text answer" });
    this.told = make("p", { className: "figures" });
    this.element = make("div", { className: "run" }, this.thinking, this.text, this.told);
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
    this.figures.add(sources, chunk.usage);
    if (!choice) return;
    this.ids.push(...choice.token_ids);
    this.written.add(choice.token_ids, sources);
    this.seed = choice.seed ?? this.seed;
    this.finish = choice.finish_reason ?? this.finish;
    const { content, reasoning_content: reasoning, tool_calls: calls } = choice.delta;
    if (reasoning) {
      this.thinking.hidden = false;
      this.reasoning += reasoning;
      this.show(reasoning, this.thoughts);
    }
    if (content) {
      for (const [piece, token] of this.written.pieces(content)) {
        const start = this.content.length;
        this.content += piece;
        this.shown.push({ start, end: this.content.length, token });
        this.text.append(this.span(piece, token));
      }
    }
    for (const call of calls ?? []) this.addCall(call);
    if (choice.error) throw new Problem(choice.error);
    this.told.textContent = String(this.figures);
  }

  show(text, into) {
    for (const [piece, token] of this.written.pieces(text)) into.append(this.span(piece, token));
  }

  /** A piece of a token's text, tinted; token: null where it is not known. */
  span(piece, token) {
    const span = make("span", { className: "token", textContent: piece });
    if (token) {
      span.classList.add(token.source);
      span.title = `token ${token.index + 1}, id ${token.id}: ${SOURCES[token.source]}`;
      const differs = this.other && this.other[token.index] !== token.id;
      span.classList.toggle("other", Boolean(differs));
    }
    return span;
  }

  /** Shows the whole answer as Markdown, its tokens tinted as before, and says where it was cut. */
  end() {
    if ($("markdown").checked) {
      this.text.classList.add("markdown");
      renderMarkdown(this.text, this.content, (start, end) => this.leaf(start, end));
    }
    if (this.finish === "length") this.element.append(make("p", { className: "cut" }, CUT));
  }

  /** The spans of a range of the content. */
  leaf(start, end) {
    const parts = this.shown.filter((part) => part.end > start && part.start < end);
    return parts.map((part) => {
      const piece = this.content.slice(Math.max(part.start, start), Math.min(part.end, end));
      return this.span(piece, part.token);
    });
  }

  /** All that the model wrote, the markup of calls and reasoning too. */
  asWritten() {
    const text = make("div", { className: "text" });
    let begin = 0;
    for (const token of this.written.tokens) {
      text.append(this.span(this.written.text.slice(begin, token.end), token));
      begin = token.end;
    }
    const summary = make("summary", {}, "Raw output, token by token");
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

  /** Calls that came whole; an answer that was cut off has none. */
  get wholeCalls() {
    return this.finish === "tool_calls" ? this.calls : [];
  }

  /** The message as it goes back to the server. */
  message() {
    const found = { role: "assistant", content: this.content };
    if (this.reasoning) found.reasoning_content = this.reasoning;
    if (this.wholeCalls.length) found.tool_calls = this.wholeCalls;
    return found;
  }
}

// --- The conversation -------------------------------------------------------------------------

/** Messages and the elements that show them, in order. */
class Conversation {
  constructor() {
    this.entries = [];
  }

  /** All messages, as a request sends them. */
  messages() {
    const system = $("system").value.trim();
    const said = this.entries.map((entry) => entry.message);
    return system ? [{ role: "system", content: system }, ...said] : said;
  }

  add(message, element) {
    this.entries.push({ message, element });
    this.keep();
  }

  /** Keeps the messages for a reload, in this tab alone; a chat that is too large is not kept. */
  keep() {
    const messages = this.entries.map((entry) => entry.message);
    try {
      sessionStorage.setItem(KEPT, JSON.stringify({ system: $("system").value, messages }));
    } catch {
      sessionStorage.removeItem(KEPT);
    }
  }

  /** Takes out the latest messages that are no answer, since the server refused them. */
  forgetRefused(reason) {
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
    this.keep();
  }

  /** The calls of the latest message that wait for their results. */
  get waiting() {
    return this.entries.at(-1)?.message.tool_calls ?? [];
  }

  /** Takes the latest answer away, so that it can be asked for again. */
  forgetAnswer() {
    while (this.entries.at(-1)?.message.role === "assistant") this.entries.pop().element.remove();
    this.keep();
  }
}

const KEPT = "lockstep-chat";
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

/** Follows the end of the log, where its reader does. */
function scroll(always = true) {
  const log = $("log");
  const near = log.scrollHeight - log.scrollTop - log.clientHeight < 120;
  if (always || near) log.scrollTop = log.scrollHeight;
}

function say(text, isProblem = false) {
  $("status").textContent = text;
  $("status").classList.toggle("problem", isProblem);
}

/** Tells of an error, and leads to the field that can mend it. */
function report(error) {
  say(error.message, true);
  if (!(error instanceof Problem)) throw error;
  if (error.field) {
    showSettings(true);
    error.field.setAttribute("aria-invalid", "true");
    error.field.focus();
  }
}

/** Asks for the next message of the conversation. */
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
    await first.read(running.signal, showFigures);
    if (compares) await compare(first, element, runs);
    else say(`Done: ${first.figures}.`);
  } catch (error) {
    if (error.name === "AbortError") say(`Stopped after ${first.figures.tokens} tokens.`);
    else {
      if (error.refused && !first.ids.length) here.forgetRefused(error.message);
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
    addCalls(first.wholeCalls, element, first.asWritten());
  }
}

/** The same request again, with the same seed, and no draft verified. */
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
  const all = `All ${first.ids.length} tokens agree, one by one.`;
  verdict.textContent = same ? all : agreement(first.ids, second.ids);
  say(verdict.textContent);
}

function agreement(ids, others) {
  const apart = others.findIndex((id, place) => ids[place] !== id);
  if (apart >= 0) return `The answers differ from token ${apart + 1} on.`;
  return `${others.length} of ${ids.length} tokens agree.`;
}

/** The request as a line for a shell; a key is replaced, since what is copied is often shared. */
function shellLine(body) {
  const { stream, stream_options, return_token_ids, return_token_sources, ...sent } = body;
  const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
  const parts = ["curl", "-s", quoted(new URL("v1/chat/completions", document.baseURI).href)];
  parts.push("-H", quoted("Content-Type: application/json"));
  if ($("key").value.trim()) parts.push("-H", quoted("Authorization: Bearer KEY"));
  return [...parts, "-d", quoted(JSON.stringify(sent))].join(" ");
}

/** A button that copies a request; where the browser forbids that, it shows what to copy. */
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

/** Shows the chat that was kept before a reload. */
function restore() {
  let kept;
  try {
    kept = JSON.parse(sessionStorage.getItem(KEPT));
  } catch {
    return;
  }
  if (!kept?.messages?.length) return;
  $("system").value = kept.system ?? "";
  for (const message of kept.messages) {
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

/** A card for each tool call, with a field for its result. */
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
    calls.forEach((called, place) => {
      const name = called.function.name;
      const more = { tool_call_id: called.id };
      addText("tool", `Result of ${name}`, fields[place].value, more);
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
  say("The model called tools: enter their results.");
  scroll();
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

// --- What the page shows of the server --------------------------------------------------------

function showFigures(run, chunk) {
  const { figures } = run;
  const shown = (value, digits) => (value === null ? "–" : value.toFixed(digits));
  $("speed").textContent = shown(figures.speed, 1);
  $("length").textContent = shown(figures.length, 2);
  const share = figures.accepted;
  $("accepted").textContent = share === null ? "–" : `${(share * 100).toFixed(0)} %`;
  for (const [source, count] of Object.entries(figures.counts)) {
    $(`count-${source}`).textContent = count;
  }
  if (chunk.system_fingerprint) showModel(chunk.model, chunk.system_fingerprint);
  scroll(false);
}

function showModel(name, numerics) {
  $("model").textContent = numerics ? `${name}, ${numerics}` : name;
}

/** The share of the cache's pages that are used, from /metrics. */
async function showCache() {
  try {
    const text = await (await call("metrics")).text();
    const found = text.match(/^\w+:kv_cache_usage_perc\{[^\n]*\} (\S+)$/m);
    if (!found) return;
    const share = Number(found[1]);
    $("cache").value = share;
    $("cache-share").textContent = `${(share * 100).toFixed(1)} %`;
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    $("cache-share").textContent = "–";
  }
}

/** The model's name, and its defaults as placeholders of the sampling fields. */
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
  if (conversation.waiting.length) {
    report(new Problem("Send the results of the tool calls first, or begin a new chat."));
    return;
  }
  addText("user", "You", text);
  $("ask").value = "";
  ask();
}

function retry() {
  if (running || !conversation.entries.length) return;
  conversation.forgetAnswer();
  ask();
}

function stop() {
  running?.abort();
}

function begin() {
  stop();
  for (const message of document.querySelectorAll(".message")) message.remove();
  conversation = new Conversation();
  conversation.keep();
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

/** By event.code, since Alt with a letter types another character on some keyboards. */
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
$("system").addEventListener("change", () => conversation.keep());

showTints();
showSettings(window.innerWidth > 800);
restore();
showServer();
