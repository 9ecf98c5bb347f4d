"use strict";
/* The page's program. The numbers come from qwen3.py. Texts become text nodes, never markup. */

const page = JSON.parse(document.getElementById("contents").textContent);
const {about, labels, tokens, way, attention, delta, lens, choosing, cache} = page;
const nTokens = tokens.ids.length, runs = runsOf(tokens.ids, page.pictures);

// ---------------------------------------------------------------------------------------------------------------------
// Small tools
// ---------------------------------------------------------------------------------------------------------------------

const byId = id => document.getElementById(id);
const range = n => [...Array(n).keys()];
const sum = values => values.reduce((total, value) => total + value, 0);

/** A new element with properties or attributes, and children: elements or texts. */
function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in element) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

/** The number that 16 bits of a float16 stand for. */
function half(bits) {
  const sign = bits & 0x8000 ? -1 : 1, exponent = bits >> 10 & 31, fraction = bits & 1023;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (exponent ? 2 ** (exponent - 25) * (1024 + fraction) : 2 ** -24 * fraction);
}

/** An array {shape, dtype, data} of the page -> {shape, values}. */
function unpack({shape, dtype, data}) {
  const bytes = Uint8Array.from(atob(data), character => character.charCodeAt(0));
  const view = new DataView(bytes.buffer), size = dtype === "f2" ? 2 : 4,
        values = new Float32Array(bytes.length / size);
  for (let i = 0; i < values.length; i++) {
    values[i] = size === 2 ? half(view.getUint16(2 * i, true)) : view.getFloat32(4 * i, true);
  }
  return {shape, values};
}

/** One element of an unpacked array. */
const item = (array, ...index) => array.values[index.reduce((at, i, axis) => at * array.shape[axis] + i, 0)];

const percent = p => `${(100 * p).toFixed(1)} %`;
const quoted = id => `“${labels[id]}”`;

const short = value => Number.isFinite(value) ? `${Number(value.toPrecision(3))}` : "–";

/** A number in three digits with a unit: 1.23 MB. */
function amount(value, unit) {
  const scales = [["G", 1e9], ["M", 1e6], ["k", 1e3], ["", 1], ["m", 1e-3], ["µ", 1e-6]];
  const [prefix, scale] = scales.find(([, scale]) => Math.abs(value) >= scale) || (value ? scales[5] : scales[3]);
  return `${short(value / scale)} ${prefix}${unit}`;
}

// ---------------------------------------------------------------------------------------------------------------------
// State: what is chosen. Each view names the fields it depends on and is drawn again when one of them changes.
// ---------------------------------------------------------------------------------------------------------------------

const words = range(nTokens).slice(about.n_prompt).filter(i => /^(?!<.*>$).*[\p{L}\p{N}]/u.test(labels[tokens.ids[i]]));
const state = {token: words[0] ?? about.n_prompt - 1, step: way.steps.findIndex(step => step.weight === "o_proj"), layer: 0,
               head: 0, key: 0, pair: 0, net: 0, netHead: 0, lens: about.num_hidden_layers,
               drawn: 0, pass: 0, setting: 0};
const views = [];

function change(changes) {
  const changed = Object.keys(changes).filter(name => state[name] !== changes[name]);
  Object.assign(state, changes);
  for (const [names, draw] of views) if (names.some(name => changed.includes(name))) draw();
}

function view(names, draw) {
  views.push([names, draw]);
  draw();
}

/** Ties a range input to a field of the state; said(value) is the value in words. */
function slider(id, name, last, said, min = 0, step = 1) {
  const input = byId(id);
  Object.assign(input, {min, max: last, step, value: state[name]});
  input.addEventListener("input", () => change({[name]: +input.value}));
  view([name], () => {
    input.value = state[name];
    input.setAttribute("aria-valuetext", byId(`${id}-is`).textContent = said(state[name]));
  });
}

/** A colour of page.css, for what is drawn on a canvas. */
const color = name => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

const charts = {};  // uPlot's, by the id of their place
const places = n => range(n + 1).map(i => i - 0.5);  // the edges of n bars of one width, with i in the middle of bar i
const labelled = label => (plot, all) => all.map(label);  // an axis, as uPlot asks for it

