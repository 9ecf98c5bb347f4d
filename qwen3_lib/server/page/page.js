"use strict";
/* The chat page. A conversation is {id, title, changed, turns}; a turn is {role, content}, a question may have
   {pictures}, data: URLs, and an answer also has {thought, note, figures, error, form}. Texts become text nodes;
   Markdown becomes elements, those that DOMPurify lets pass. */

const at = id => document.getElementById(id);
const CHAT = "qwen3.chat.", SETTINGS = "qwen3.settings", KEY = "qwen3.key";  // names in the browser's storage
const chats = new Map();  // id -> conversation
const running = new Map();  // conversation -> AbortController of its answer
const UNREACHED = "the server can't be reached", CUT = "the connection ended before the answer";
const EXAMPLES = ["What is the capital of France?", "What is 27 + 45?", "Tell me a story about a lighthouse."];
const RATE = 16000, LARGEST_SOUND = 25e6;  // samples a second; bytes
// What the server speaks at once: up to 4,096 characters, of whole sentences where they are shorter.
const SPOKEN = /[^]{1,4095}(?:[。！？\n]|[.!?…](?!\S)|$)|[^]{1,4096}/g;
const PIXELS = 2 ** 20;  // of a picture, at most: 1,024 tokens
let current = null, model = "", sees = false, hears = false, recorder = null, context = 0, apiKey = "";
let listens = false, speaks = false;  // another model writes down questions; one reads answers aloud
let mute = false;  // the model gives no text
let aloud = false, reading = null;  // whether the next answer is read aloud; AbortController of what is read
let pictures = [];  // of the next question

/** A new element with properties and children: elements or texts. */
function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

// ---------------------------------------------------------------------------------------------------------------------
// The browser's storage: it may be closed, full, changed by another tab, or hold something else
// ---------------------------------------------------------------------------------------------------------------------

function read(key) {
  try {
    return localStorage.getItem(key);
  } catch {
    return null;  // the browser forbids storage, and the page has said so
  }
}

/** Keeps a text, or removes it for null -> true. If that fails, the page says so, and goes on without. */
function write(key, text) {
  try {
    if (text === null) localStorage.removeItem(key);
    else localStorage.setItem(key, text);
    return true;
  } catch (error) {
    notKept(error);
    return false;
  }
}

function notKept(error) {
  at("storage").textContent = error.name === "QuotaExceededError"
    ? "The browser's storage is full: new messages are lost when this page is closed. Delete conversations."
    : "The browser keeps nothing for this page: conversations are lost when it is closed.";
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}

/** Reads a conversation again; one that isn't sound is left alone, and not shown. */
function recall(id) {
  const stored = read(CHAT + id), chat = parsed(stored);
  const sound = Array.isArray(chat?.turns) && typeof chat.title === "string" && chat.turns.every(
    turn => ["user", "assistant"].includes(turn?.role) && typeof turn.content === "string"
      && [turn.pictures ?? []].flat().every(url => typeof url === "string" && url.startsWith("data:image/")));
  if (sound) chats.set(id, {id, title: chat.title, changed: Number(chat.changed) || 0, turns: chat.turns, stored});
  else chats.delete(id);
}

function save(chat) {
  const was = read(CHAT + chat.id);
  if (was !== null && was !== chat.stored) {  // another tab has gone on with it: keep both
    const id = chat.id;
    chat.id = newId();
    recall(id);
    if (chat === current) history.replaceState(null, "", "#" + chat.id);
  }
  chat.changed = Date.now();
  const {title, turns} = chat, text = JSON.stringify({title, changed: chat.changed, turns});
  chats.set(chat.id, chat);
  chat.unsaved = !write(CHAT + chat.id, text);
  if (!chat.unsaved) chat.stored = text;
  if (![...chats.values()].some(each => each.unsaved)) at("storage").textContent = "";
  drawChats();
}

function remove(chat) {
  running.get(chat)?.abort();
  chats.delete(chat.id);
  write(CHAT + chat.id, null);
  [...chats.values()].filter(each => each.unsaved).forEach(save);  // there may be room now
  if (chat === current) location.hash = "";
  drawChats();
}

const newId = () => Date.now().toString(36) + Math.random().toString(36).slice(2, 10);

addEventListener("storage", ({key}) => {  // another tab has changed something
  if (key === SETTINGS) return recallSettings();
  if (!key?.startsWith(CHAT)) return;
  const id = key.slice(CHAT.length);
  if (running.has(chats.get(id))) return;
  recall(id);
  if (current.id === id) open();
  else drawChats();
});

// ---------------------------------------------------------------------------------------------------------------------
// Settings
// ---------------------------------------------------------------------------------------------------------------------

const kept = [...document.querySelectorAll("[data-kept]")];
const valueOf = input => input.type === "checkbox" ? "checked" : "value";

