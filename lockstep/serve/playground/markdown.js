// Rendering of Markdown as DOM elements, without HTML. Every leaf is a range of the text, so its tokens
// keep their colors. `leaf(start, end)` returns the nodes of a range; texts become text nodes.

const FENCE = /^\s{0,3}(```+|~~~+)/;
const HEADING = /^(#{1,6})\s+/;
const ITEM = /^(\s*)(?:[-*+]|(\d{1,9})[.)])\s+/;
const QUOTE = /^\s{0,3}>\s?/;
const RULE = /^\s{0,3}([-*_])(?:\s*\1){2,}\s*$/;
/** Code, bold, italics or a link; the first alternative that matches is taken. */
const INLINE = /(`+)(.+?)\1|(\*\*|__)(?=\S)(.+?)\3|([*_])(?=\S)(.+?)\5|\[([^\]\n]+)\]\(([^()\s]+)\)/g;

/** Return the lines of a text as {start, end, line}, without line breaks. */
function linesOf(text) {
  const lines = [];
  let start = 0;
  for (const line of text.split("\n")) {
    lines.push({ start, end: start + line.length, line });
    start += line.length + 1;
  }
  return lines;
}

/** Return the URL of a link with an allowed scheme; null for any other. */
function address(target) {
  try {
    const url = new URL(target);
    return ["http", "https"].includes(url.protocol.slice(0, -1)) ? url.href : null;
  } catch {
    return null;
  }
}

/** Append a part of a line with code, bold, italics and links. */
function inline(parent, text, start, end, leaf, depth = 0) {
  let at = start;
  const piece = text.slice(start, end);
  for (const match of depth < 4 ? piece.matchAll(INLINE) : []) {
    const from = start + match.index;
    const wordBefore = /\w/.test(text[from - 1] ?? "");
    if (from < at || (match[5] === "_" && wordBefore) || (match[3] === "__" && wordBefore)) continue;
    const target = match[8] ? address(match[8]) : null;
    if (match[8] && !target) continue;
    parent.append(...leaf(at, from));
    const marks = (match[1] ?? match[3] ?? match[5] ?? "[").length;
    const inner = match[2] ?? match[4] ?? match[6] ?? match[7];
    const kind = match[1] ? "code" : match[3] ? "strong" : match[5] ? "em" : "a";
    const element = document.createElement(kind);
    const begin = from + marks;
    if (kind === "code") element.append(...leaf(begin, begin + inner.length));
    else inline(element, text, begin, begin + inner.length, leaf, depth + 1);
    if (target) Object.assign(element, { href: target, target: "_blank", rel: "noopener noreferrer", title: target });
    parent.append(element);
    at = from + match[0].length;
  }
  parent.append(...leaf(at, end));
}

/** Replace the children of `parent` by the rendered text. */
export function renderMarkdown(parent, text, leaf) {
  parent.replaceChildren();
  const lines = linesOf(text);
  let list = null;
  let paragraph = null;
  const add = (tag, name = "") => {
    const element = document.createElement(tag);
    if (name) element.className = name;
    parent.append(element);
    return element;
  };
  for (let i = 0; i < lines.length; i += 1) {
    const { start, end, line } = lines[i];
    const fence = line.match(FENCE);
    const heading = line.match(HEADING);
    const item = line.match(ITEM);
    const quote = line.match(QUOTE);
    if (!item) list = null;
    if (fence || heading || item || quote || !line.trim()) paragraph = null;
    if (fence) {
      let last = i + 1;
      while (last < lines.length && !lines[last].line.trim().startsWith(fence[1])) last += 1;
      const code = document.createElement("code");
      if (last > i + 1) code.append(...leaf(lines[i + 1].start, lines[last - 1].end));
      const block = add("pre");
      block.tabIndex = 0;
      block.append(code);
      i = last;
    } else if (RULE.test(line)) {
      paragraph = null;
      list = null;
      add("hr");
    } else if (heading) {
      inline(add("p", "heading"), text, start + heading[0].length, end, leaf);
    } else if (item) {
      const tag = item[2] ? "ol" : "ul";
      if (list?.localName !== tag) {
        list = add(tag);
        if (item[2]) list.start = Number(item[2]);
      }
      const entry = document.createElement("li");
      if (item[1].length > 1) entry.className = "nested";
      inline(entry, text, start + item[0].length, end, leaf);
      list.append(entry);
    } else if (quote) {
      inline(add("blockquote"), text, start + quote[0].length, end, leaf);
    } else if (line.trim()) {
      if (paragraph) paragraph.append("\n");
      else paragraph = add("p");
      inline(paragraph, text, start, end, leaf);
    }
  }
}