/** A chart by uPlot: the value i of a series stands from edges[i] to edges[i + 1]. A series is {fill: color} or
    {stroke: color}; said(i) is the text for a value. A click picks one (the keyboard has the sliders).
    Returns show(the values of each series, the i to frame). */
function chart(id, edges, series, said, pick, {bars = true, x = String, y = {}, scale = {}} = {}) {
  const place = byId(id), size = () => ({width: place.clientWidth, height: place.clientHeight});
  const paths = uPlot.paths[bars ? "bars" : "stepped"]({align: 1, size: [1], gap: 1});
  const ink = name => name && (() => `rgb(${color(name)})`), lines = {stroke: ink("line"), width: 1};
  const axis = {stroke: ink("soft"), font: "12px system-ui", grid: lines, ticks: lines};
  let framed = 0, pointed = 0;
  const mark = plot => {
    const {left} = plot.cursor, [from, to] = [framed, framed + 1].map(i => plot.valToPos(edges[i], "x"));
    plot.setSelect({left: from, width: to - from, top: 0, height: plot.bbox.height / devicePixelRatio}, false);
    pointed = left < 0 ? framed : Math.max(0, edges.findLastIndex(edge => edge <= plot.posToVal(left, "x")));
    byId(`${id}-is`).textContent = said(pointed);
  };
  const plot = charts[id] = new uPlot({
    ...size(), legend: {show: false}, hooks: {draw: [mark], setCursor: [mark]},
    cursor: {y: false, points: {show: false}, drag: {x: false}, bind: {dblclick: () => null}},
    scales: {x: {time: false, range: [edges[0], edges.at(-1)]},
             y: {range: (plot, least, most) => [0, most || 1], ...scale}},
    axes: [{...axis, size: 30, incrs: range(9).flatMap(i => [1, 2, 5].map(n => n * 10 ** i)), values: labelled(x)},
           {...axis, size: 60, values: labelled(short), ...y}],
    series: [{}, ...series.map(({fill, stroke}) => ({
      paths, points: {show: false}, width: stroke ? 2 : 0, fill: ink(fill), stroke: ink(stroke)}))]}, null, place);
  place.addEventListener("click", () => pick(pointed));
  new ResizeObserver(() => plot.setSize(size())).observe(place);
  views.push([["scheme"], () => plot.redraw()]);
  return (all, i) => {
    framed = i;
    plot.setData([edges, ...all.map(values => [...values, values.at(-1)].map(y => isNaN(y) ? null : y))]);
    plot.setCursor({left: -10, top: -10});  // points nowhere
  };
}

/** The element, with this share of its colour. */
const shaded = (element, share) => (element.style.setProperty("--share", `${(100 * share).toFixed(1)}%`), element);

// ---------------------------------------------------------------------------------------------------------------------
// The head of the page, and the source
// ---------------------------------------------------------------------------------------------------------------------

function showSource(title, file, first, last, marked) {
  byId("source-name").textContent = `${file} ${about.version}, line ${marked}: ${title}`;
  const lines = page.sources[file].split("\n").map((line, i) => make("span", {
    className: i + 1 === marked ? "marked" : first <= i + 1 && i + 1 <= last ? "within" : ""}, `${line}\n`));
  byId("lines").replaceChildren(...lines);
  byId("source").showModal();
  lines[marked - 1].scrollIntoView({block: "center"});
}

/** A button that shows a function, with one line of it, or the line of another function that calls it, marked. */
function sourceButton(name, within, line) {
  const [file, first, last] = Object.values(page.lines).filter(
    ([file, a, b]) => line && file === within && a <= line && line <= b).pop() || page.lines[name];
  return make("button", {className: "source", type: "button", onclick: () => showSource(
    name, file, first, last, line || first)}, line ? `${file}, line ${line}` : name);
}