function recallSettings() {
  const stored = parsed(read(SETTINGS)) ?? {};
  for (const input of kept) if (input.id in Object(stored)) input[valueOf(input)] = stored[input.id];
  applySettings();
}

function applySettings() {
  document.documentElement.style.colorScheme = at("scheme").value;
  at("schema-panel").hidden = !at("format").value;
}

for (const input of kept) {
  input.addEventListener("input", () => {
    write(SETTINGS, JSON.stringify(Object.fromEntries(kept.map(each => [each.id, each[valueOf(each)]]))));
    applySettings();
  });
}

/** The fields of a request that the settings decide. */
function wishes() {
  const numbers = ["temperature", "top_p", "max_tokens"].filter(name => at(name).value !== "");
  const format = {type: "json_schema", json_schema: {name: "form", schema: parsed(at("schema").value)}};
  return {...Object.fromEntries(numbers.map(name => [name, at(name).valueAsNumber])),
          ...(at("format").value && {response_format: format}), ...(!at("think").checked && {enable_thinking: false})};
}

/** True if a request can be made of the settings; else the page shows what is wrong. */
function settingsAreSound() {
  at("schema-says").textContent = "";
  try {
    if (at("format").value) JSON.parse(at("schema").value);
  } catch (error) {
    at("schema-says").textContent = `The schema is no JSON: ${error.message}`;
    return false;
  }
  const form = document.querySelector("#settings form");
  if (form.checkValidity()) return true;
  at("settings").showModal();
  return form.reportValidity();
}

// ---------------------------------------------------------------------------------------------------------------------
// The server
// ---------------------------------------------------------------------------------------------------------------------

/** The response to a request. Throws an Error that says what is wrong; an AbortError if it was stopped. */
async function request(path, body, signal) {
  const form = body instanceof FormData;
  for (;;) {
    const response = await reached(fetch(path, {
      method: body ? "POST" : "GET", body: form ? body : body && JSON.stringify(body), signal,
      headers: {...(!form && {"Content-Type": "application/json"}),
                ...(apiKey && {Authorization: `Bearer ${apiKey}`})}}), UNREACHED);
    if (response.ok) return response;
    if (response.status === 401 && await unlocked()) continue;
    const value = parsed(await reached(response.text(), UNREACHED));
    throw Object.assign(new Error(value?.error?.message ?? `the server answers ${response.status}`),
                        {status: response.status, code: value?.error?.code, param: value?.error?.param});
  }
}

/** What a promise of the network gives. Throws an Error with these words if the network fails. */
async function reached(promise, words) {
  try {
    return await promise;
  } catch (error) {
    throw error.name === "AbortError" ? error : new Error(words);
  }
}

/** The values of an event stream. */
async function* valuesOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let held = "", part; !(part = await reached(reader.read(), CUT)).done;) {
    const events = (held + part.value).split("\n\n");
    held = events.pop();
    for (const event of events.filter(each => each.startsWith("data: "))) {  // others are signs of life
      if (event === "data: [DONE]") return;
      const value = JSON.parse(event.slice(6));
      if (value.error) throw new Error(value.error.message);
      yield value;
      if (value.type === "transcript.text.done") return;
    }
  }
  throw new Error(CUT);
}

/** Asks for the API key -> true if there is a new one. */
async function unlocked() {
  const dialog = at("lock");
  if (!dialog.open) {
    dialog.returnValue = at("key").value = "";
    at("lock-says").textContent = apiKey && "The server has refused this key.";
    dialog.showModal();
  }
  await new Promise(resolve => dialog.addEventListener("close", resolve, {once: true}));
  if (dialog.returnValue !== "use") return false;
  apiKey = at("key").value;
  try {
    sessionStorage.setItem(KEY, apiKey);
  } catch {
    // then this page alone has it
  }
  return true;
}

