"use strict";
/* Pictures: where tokens are listed, a picture stands for all of its tokens. page.js, which follows, uses this. */

/** What a list of tokens shows: {first, n} for a token, {first, n, picture} for the n tokens of a picture. */
const runsOf = (ids, pictures) => {
  const runs = [];
  for (let first = 0; first < ids.length; first += runs.at(-1).n) {
    const picture = pictures[~ids[first]];  // the k-th picture's tokens have the id ~k
    runs.push({first, n: picture ? picture.rows * picture.columns : 1, picture});
  }
  return runs;
};

const runOf = token => runs.find(({first, n}) => token < first + n);
const MOVES = {ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0]};  // [rows, columns]
const within = (value, last) => Math.min(last, Math.max(0, value));

/** The row and the column of a token in its picture. */
const placeOf = ({first, picture: {columns}}, token) =>
  [Math.floor((token - first) / columns), (token - first) % columns];

function tokenName(token) {
  const run = runOf(token), name = labels[tokens.ids[token]];
  if (!run.picture) return `${token} “${name}”`;
  const [row, column] = placeOf(run, token);
  return `${token} (${name}, row ${row}, column ${column})`;
}

/** An image of the picture and, with `drawn`, a canvas on it. */
function pictureOf({picture: {url, ratio}}, drawn) {
  const view = make("span", {className: "seen"}, make("img", {src: url, alt: ""}));
  if (drawn) view.append(make("canvas"));
  view.style.setProperty("--ratio", ratio);
  return view;
}

/** A button with the picture: a click or arrow keys choose one of its tokens for the state's field `name`. */
function pictureButton(run, name, drawn) {
  const {first, picture: {rows, columns}} = run, frame = make("span", {className: "frame"});
  const place = pictureOf(run, drawn), button = make("button", {type: "button", className: "places"}, place);
  const chosen = () => runOf(state[name]) === run ? placeOf(run, state[name]) : null;
  const choose = (row, column) => change(
    {[name]: first + within(row, rows - 1) * columns + within(column, columns - 1)});
  place.append(frame);
  button.addEventListener("click", event => {
    const box = place.getBoundingClientRect();
    if (event.detail) choose(...[(event.clientY - box.top) / box.height * rows,
                                 (event.clientX - box.left) / box.width * columns].map(Math.floor));
    else if (!chosen()) choose(0, 0);  // by a key
  });
  button.addEventListener("keydown", event => {
    const moves = MOVES[event.key];
    if (!moves) return;
    event.preventDefault();
    choose(...(chosen()?.map((at, axis) => at + moves[axis]) ?? [0, 0]));
  });
  place.style.setProperty("--rows", rows);
  place.style.setProperty("--columns", columns);
  view([name], () => {
    const [row, column] = chosen() ?? [0, 0];
    frame.hidden = !chosen();
    Object.assign(frame.style, {top: `${100 * row / rows}%`, left: `${100 * column / columns}%`});
    button.setAttribute("aria-label", `${labels[tokens.ids[first]]}, ${rows} × ${columns} tokens; arrow keys choose ` +
                        (chosen() ? `one: row ${row}, column ${column}` : "one"));
  });
  return button;
}

/** An element for each of `runs`; choose(token) makes them buttons. */
function pieces(choose) {
  return runs.map(run => run.picture ? choose ? pictureButton(run, "token") : make("span", {}, pictureOf(run)) :
    make(choose ? "button" : "span", {onclick: choose && (() => choose(run.first))},
         labels[tokens.ids[run.first]] || "∅"));
}

/** What the heads of the chosen layer look at in each picture. */
function drawSeen() {
  const nHeads = about.num_attention_heads, {layers} = attention, shown = runs.filter(run => run.picture);
  if (!shown.length) {
    byId("seen").remove();
    return;
  }
  if (page.heard) {
    byId("seen-title").textContent = "Which moments a token listens to";
    byId("seen-by").textContent = "From a sound to tokens: ";
    byId("seen-text").textContent = "The picture is the sound: time from left to right, low pitches at the bottom, loud " +
      "ones bright. 13 tokens are a second. A strong colour is a large weight, on the same scale for all heads of a " +
      "layer; a head whose picture stays grey looks at other tokens. Pick a moment: the text below says its weight.";
  }
  const steps = page.heard ? ["log_mel", "convolution", "encoder_layer", "audio_tower"] :
    ["patches_of", "tower", "merger", "mrope_positions"];
  byId("seen-by").append(...steps.map(name => sourceButton(name)));
  slider("seen-layer", "layer", layers.length - 1, layer => `${layers[layer]}`);
  slider("seen-token", "token", nTokens - 1, tokenName);
  const blocks = shown.map(run => {
    const {first, n, picture: {rows, columns}} = run, name = labels[tokens.ids[first]];
    const figure = (...children) => make("figure", {}, ...children, make("figcaption"));
    const plain = figure(pictureButton(run, "token")), all = figure(pictureButton(run, "key", true)),
          one = figure(pictureButton(run, "key", true)),
          heads = headButtons(nHeads, "head", () => pictureOf(run, true));
    plain.lastChild.textContent = `${rows} × ${columns} tokens of ${name}. Pick one: it asks`;
    byId("seen-pictures").append(make("div", {className: "seen-row"}, plain, all, one),
                                 make("div", {className: "heads"}, ...heads));
    return {first, n, rows, columns, name, all, one, heads, tokens: range(n).map(i => first + i)};
  });
  const scale = byId("seen-scale").children;
  view(["layer", "head", "token", "key", "scheme"], () => {
    const {layer, head, token, key} = state, said = [];
    const by = head => j => weight(layer, head, token, j);
    const average = j => sum(range(nHeads).map(head => by(head)(j))) / nHeads;
    const most = Math.max(...blocks.flatMap(({tokens}) => range(nHeads).flatMap(head => tokens.map(by(head)))));
    for (const {first, n, rows, columns, name, all, one, heads, tokens} of blocks) {
      const total = find => sum(tokens.map(find));
      const draw = (canvas, find) => paint(
        canvas, rows, columns, (i, j) => most && find(first + i * columns + j) / most, true);
      draw(all.querySelector("canvas"), average);
      draw(one.querySelector("canvas"), by(head));
      all.lastChild.textContent = `Mean of the heads: ${percent(total(average))} of the attention`;
      one.lastChild.textContent = `Head ${head}: ${percent(total(by(head)))} of its attention`;
      heads.forEach((button, i) => {
        draw(button.querySelector("canvas"), by(i));
        button.lastChild.textContent = `head ${i}: ${percent(total(by(i)))}`;
      });
      const best = [...tokens].sort((a, b) => by(head)(b) - by(head)(a)).slice(0, 3);
      const place = j => page.heard ? `second ${((j - first) / 13).toFixed(2)}: ${percent(by(head)(j))}` :
        `row ${Math.floor((j - first) / columns)}, column ${(j - first) % columns}: ` +
                         percent(by(head)(j));
      said.push(token < first ? `${tokenName(token)} comes before ${name}, so it can't look at it` :
        `Layer ${layers[layer]}, head ${head}: ${percent(total(by(head)))} of the attention of ${tokenName(token)} ` +
        `goes to ${name}, most of it to ${best.map(place).join("; ")}` +
        (key >= first && key < first + n ? `. In the frame, ${place(key)}` : ""));
    }
    byId("seen-says").textContent = `${said.join(".\n")}.`;
    [0, most / 4, most].forEach((value, i) => { scale[i].textContent = percent(value); });
  });
}