function drawHead() {
  document.title = `Inside ${about.model}: ${about.prompt}`;
  byId("model").textContent = about.model;
  byId("prompt").textContent = about.prompt;
  byId("prompt").before(...page.pictures.map(({url}, i) => make("img", {src: url, alt: labels[~i]})));
  byId("answer").textContent = about.answer.trim() || "(no answer)";
  if (!delta) byId("delta").remove();
  byId("about").textContent = `${about.num_hidden_layers} layers` +
    (delta ? `, ${delta.layers.length} of them delta nets, ` : ", ") + `hidden size ${about.hidden_size}, ` +
    `${about.num_attention_heads} query heads on ${about.num_key_value_heads} key heads, ` +
    `a vocabulary of ${about.vocab_size} tokens; ` +
    `computed by ${Object.keys(page.sources).join(" and ")} ${about.version} on ${about.date} with seed ${about.seed}` +
    (about.ended ? "" :
      `. The answer was cut off after ${nTokens - about.n_prompt} tokens; a larger --max-tokens shows more`);
  document.querySelectorAll("main section").forEach((section, i) => {
    const title = section.querySelector("h2");
    title.prepend(`${i + 1} · `);
    title.id = `${section.id}-title`;
    section.setAttribute("aria-labelledby", title.id);
    document.querySelector("nav").append(make("a", {href: `#${section.id}`}, title.textContent));
    const names = section.dataset.functions.split(" ").filter(
      name => name in page.lines && !(about.raw && name === "chat"));
    title.after(make("p", {className: "sources"}, "Computed by ", ...names.map(name => sourceButton(name))));
  });
}

// ---------------------------------------------------------------------------------------------------------------------
// 1: tokens
// ---------------------------------------------------------------------------------------------------------------------

function drawTokens() {
  const answer = i => i < 0 ? {} : {drawn: i, pass: i};  // pass i gave the answer's token i
  const all = pieces(token => change({token, ...answer(token - about.n_prompt)}));
  all.forEach((piece, i) => piece.classList.add("piece", tokens.parts[runs[i].first]));
  byId("pieces").append(...all);
  byId("wrapped").textContent = tokens.text;
  view(["token"], () => {
    const i = state.token, chosen = runOf(i), {picture} = chosen;
    all.forEach((piece, k) => piece.setAttribute("aria-pressed", runs[k] === chosen));
    byId("piece").textContent = `Token ${tokenName(i)}: ` + (picture ?
      `one of ${picture.rows} × ${picture.columns} tokens` + (picture.rows * picture.columns === picture.full ? "" :
        `; qwen3.py would make ${picture.full} of the picture, but this page has room for few`) :
      `id ${tokens.ids[i]}, bytes ${tokens.bytes[i] || "none"}; written by ` +
      {template: "the template", prompt: "you", answer: "the model"}[tokens.parts[i]]) +
      (page.mrope ? `; M-RoPE: ${["time", "row", "column"].map(
        (name, axis) => `${name} ${attention.positions[i][axis]}`).join(", ")}` : "");
  });
}

// ---------------------------------------------------------------------------------------------------------------------
// 2: the way
// ---------------------------------------------------------------------------------------------------------------------