async function greet() {
  try {
    const models = (await (await request("v1/models")).json()).data, [about] = models;
    at("model").title = at("model").textContent = model = about.id;
    context = about.max_model_len;
    sees = about.input_modalities.includes("image");
    at("add").hidden = !sees;
    hears = about.input_modalities.includes("audio");
    listens = !hears && models.some(each => each.input_modalities.includes("audio"));
    speaks = models.slice(1).some(each => each.output_modalities.includes("audio"));
    mute = !about.output_modalities.includes("text");
    document.body.classList.toggle("hears", hears);
    document.body.classList.toggle("mute", mute);
    document.body.classList.toggle("listens", listens);
    if (!current.turns.length || speaks) draw();
  } catch (error) {
    at("model").textContent = error.message;
    if (error.status === 503) setTimeout(greet, 2000);  // the model is still loading
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Markdown
// ---------------------------------------------------------------------------------------------------------------------

// Formulas: \( … \) in a line; \[ … \] and $$ … $$, displayed. None has an empty line in it. One without its end
// is still coming; but $$ within a line is text until there is a second one.
const {raw} = String;
const inside = close => raw`((?:(?!${close})(?:\\[^]?|[^\\\n]|\n(?!\s*\n)))+)`;
const [IN_LINE, IN_BRACKETS, IN_DOLLARS] = [raw`\\\(` + inside(raw`\\\)`), raw`\\\[` + inside(raw`\\\]`),
                                            raw`\$\$(?!\$)` + inside(raw`\$\$`)];
const INLINE = raw`${IN_LINE}(?:\\\)|$)|${IN_BRACKETS}(?:\\\]|$)|${IN_DOLLARS}\$\$`;
const AT_START = new RegExp(`^(?:${INLINE})`), ANYWHERE = new RegExp(INLINE, "g");
const BLOCK = new RegExp(
  raw`^ {0,3}(?:${IN_BRACKETS}(?:\\\]|(?=\n\s*\n)|$)|${IN_DOLLARS}(?:\$\$|(?=\n\s*\n)|$))[ \t]*(?=\n|$)`);

/** The token of the formula that a regular expression has found. */
function formulaToken(type, found) {
  const text = found?.slice(1).find(Boolean);
  return text && {type, raw: found[0], text, displayMode: !found[0].startsWith("\\("),
                  complete: found[0].trim().length === text.length + 4};  // two marks of two characters
}

/** A formula as MathML, or its source as code if it is incomplete or can't be read. */
function formula({raw: source, text, displayMode, complete}) {
  try {
    const macros = {"\\boxed": raw`\fbox{$\displaystyle #1$}`};  // Temml's own needs a style attribute
    const settings = {displayMode, macros, throwOnError: true};
    if (complete) return temml.renderToString(text, settings).replace(/\sstyle="[^"]*"/g, "");  // the policy forbids it
  } catch {
    // not LaTeX, or more of it than Temml knows: the source says so
  }
  return make("code", {}, source.trim()).outerHTML;
}

/** marked's rule for * and _, with other characters in the place of formulas; `text` is the end of `masked`. */
function emStrong(text, masked, before) {
  let hidden = masked;
  for (const found of text.matchAll(ANYWHERE)) {
    const start = masked.length - text.length + found.index, length = found[0].length;
    hidden = hidden.slice(0, start) + "a".repeat(length) + hidden.slice(start + length);
  }
  return marked.Tokenizer.prototype.emStrong.call(this, text, hidden, before);
}

const markdown = new marked.Marked({
  breaks: true,
  tokenizer: {html: () => undefined, tag: () => undefined, emStrong},  // HTML in an answer is text
  renderer: {checkbox: ({checked}) => checked ? "☑ " : "☐ "},
  extensions: [
    {name: "formula", level: "inline", start: text => text.search(/\\[([]|\$\$/), renderer: formula,
     tokenizer: text => formulaToken("formula", text.match(AT_START))},
    {name: "display", level: "block", start: text => text.search(/\n {0,3}(?:\\\[|\$\$)/) + 1 || -1,
     renderer: token => `<p>${formula(token)}</p>`, tokenizer: text => formulaToken("display", text.match(BLOCK))}],
});
const MATH_TAGS = ["math", "menclose", "mfrac", "mi", "mmultiscripts", "mn", "mo", "mover", "mpadded", "mphantom",
                   "mprescripts", "mroot", "mrow", "ms", "mspace", "msqrt", "mstyle", "msub", "msubsup", "msup",
                   "mtable", "mtd", "mtext", "mtr", "munder", "munderover"];
const MATH_ATTRIBUTES = ["accent", "columnspan", "depth", "display", "displaystyle", "fence", "form", "height",
                         "largeop", "linethickness", "lspace", "mathvariant", "maxsize", "minsize", "movablelimits",
                         "notation", "rspace", "scriptlevel", "separator", "stretchy", "symmetric", "voffset", "width"];
const ALLOWED = {
  ALLOWED_TAGS: ["p", "br", "hr", "h3", "h4", "h5", "h6", "ul", "ol", "li", "blockquote", "pre", "code", "strong", "em",
                 "del", "a", "table", "thead", "tbody", "tr", "th", "td", "#text", ...MATH_TAGS],
  ALLOWED_ATTR: ["href", "start", "align", "class", ...MATH_ATTRIBUTES], ALLOW_DATA_ATTR: false, ALLOW_ARIA_ATTR: false,
  ALLOWED_URI_REGEXP: /^(https?|mailto):/i, ADD_URI_SAFE_ATTR: ["start", "align", ...MATH_ATTRIBUTES],
  RETURN_DOM_FRAGMENT: true,
};
const LANGUAGES = {"c++": "cpp", golang: "go", jsonc: "json", console: "bash"};  // names that Prism doesn't know

/** The nodes of a program's text, with the classes by which the page colours it. */
function coloured(text, language) {
  const grammar = Prism.languages[LANGUAGES[language] ?? language];
  const node = token => typeof token === "string" ? token : make("span",
    {className: ["token", token.type, token.alias].flat().join(" ")}, ...[token.content].flat().map(node));
  return typeof grammar === "object" ? Prism.tokenize(text, grammar).map(node) : [text];
}

function showAnswer(place, text) {
  try {
    showMarkdown(place, text);
  } catch (error) {  // nested deeper than the library can follow
    if (!(error instanceof RangeError)) throw error;
    place.replaceChildren(make("p", {className: "plain"}, text));
  }
}

/** Shows Markdown as one element for each block; blocks that stay the same keep their element. */
function showMarkdown(place, text) {
  const tokens = markdown.lexer(text);
  let depth = 2;  // of the heading before: the headings of an answer stand below "Answer", without gaps
  markdown.walkTokens(tokens, token => {
    if (token.type === "heading") token.depth = depth = Math.min(token.depth + 2, depth + 1, 6);
    if (token.type === "image") {  // the page loads nothing
      Object.assign(token, {type: "link", tokens: [{type: "text", raw: token.raw, text: token.text || token.href}]});
    }
  });
  const blocks = tokens.filter(token => token.type !== "space");
  blocks.forEach((token, i) => {
    const old = place.children[i], mark = JSON.stringify(token);
    if (old?.mark === mark) return;
    const block = make("div", {className: "block", mark}, DOMPurify.sanitize(markdown.parser([token]), ALLOWED));
    for (const link of block.querySelectorAll("a")) Object.assign(link, {target: "_blank", rel: "noreferrer"});
    for (const wide of block.querySelectorAll("table, math[display=block]")) {
      const scroll = make("span", {className: "scroll", tabIndex: 0});
      wide.replaceWith(scroll);
      scroll.append(wide);
    }
    for (const code of block.querySelectorAll("pre > code")) {
      const pre = code.parentElement, listing = make("div", {className: "listing"});
      const language = code.className.replace("language-", "");
      code.replaceChildren(...coloured(code.textContent, language));
      pre.tabIndex = 0;
      pre.replaceWith(listing);
      listing.append(make("div", {className: "bar"}, make("span", {}, language),
                          ...copyButton(() => code.textContent)), pre);
    }
    if (old) old.replaceWith(block);
    else place.append(block);
  });
  while (place.children.length > blocks.length) place.lastElementChild.remove();
}

/** A button that copies a text, if the browser lets the page (over HTTPS, or on this machine). */
function copyButton(text) {
  if (!navigator.clipboard) return [];
  const button = make("button", {type: "button", textContent: "Copy"});
  button.addEventListener("click", async () => {
    const copied = await navigator.clipboard.writeText(text()).then(() => true, () => false);
    button.textContent = copied ? "Copied" : "Not copied";
    setTimeout(() => button.textContent = "Copy", 1500);
  });
  return [button];
}

// ---------------------------------------------------------------------------------------------------------------------
// What is seen
// ---------------------------------------------------------------------------------------------------------------------

const drawn = new WeakMap();  // turn -> its elements

function drawChats() {
  const sorted = [...chats.values()].sort((a, b) => b.changed - a.changed);
  at("chats").replaceChildren(...sorted.map(chat => {
    const link = make("a", {href: "#" + chat.id, title: chat.title}, chat.title);
    if (chat === current) link.ariaCurrent = "page";
    const button = make("button", {ariaLabel: `Rename or delete ${chat.title}`}, "⋯");
    button.addEventListener("click", () => rename(chat));
    return make("li", {}, link, button);
  }));
  at("title").textContent = current.title;
  document.title = current.turns.length ? `${current.title} · Qwen3` : "Qwen3";
}

/** Draws the current conversation, and what can be done with each turn. */
function draw() {
  const {turns} = current, log = at("log"), busy = running.has(current);
  log.replaceChildren(...turns.map(turn => {
    refresh(turn);
    return drawn.get(turn).turn;
  }));
  if (!turns.length) log.append(welcome());
  log.ariaBusy = String(busy);
  at("stop").hidden = !busy;
  at("send").hidden = busy;
  log.scrollTop = log.scrollHeight;
}

/** What an empty conversation shows. */
function welcome() {
  if (hears) return make("section", {className: "welcome"}, make("h2", {}, `Speech to text by ${model}`), make("p", {},
    "A model on this server writes down what is said. It can be wrong. Drop a sound here, or record one."));
  if (mute) return make("section", {className: "welcome"}, make("h2", {}, `Text to speech by ${model}`), make("p", {},
    "The model on this server speaks texts for clients, POST /v1/audio/speech, and doesn't chat. This page reads " +
    `answers aloud if the server has another --model, and --speech ${model}.`));
  const examples = EXAMPLES.map(text => {
    const button = make("button", {}, text);
    button.addEventListener("click", () => {
      if (settingsAreSound()) askFor(text);
      at("box").focus();
    });
    return button;
  });
  return make("section", {className: "welcome"}, make("h2", {}, model ? `Chat with ${model}` : "Chat"),
              make("p", {}, "A language model on this server answers. It can be wrong. You may ask:"), ...examples);
}

/** Draws a turn as it is now. */
function refresh(turn) {
  const busy = running.has(current), asked = turn.role === "user";
  if (!drawn.has(turn)) drawn.set(turn, asked ? questionElements(turn) : answerElements(turn));
  const parts = drawn.get(turn), last = turn === current.turns.at(-1), coming = busy && last;
  for (const button of parts.tools.querySelectorAll("button")) {
    button.hidden = asked ? busy || hears : coming || !turn.content;
  }
  if (asked) return;
  const form = turn.form && turn.content, value = form && parsed(turn.content);
  const text = form ? "```json\n" + (value ? JSON.stringify(value, null, 2) : turn.content) + "\n```" : turn.content;
  if (parts.shown !== text) showAnswer(parts.text, parts.shown = text);
  parts.details.hidden = !turn.thought;
  parts.summary.textContent = coming && !turn.content ? "Thinking …" : "Thought";
  parts.thought.textContent = turn.thought ?? "";
  parts.error.textContent = turn.error ?? "";
  parts.note.textContent = !coming ? turn.note ?? "" : turn.content || turn.thought ? "" : "Reading …";
  parts.figures.lastChild.textContent = turn.figures ?? "";
  parts.figures.hidden = coming || !turn.figures;
  parts.retry.hidden = busy || !last || hears;
  parts.aloud.hidden ||= !speaks;
}

function questionElements(turn) {
  const edit = make("button", {}, "Edit");
  const tools = make("div", {className: "tools"}, ...copyButton(() => turn.content), edit);
  const shown = make("div", {className: "pictures"}, ...(turn.pictures ?? []).map(thumbnail));
  const text = make("div", {className: "text"}, shown, turn.content);
  const element = make("article", {className: "turn user"}, make("h2", {className: "unseen"}, "Question"), text, tools);
  edit.addEventListener("click", () => change(turn, text, tools));
  return {turn: element, tools};
}

function answerElements(turn) {
  const parts = {summary: make("summary"), thought: make("div", {className: "thought"}), text: make("div"),
                 error: make("p", {className: "error", role: "alert"}), note: make("span", {className: "note"}),
                 retry: make("button", {}, "Retry"), aloud: make("button", {}, "Read aloud"),
                 figures: make("details", {}, make("summary", {}, "Tokens and speed"), make("span"))};
  parts.details = make("details", {}, parts.summary, parts.thought);
  parts.tools = make("div", {className: "tools"}, ...copyButton(() => turn.content), parts.aloud, parts.retry,
                     parts.note, parts.figures);
  parts.turn = make("article", {className: "turn"}, make("h2", {className: "unseen"}, "Answer"), parts.details,
                    parts.text, parts.error, parts.tools);
  parts.aloud.addEventListener("click", () => reading ? reading.abort() : readAloud(turn));
  parts.retry.addEventListener("click", () => {
    if (!settingsAreSound()) return;
    answer(current, {former: current.turns.pop()});
    at("box").focus();  // the button is hidden now
  });
  return parts;
}

/** Puts an editor in the place of a question; the changed question is asked, and what followed it is gone. */
function change(turn, text, tools) {
  const box = make("textarea", {value: turn.content, rows: 4, ariaLabel: "Your question"});
  const send = make("button", {className: "first"}, "Ask again"), cancel = make("button", {type: "button"}, "Cancel");
  const form = make("form", {}, box, make("div", {className: "row"}, send, cancel));
  const close = () => {
    form.replaceWith(text);
    tools.hidden = false;
    at("box").focus();
  };
  const later = current.turns.indexOf(turn) < current.turns.length - 2;
  if (later) form.lastChild.append(make("span", {className: "note"}, "The turns after this question will be removed."));
  form.addEventListener("submit", event => {
    event.preventDefault();
    if (running.has(current) || !(box.value.trim() || turn.pictures) || !settingsAreSound()) return;
    close();
    askFor(box.value, current.turns.slice(0, current.turns.indexOf(turn)), turn.pictures);
  });
  cancel.addEventListener("click", close);
  form.addEventListener("keydown", event => event.key === "Escape" && !event.isComposing && close());
  sendOnEnter(box, form);
  text.replaceWith(form);
  tools.hidden = true;
  box.focus();
}

async function rename(chat) {
  const dialog = at("naming");
  at("name").value = chat.title;
  dialog.returnValue = "";
  dialog.showModal();
  await new Promise(resolve => dialog.addEventListener("close", resolve, {once: true}));
  if (dialog.returnValue === "delete") remove(chat);
  if (dialog.returnValue !== "rename") return;
  chat.title = at("name").value;
  save(chat);
}

// ---------------------------------------------------------------------------------------------------------------------
// Asking
// ---------------------------------------------------------------------------------------------------------------------

/** Shows the conversation that the address names, or a new one. */
function open() {
  current = chats.get(location.hash.slice(1)) ?? {id: newId(), title: "New chat", turns: []};
  document.body.classList.remove("open");
  at("menu").ariaExpanded = "false";
  drawChats();
  draw();
}

/** Asks a question after these turns. */
function askFor(question, earlier = current.turns, shown = [], sound = null) {
  if (!chats.has(current.id)) {
    current.title = question.trim().split("\n")[0].slice(0, 60) || "Picture";
    history.replaceState(null, "", "#" + current.id);
  }
  const before = current.turns;
  current.turns = [...earlier, {role: "user", content: question, ...(shown.length && {pictures: shown})}];
  at("ask-says").textContent = "";
  answer(current, {before, sound});
}

/** Takes back a question that the server refuses: the turns are as before it, and its text is in the box. */
function takeBack(chat, before, error) {
  const box = at("box"), question = chat.turns.at(-2);
  chat.turns = before;
  if (before.length) save(chat);
  else remove(chat);
  showPictures([...(question.pictures ?? []), ...pictures]);
  box.value = [question.content, box.value].filter(Boolean).join("\n");
  at("ask-says").textContent = `The message is not added: ${error.message}.`;
}

/** A turn as a message: its pictures stand before its text. */
function messageOf({role, content, pictures}) {
  const parts = (pictures ?? []).map(url => ({type: "image_url", image_url: {url}}));
  return {role, content: parts.length ? [...parts, ...(content ? [{type: "text", text: content}] : [])] : content};
}

/** Asks for the answer to the last question; `former` is the answer that it replaces, unless it fails at once. `before`
    are the turns before the question, which come back if the server refuses it. The answer to a `sound` is its text. */
async function answer(chat, {former, before, sound}) {
  const system = at("system").value.trim(), run = new AbortController(), asked = aloud;
  aloud = false;
  const messages = [...(system ? [{role: "system", content: system}] : []),
                    ...chat.turns.filter(turn => turn.content || turn.pictures).map(messageOf)];
  const body = {messages, stream: true, stream_options: {include_usage: true}, stop_loops: true, ...wishes()};
  const turn = {role: "assistant", content: "", thought: "", note: "stopped", form: Boolean(at("format").value)};
  chat.turns.push(turn);
  running.set(chat, run);
  save(chat);
  draw();
  let began, waiting = false, took = 0;
  const show = () => {
    waiting = false;
    if (chat !== current) return;
    const log = at("log"), start = performance.now(), atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
    refresh(turn);
    if (atEnd) log.scrollTop = log.scrollHeight;
    took = performance.now() - start;
  };
  try {
    const coming = sound ? request("v1/audio/transcriptions", sound, run.signal)
      : request("v1/chat/completions", body, run.signal);
    for await (const value of valuesOf(await coming)) {
      const {delta, finish_reason} = (sound ? heardIn(value) : value.choices[0]) ?? {};
      turn.thought += delta?.reasoning_content ?? "";
      turn.content += delta?.content ?? "";
      if (turn.thought || turn.content) began ??= performance.now();
      if (finish_reason) turn.note = finish_reason === "length" ? "cut off" : "";
      if (value.usage && !sound) turn.figures = figures(value.usage, performance.now() - began);
      if (!waiting) setTimeout(show, 20 + 4 * took);  // a long list of Markdown takes 400 ms: leave time for the rest
      waiting = true;
    }
  } catch (error) {
    const nothing = !turn.content && !turn.thought, what = nothing ? "No answer" : "The answer is incomplete";
    if (error.name !== "AbortError") Object.assign(turn, {error: `${what}: ${error.message}.`, note: ""});
    if (before && (error.code === "context_length_exceeded" || ["messages", "image_url"].includes(error.param))) {
      running.delete(chat);
      takeBack(chat, before, error);
      return chat === current && draw();
    }
    if (former && nothing) chat.turns[chat.turns.indexOf(turn)] = {...former, error: turn.error};
  }
  running.delete(chat);
  if (chats.get(chat.id) === chat) save(chat);
  if (chat === current) draw();
  if (asked && turn.content && !turn.error) readAloud(turn);
}

/** What is read aloud of an answer's element: all of its text, but not the bars above its listings. */
function readable(text) {
  text.classList.add("bare");
  const found = text.innerText.trim();
  text.classList.remove("bare");
  return found;
}

/** Plays the text of an answer while the server speaks it. */
async function readAloud(turn) {
  const run = reading = new AbortController(), {aloud: button, text} = drawn.get(turn);
  const stopped = new Promise(resolve => run.signal.addEventListener("abort", resolve));
  let audio, played, end = 0, half = [];
  button.textContent = "Stop reading";
  try {
    for (const input of readable(text).match(SPOKEN) ?? [""]) {
      const response = await request("v1/audio/speech", {input, response_format: "pcm"}, run.signal);
      audio ??= new AudioContext({sampleRate: Number(response.headers.get("content-type").split("rate=")[1])});
      for (let stream = response.body.getReader(), part; !(part = await reached(stream.read(), CUT)).done;) {
        const bytes = Uint8Array.from([...half, ...part.value]), n = bytes.length >> 1;
        half = bytes.slice(2 * n);  // of a sample
        if (!n) continue;
        const source = new AudioBufferSourceNode(audio, {buffer: audio.createBuffer(1, n, audio.sampleRate)});
        source.buffer.copyToChannel(Float32Array.from(new Int16Array(bytes.buffer, 0, n), value => value / 32768), 0);
        source.connect(audio.destination);
        source.start(end = Math.max(end, audio.currentTime));
        end += source.buffer.duration;
        played = new Promise(resolve => source.addEventListener("ended", resolve));
      }
    }
    await Promise.race([played, stopped]);
  } catch (error) {
    if (error.name !== "AbortError") at("ask-says").textContent = `The answer isn't read aloud: ${error.message}.`;
  }
  audio?.close();
  reading = null;
  button.textContent = "Read aloud";
}

/** What an answer took, in words; milliseconds since its first token. */
function figures(usage, milliseconds) {
  const {completion_tokens: n, total_tokens: total} = usage, rate = (n - 1) / milliseconds * 1000;
  return [`${n} tokens`, ...(n > 1 && isFinite(rate) ? [`${rate.toFixed(1)} tokens/s`] : []),
          `${total}${context ? ` of ${context}` : ""} tokens of the context`].join(" · ");
}

/** An event of a sound's text as a choice of a chat. */
const heardIn = ({type, delta}) => ({delta: {content: delta}, finish_reason: type.endsWith("done") && "stop"});

/** Asks for the text of a sound's file, or of a recording. What the browser can't read, the server may. */
async function hear(file, name) {
  if (running.has(current)) return;
  const form = new FormData(), wav = await wavOf(file).catch(() => file);
  form.append("file", wav.size > LARGEST_SOUND ? file : wav, "sound");
  if (listens) return askAloud(form);
  form.append("stream", "true");
  form.append("prompt", at("system").value);
  askFor(name, current.turns, [], form);
}

/** Asks what is said in a sound, as the other model writes it down; the answer is read aloud. */
async function askAloud(form) {
  const box = at("box");
  box.placeholder = "Listening …";
  try {
    const {text} = await (await request("v1/audio/transcriptions", form)).json();
    box.value = [box.value, text].filter(Boolean).join(" ");
    aloud = speaks && Boolean(text);
    if (text) at("ask").requestSubmit();
    aloud = false;  // where the question isn't asked
  } catch (error) {
    at("ask-says").textContent = `The sound isn't heard: ${error.message}.`;
  }
  box.placeholder = "Your message";
}

/** A sound as a WAV file: one channel, RATE samples a second, 16 bits. */
async function wavOf(file) {
  const decoder = new OfflineAudioContext(1, 1, RATE), sound = await decoder.decodeAudioData(await file.arrayBuffer());
  const channels = Array.from({length: sound.numberOfChannels}, (_, i) => sound.getChannelData(i));
  const numbers = Int16Array.from(channels[0], (_, i) => {
    const mean = channels.reduce((sum, channel) => sum + channel[i], 0) / channels.length;
    return Math.round(32767 * Math.max(-1, Math.min(1, mean)));
  });
  const text = words => new TextEncoder().encode(words), whole = (...values) => new Uint32Array(values);
  const about = [new Uint16Array([1, 1]), whole(RATE, 2 * RATE), new Uint16Array([2, 16])];  // PCM, one channel
  return new Blob([text("RIFF"), whole(36 + numbers.byteLength), text("WAVEfmt "), whole(16), ...about, text("data"),
                   whole(numbers.byteLength), numbers]);
}

/** Begins to record, or ends it: then the recording is heard. */
async function record() {
  if (recorder) return recorder.stop();
  at("ask-says").textContent = "";
  try {
    const stream = await navigator.mediaDevices.getUserMedia({audio: true}), parts = [];
    recorder = new MediaRecorder(stream);
    recorder.addEventListener("dataavailable", ({data}) => parts.push(data));
    recorder.addEventListener("stop", () => {
      stream.getTracks().forEach(track => track.stop());
      recorder = null;
      at("record").textContent = "Record";
      hear(new Blob(parts), "Recording");
    });
    recorder.start();
    at("record").textContent = "Stop recording";
  } catch (error) {  // mediaDevices is absent but for https and localhost
    at("ask-says").textContent = `The browser doesn't record here: ${error.message}.`;
  }
}

const thumbnail = (url, i) => make("img", {src: url, alt: `Picture ${i + 1}`});

/** Sets the pictures of the next question. */
function showPictures(urls) {
  pictures = urls;
  at("pictures").replaceChildren(...urls.map((url, i) => {
    const button = make("button", {type: "button", ariaLabel: `Remove picture ${i + 1}`}, "×");
    button.addEventListener("click", () => {
      showPictures(pictures.filter(each => each !== url));
      at("box").focus();
    });
    return make("div", {}, thumbnail(url, i), button);
  }));
}

/** Adds files to the pictures of the next question. */
async function add(files) {
  at("ask-says").textContent = "";
  for (const file of files) {
    const url = await shrunk(file).catch(() => null);
    if (url) showPictures([...pictures, url]);
    else at("ask-says").textContent += `The browser can't read ${file.name} as a picture. `;
  }
}

/** A picture's file as a data: URL: upright, on white, and with PIXELS at most, so that a photo takes about 200 kB. */
async function shrunk(file) {
  const bitmap = await createImageBitmap(file), {width, height} = bitmap;
  const scale = Math.min(1, Math.sqrt(PIXELS / (width * height)));
  const canvas = make("canvas", {width: Math.max(1, width * scale), height: Math.max(1, height * scale)});
  const pen = canvas.getContext("2d");
  Object.assign(pen, {fillStyle: "white", imageSmoothingQuality: "high"});
  pen.fillRect(0, 0, canvas.width, canvas.height);
  pen.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", 0.9);
}

/** Enter submits; with a keyboard on the screen it begins a line, and in an input method it ends a word. */
function sendOnEnter(box, form) {
  box.addEventListener("keydown", event => {
    const composing = event.isComposing || event.keyCode === 229;  // 229: Safari's, for the Enter that ends a word
    if (event.key !== "Enter" || event.shiftKey || composing || matchMedia("(pointer: coarse)").matches) return;
    event.preventDefault();
    form.requestSubmit();
  });
}

at("ask").addEventListener("submit", event => {
  event.preventDefault();
  const box = at("box");
  if (running.has(current) || !(box.value.trim() || pictures.length) || !settingsAreSound()) return;
  askFor(box.value, current.turns, pictures);
  box.value = "";
  showPictures([]);
});
sendOnEnter(at("box"), at("ask"));
at("add").addEventListener("click", () => at("files").click());
at("files").addEventListener("change", async () => {
  await add(at("files").files);
  at("files").value = "";  // so that the same file can be chosen again
  at("box").focus();
});
at("box").addEventListener("paste", event => {
  const {files, types} = event.clipboardData;
  if (!sees || !files.length || types.includes("text/plain")) return;  // of a table, the text is meant
  event.preventDefault();
  add([...files]);
});
for (const name of ["dragover", "drop"]) {
  addEventListener(name, event => {
    if (!(sees || hears) || !event.dataTransfer.types.includes("Files")) return;
    event.preventDefault();
    const [...files] = event.dataTransfer.files;
    if (name === "drop") hears ? hear(files[0], files[0].name) : add(files);
  });
}
at("open-sound").addEventListener("click", () => at("sound").click());
at("sound").addEventListener("change", async () => {
  const [file] = at("sound").files;
  await hear(file, file.name);
  at("sound").value = "";
});
at("record").addEventListener("click", record);
at("stop").addEventListener("click", () => {
  running.get(current)?.abort();
  at("box").focus();
});
addEventListener("keydown", event => {
  if (event.key !== "Escape" || event.isComposing || document.querySelector("dialog[open]")) return;
  running.get(current)?.abort();
  reading?.abort();
});
at("open-settings").addEventListener("click", () => at("settings").showModal());
at("menu").addEventListener("click", () => {
  at("menu").ariaExpanded = String(document.body.classList.toggle("open"));
});
at("fresh").addEventListener("click", () => at("box").focus());
addEventListener("hashchange", open);
for (const end of ["beforeunload", "pagehide"]) {  // the first before requests break; on phones the second alone
  addEventListener(end, () => {
    for (const [chat, run] of running) {
      save(chat);
      run.abort();
    }
  });
}

try {
  apiKey = sessionStorage.getItem(KEY) ?? "";
  Object.keys(localStorage).filter(key => key.startsWith(CHAT)).forEach(key => recall(key.slice(CHAT.length)));
} catch (error) {
  notKept(error);
}
recallSettings();
open();
greet();