function drawWay() {
  const norms = unpack(way.norms), streams = unpack(way.streams), nLayers = about.num_hidden_layers;
  const place = layer => layer < 0 ? "before the layers" : layer < nLayers ? `layer ${layer}` : "after the layers";
  const stepName = step => `${place(step.layer)}: ${step.function} ${step.weight}`;
  const showStream = chart(
    "stream", places(nLayers + 1), [{fill: "map"}],
    i => `${i ? `After layer ${i - 1}` : "Embedding"}: ${short(item(streams, i, state.token))}`,
    i => change({step: way.steps.findLastIndex(({layer}) => layer === i - 1)}), {x: i => i ? i - 1 : "embedding"});
  const showAlong = chart("along", places(nTokens), [{fill: "map"}],
                          i => `Token ${tokenName(i)}: ${short(item(norms, state.step, i))}`, token => change({token}));
  slider("way-token", "token", nTokens - 1, tokenName);
  slider("way-step", "step", way.steps.length - 1, i => `${i} ${stepName(way.steps[i])}`);
  view(["token", "step"], () => {
    const {token, step} = state, now = way.steps[step];
    showStream([range(nLayers + 1).map(layer => item(streams, layer, token))], Math.min(now.layer + 1, nLayers));
    showAlong([range(nTokens).map(i => item(norms, step, i))], token);
    const length = item(norms, step, token);
    const columns = [["prefill", now.prefill], ["decode", now.decode]].filter(([, costs]) => costs);
    const row = (title, said) => make("tr", {}, make("th", {scope: "row"}, title),
                                      ...columns.map(([, costs]) => make("td", {}, said(costs))));
    const rate = costs => costs.read === null ? null : costs.read / costs.seconds;
    byId("step-is").replaceChildren(
      `${stepName(now)}: ${page.words[now.weight] || page.words[now.function]}. Formula: ` +
      `${page.formulas[now.function]} `, sourceButton(now.function, now.file, now.line),
      make("span", {id: "length"}, Number.isFinite(length) ?
      ` Length at token ${token}: ${length.toPrecision(4)}` : ""));
    byId("step").replaceChildren(
      make("tr", {}, make("td"), ...columns.map(([name]) => make("th", {scope: "col"}, name))),
      row("shape of the result", costs => costs.shape.join(" × ")),
      row("bytes read", costs => costs.read === null ? "depends on the experts" : amount(costs.read, "B")),
      row("arithmetic", costs => costs.operations === null ? "depends on the experts" : amount(costs.operations, "op")),
      row("time", costs => amount(costs.seconds, "s")),
      row("read per second", costs => rate(costs) === null ? "–" : amount(rate(costs), "B/s")),
      row(`share of the memory's speed, ${amount(way.bandwidth, "B/s")}`,
          costs => rate(costs) === null ? "–" : percent(rate(costs) / way.bandwidth)));
  });
}

// ---------------------------------------------------------------------------------------------------------------------
// 3: attention
// ---------------------------------------------------------------------------------------------------------------------

const maps = unpack(attention.maps);
const weight = (layer, head, i, j) => j > i ? 0 : item(maps, layer, head, i * (i + 1) / 2 + j);

/** Draws a pixel for each share(row, column); stronger than linear, so that small ones are seen. NaN stays empty.
    With `over`, the weaker ones let more of the picture under the canvas pass. */
function paint(canvas, height, width, share, over = false) {
  const [paper, full] = ["paper", "map"].map(name => color(name).split(" ").map(Number));
  const picture = new ImageData(width, height);
  Object.assign(canvas, {width, height});
  for (let i = 0; i < width * height; i++) {
    const root = Math.sqrt(share(Math.floor(i / width), i % width));
    picture.data.set(over ? [...full, 230 * root] :
      [...paper.map((p, c) => p + root * (full[c] - p)), isNaN(root) ? 0 : 255], 4 * i);
  }
  canvas.getContext("2d").putImageData(picture, 0, 0);
}

/** Draws a head's map, one pixel for each pair of tokens. */
const drawMap = (canvas, layer, head) => paint(
  canvas, nTokens, nTokens, (i, j) => j > i ? NaN : weight(layer, head, i, j));

/** A button with a canvas, or what `face` makes, for each of n heads, which choose one by the state's field `name`. */
function headButtons(n, name, face = () => make("canvas", {"aria-hidden": "true"})) {
  const buttons = range(n).map(head => make("button", {type: "button", onclick: () => change({[name]: head})}, face(),
                                            `head ${head}`));
  view([name], () => buttons.forEach((button, head) => button.setAttribute("aria-pressed", head === state[name])));
  return buttons;
}

function drawAttention() {
  const nHeads = about.num_attention_heads, group = nHeads / about.num_key_value_heads;
  const {layers} = attention, gates = attention.gates && unpack(attention.gates), heads = headButtons(nHeads, "head");
  slider("layer", "layer", layers.length - 1, layer => `${layers[layer]}`);
  byId("heads").append(...range(about.num_key_value_heads).map(keyHead => make(
    "fieldset", {},
    make("legend", {}, `key head ${keyHead}`), ...heads.slice(keyHead * group, (keyHead + 1) * group))));
  view(["layer", "scheme"], () => heads.forEach((button, head) => drawMap(button.firstChild, state.layer, head)));

  const map = byId("map"), previous = unpack(attention.previous), induction = unpack(attention.induction);
  view(["layer", "head", "scheme"], () => {
    const {layer, head} = state;
    drawMap(map, layer, head);
    map.setAttribute("aria-label", `Attention of layer ${layers[layer]}, head ${head}; the slider below chooses a row`);
    byId("head-says").textContent = `Layer ${layers[layer]}, head ${head}: previous-token score ` +
      `${item(previous, layer, head).toFixed(3)}, induction score ${item(induction, layer, head).toFixed(3)}`;
  });
  map.onpointermove = map.onpointerdown = event => {
    const [key, token] = [event.offsetX / map.clientWidth, event.offsetY / map.clientHeight].map(
      share => Math.min(nTokens - 1, Math.max(0, Math.floor(share * nTokens))));
    change({token, key: Math.min(token, key)});
  };

  const share = n => `${100 * n / nTokens}%`;
  Object.assign(byId("map-row").style, {left: 0, height: share(1)});
  Object.assign(byId("map-cell").style, {width: share(1), height: share(1)});
  view(["token", "key"], () => {  // frames: the row of the token that asks, and the cell of the token that is looked at
    Object.assign(byId("map-row").style, {top: share(state.token), width: share(state.token + 1)});
    Object.assign(byId("map-cell").style, {top: share(state.token), left: share(state.key)});
  });

  slider("asks", "token", nTokens - 1, tokenName);
  const looks = pieces();
  looks.forEach((piece, i) => runs[i].picture || piece.addEventListener(
    "pointerenter", () => change({token: runs[i].first})));
  byId("looks").append(...looks);
  view(["token", "layer", "head"], () => {
    const {layer, head, token} = state, asks = runs.indexOf(runOf(token));
    const weights = runs.map(({first, n}) => sum(range(n).map(i => weight(layer, head, token, first + i))));
    looks.forEach((piece, i) => {
      shaded(piece, Math.sqrt(weights[i])).className =
        `piece tinted ${i === asks ? "asking" : i > asks ? "future" : ""}`;
    });
    const name = ({first, picture}) => picture ? labels[tokens.ids[first]] : tokenName(first);
    const best = range(asks + 1).sort((a, b) => weights[b] - weights[a]).slice(0, 5);
    const found = best.map(i => `${name(runs[i])} ${percent(weights[i])}`);
    const text = `${tokenName(token)} looks at: ${found.join(", ")}` +
      (gates ? `; the gate lets ${percent(item(gates, layer, head, token))} of the head's result pass` : "");
    byId("looks-at").textContent = text;
    byId("looks").setAttribute("aria-label", text);
  });

  byId("copies").textContent = "The previous-token score is a head's mean weight on the token before, in this text. " +
    `For the induction score, the model reads ${attention.repeated} random tokens twice in a row; the score is a ` +
    "head's mean weight on the token after the earlier copy of a token. A head with a high induction score " +
    "continues repeated text.";
  for (const [title, scores] of [["Previous token", previous], ["Induction", induction]]) {
    const best = range(scores.values.length).reduce((a, b) => scores.values[b] > scores.values[a] ? b : a, 0);
    const rows = layers.map((name, layer) => make(
      "tr", {}, make("th", {scope: "row"}, `layer ${name}`), ...range(nHeads).map(
        head => shaded(make("td", {className: "tinted"}, item(scores, layer, head).toFixed(2)),
                       Math.sqrt(Math.max(0, item(scores, layer, head)))))));
    const layer = Math.floor(best / nHeads), head = best % nHeads;
    const show = make("button", {type: "button", onclick: () => change({layer, head})},
                      `layer ${layers[layer]}, head ${head}`);
    byId("copying").append(make(
      "div", {className: "scroll", tabIndex: 0, role: "region", "aria-label": title}, make(
        "table", {}, make("caption", {}, `${title}: most of all `, show),
        make("tr", {}, make("td", {}, "head"), ...range(nHeads).map(head => make("th", {scope: "col"}, `${head}`))),
        ...rows)));
  }
  drawSeen();
  drawHands(group);
}

/** A vector turned by an angle; RoPE does it with each pair. */
const turned = ([a, b], angle) =>
  [a * Math.cos(angle) - b * Math.sin(angle), b * Math.cos(angle) + a * Math.sin(angle)];

/** An SVG dial with hands: [name, vector]. */
function dial(title, hands, longest) {
  const shape = (tag, attributes) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    return element;
  };
  const svg = shape("svg", {viewBox: "-1.1 -1.1 2.2 2.2", role: "img", "aria-label": title});
  svg.append(shape("circle", {r: 1, class: "face"}), ...hands.map(([name, [x, y]]) =>
    shape("line", {x2: x / longest, y2: -y / longest, class: `hand ${name}`})));
  return make("figure", {}, svg, make("figcaption", {}, title));
}

function drawHands(group) {
  const q = unpack(attention.q), k = unpack(attention.k), nPairs = attention.pairs.length, half = about.rope_dim / 2;
  byId("pairs").textContent = (nPairs === half ? `The slider has all ${half} pairs` :
    `The slider has ${nPairs} of the ${half} pairs, as many as the page has room for`) +
    ", from the quickest to the slowest.";
  if (page.mrope) byId("pairs").append(" The position is a token's time, row or column: a pair goes by one " +
    "of them (M-RoPE). All tokens of a picture have one time; for a word, the three are equal.");
  const axis = pair => page.mrope ? ` by ${["time", "row", "column"][attention.axes[pair]]}` : "";
  slider("pair", "pair", nPairs - 1, i =>
    `${attention.pairs[i]}: dimensions ${attention.pairs[i]} and ${attention.pairs[i] + half}${axis(i)}`);
  slider("key", "key", nTokens - 1, tokenName);
  view(["pair", "token", "key", "layer", "head"], () => {
    const {layer, head, token, key, pair} = state, frequency = attention.frequencies[pair];
    const [from, to] = [key, token].map(i => attention.positions[i][attention.axes[pair]]);
    const vector = (array, head, i) => [item(array, layer, head, i, pair), item(array, layer, head, i, pair + nPairs)];
    const hands = [["q", vector(q, head, token)], ["k", vector(k, Math.floor(head / group), key)]];
    const after = [["q", turned(hands[0][1], to * frequency)], ["k", turned(hands[1][1], from * frequency)]];
    const longest = Math.max(...hands.map(([, [a, b]]) => Math.hypot(a, b)), Number.MIN_VALUE);
    const inDegrees = angle => `${(angle * 180 / Math.PI).toFixed(1)}°`, degrees = n => inDegrees(n * frequency);
    const between = ([[, [a, b]], [, [c, d]]]) =>
      `${inDegrees(Math.atan2(b * c - a * d, a * c + b * d))} from key to query, ` +
      `q·k of the pair ${(a * c + b * d).toPrecision(3)}`;
    byId("hands").replaceChildren(dial(`Before RoPE: ${between(hands)}`, hands, longest),
                                  dial(`After RoPE: ${between(after)}`, after, longest));
    byId("hands-say").textContent = `Layer ${attention.layers[layer]}, head ${head}: ` +
      `q of ${tokenName(token)} turns by ${degrees(to)}, k of ${tokenName(key)} by ` +
      `${degrees(from)}: the angle between them changes by ${degrees(to - from)}, ${degrees(1)} a position ` +
      "(360° is a full turn, which changes nothing)" +
      (attention.factor === 1 ? "" : `; YaRN scales both by ${attention.factor.toPrecision(4)}`) +
      (key > token ? ". The key is in the future, so attention masks it" : "");
  });
}

// ---------------------------------------------------------------------------------------------------------------------
// 4: delta nets
// ---------------------------------------------------------------------------------------------------------------------

function drawDelta() {
  const rates = unpack(delta.rates), states = unpack(delta.states), [, nHeads, height, width] = states.shape;
  const heads = headButtons(nHeads, "netHead"), along = i => range(nTokens).map(
    token => item(rates, state.net, i, state.netHead, token));
  byId("states").append(...heads);
  if (delta.block > 1) byId("blocks").append(`A pixel is the largest of ${delta.block} × ${delta.block} numbers.`);
  slider("net", "net", delta.layers.length - 1, net => `${delta.layers[net]}`);
  slider("changes", "token", nTokens - 1, tokenName);
  view(["net", "scheme"], () => {
    const size = nHeads * height * width, now = states.values.subarray(state.net * size, (state.net + 1) * size);
    const most = now.reduce((a, b) => Math.max(a, b), Number.MIN_VALUE);
    heads.forEach((button, head) => paint(button.firstChild, height, width, (i, j) =>
      item(states, state.net, head, i, j) / most));
  });
  const at = token => `Head ${state.netHead}, token ${tokenName(token)}`, pick = token => change({token});
  const showRates = chart("rates", places(nTokens), [{stroke: "link"}, {stroke: "map"}], i =>
    `${at(i)}: exp(g) ${along(0)[i].toPrecision(4)}, β ${short(along(1)[i])}`, pick,
    {bars: false, scale: {range: [0, 1]}});
  const showMemory = chart("memory", places(nTokens), [{fill: "map"}], i => `${at(i)}: ${short(along(2)[i])}`, pick);
  view(["net", "netHead", "token"], () => {
    showRates([along(0), along(1)], state.token);
    showMemory([along(2)], state.token);
  });
}

// ---------------------------------------------------------------------------------------------------------------------
// 5: logit lens
// ---------------------------------------------------------------------------------------------------------------------

function drawLens() {
  const probabilities = unpack(lens.probabilities), ids = lens.ids;
  const nLayers = about.num_hidden_layers, top = ids.shape[2], table = byId("lens-table");
  const title = layer => layer ? `layer ${layer - 1}` : "embedding";
  const columns = runs.map(({first, n}) => first + n - 1);  // their tokens; of a picture, the token chosen last
  const cells = range(nLayers + 1).map(layer => runs.map((run, i) => {
    const cell = make("td", {role: "gridcell", tabIndex: -1});
    cell.addEventListener("click", () => {
      change({lens: layer, token: columns[i]});
      cell.focus({preventScroll: true});
    });
    return cell;
  }));
  const heads = runs.map(() => make("th", {role: "columnheader", scope: "col"}));
  const fill = i => {
    const token = columns[i];
    heads[i].textContent = runs[i].picture ? tokenName(token) : labels[tokens.ids[token]] || "∅";
    cells.forEach((row, layer) => {
      shaded(row[i], Math.sqrt(item(probabilities, layer, token, 0))).textContent = labels[item(ids, layer, token, 0)];
      row[i].className = `tinted ${lens.leads[token] === layer ? "leads" : ""}`;
    });
  };
  range(runs.length).forEach(fill);
  const head = make("tr", {role: "row"}, make("td", {role: "gridcell"}), ...heads);
  table.append(head, ...cells.map((row, layer) => make(
    "tr", {role: "row"}, make("th", {role: "rowheader", scope: "row"}, title(layer)), ...row)));
  table.addEventListener("keydown", event => {
    const moves = MOVES[event.key];
    if (!moves) return;
    event.preventDefault();
    const column = within(runs.indexOf(runOf(state.token)) + moves[1], runs.length - 1);
    change({lens: within(state.lens + moves[0], nLayers), token: columns[column]});
    cells[state.lens][column].focus();
  });
  let chosen = cells[0][0];
  view(["lens", "token"], () => {
    const {lens: layer, token} = state, column = runs.indexOf(runOf(token));
    if (columns[column] !== token) {
      columns[column] = token;
      fill(column);
    }
    chosen.tabIndex = -1;
    chosen.removeAttribute("aria-selected");
    chosen = cells[layer][column];
    chosen.tabIndex = 0;
    chosen.setAttribute("aria-selected", "true");
    const box = table.parentElement, {offsetLeft: left, offsetWidth: width} = chosen, {scrollLeft: from} = box;
    const hidden = left < from + table.rows[1].firstChild.offsetWidth || left + width > from + box.clientWidth;
    if (hidden) box.scrollLeft = left - box.clientWidth / 2;
    const says = range(top).map(i => `${quoted(item(ids, layer, token, i))} ` +
                                     percent(item(probabilities, layer, token, i)));
    byId("lens-says").textContent = `After token ${tokenName(token)} and ${title(layer)}: ${says.join(", ")}. ` +
      `The final answer, ${quoted(item(ids, nLayers, token, 0))}, first leads after ${title(lens.leads[token])}` +
      (token + 1 < nTokens && !runOf(token + 1).picture ?
       `; what follows in the text is ${quoted(tokens.ids[token + 1])}.` : ".");
  });
}

// ---------------------------------------------------------------------------------------------------------------------
// 6: choosing
// ---------------------------------------------------------------------------------------------------------------------

function drawChoosing() {
  const steps = choosing.steps.map(({probabilities, logits, shares, ...step}) => ({
    ...step, probabilities: unpack(probabilities).values, logits: unpack(logits), shares: unpack(shares)}));
  const sure = steps.map(step => Math.max(...step.probabilities));
  state.drawn = sure.indexOf(Math.min(...sure));
  slider("drawn", "drawn", steps.length - 1, i => `${i} ${quoted(steps[i].draws[0])}`);
  slider("setting", "setting", choosing.settings.length - 1, i => choosing.settings[i]);
  view(["drawn", "setting"], () => {
    const {setting} = state, {ids, draws, kept, probabilities, logits, shares} = steps[state.drawn];
    const [was] = draws, winner = draws[setting], logit = i => item(logits, setting, i);
    byId("choice").textContent = `${kept[setting]} of ${about.vocab_size} tokens stay. ${quoted(winner)} ` +
      (winner === was ? "is drawn, as in the run." : `would be drawn; the run drew ${quoted(was)}.`);
    const bar = p => shaded(make("td", {className: "bar"}, percent(p)), p);
    const row = i => make(
      "tr", {className: `${item(shares, setting, i) ? "" : "cut"} ${ids[i] === winner ? "lucky" : ""}`},
      make("th", {scope: "row"}, quoted(ids[i]) + (ids[i] === was ? " ✓" : "")), make("td", {}, logit(i).toFixed(2)),
      bar(probabilities[i]), bar(item(shares, setting, i)));
    const likely = range(ids.length).sort((a, b) => logit(b) - logit(a));
    byId("candidates").replaceChildren(
      make("tr", {}, ...["token", "logit", "probability", "with settings"].map(
        title => make("th", {scope: "col"}, title))),
      ...likely.filter((i, place) => place < 12 || ids[i] === winner || ids[i] === was).map(row));
  });
}

// ---------------------------------------------------------------------------------------------------------------------
// 7: KV cache and time
// ---------------------------------------------------------------------------------------------------------------------

function drawCache() {
  const {passes, per_position: size, states} = cache, decodes = passes.slice(1), held = n => n * size + states;
  const bytes = n => `${n} × ${size} B${states ? ` and ${amount(states, "B")} of states` : ""} = ` +
    amount(held(n), "B");
  const seconds = sum(decodes.map(pass => pass.seconds));
  const speed = rate => `${Math.round(rate).toLocaleString("en")} tokens/s`;
  const speeds = `Prefill: ${speed(passes[0].n / passes[0].seconds)}` +
    (seconds ? `; decode: ${speed(decodes.length / seconds)}` : "");
  let end = 0;
  const show = chart(
    "timeline", [0, ...passes.map(pass => end += 1e6 * pass.seconds)],
    [{fill: "link"}, {fill: "map"}, {stroke: "soft"}], i => {
      const {n, seconds, length, capacity} = passes[i];
      return `${n} ${n === 1 ? "token" : "tokens"} in ${amount(seconds, "s")}; ` +
        `the cache then holds ${bytes(length)} and has room for ${bytes(capacity)}. ${speeds}.`;
    }, pass => change({pass}),
    {bars: false, x: micro => amount(micro / 1e6, "s"), y: {values: labelled(n => amount(n, "B"))}});
  slider("pass", "pass", passes.length - 1, i => i ? `${i} decode` : "0 prefill");
  const all = passes.map(pass => held(pass.length)), decode = [NaN, ...all.slice(1)];  // drawn over all but prefill
  view(["pass"], () => show([all, decode, passes.map(pass => held(pass.capacity))], state.pass));
}

drawHead();
drawTokens();
drawWay();
drawAttention();
if (delta) drawDelta();
drawLens();
drawChoosing();
drawCache();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", event => change({scheme: event.matches}));
