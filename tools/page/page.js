"use strict";
// Shows what tools/page.py has put into the page. What models wrote gets there through make() and say() alone, as text
// nodes: no markup of theirs is ever parsed.

const byId = (id) => document.getElementById(id);
const filters = byId("filters").elements;
const dialog = byId("dialog");
const MORE = 100; // rows by which the table grows
const state = { groups: [], words: {}, sort: "step", isDown: false, rows: MORE, list: [], at: NaN };

// --- text ---
// Characters that nobody sees, or that reorder others: controls, formats, lone surrogates, unusual ends of lines. Tabs,
// newlines, and the joiners that some scripts and emojis need are left as they are.
const HIDDEN = /(?![\t\n\u200c\u200d])[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}]/gu;
const asEscape = (character) => `\\u{${character.codePointAt(0).toString(16).padStart(4, "0")}}`;
const visible = (text) => String(text).replace(HIDDEN, asEscape);
const join = (...texts) => texts.filter(Boolean).join(", ");
const some = (count, what) => (count ? `${count} ${what}` : "");

function number(value, digits = 4) {
  if (typeof value !== "number") return "–";
  return value && Math.abs(value) < 1e-4 ? value.toExponential(3) : String(+value.toPrecision(digits));
}

function say(element, ...children) {
  element.replaceChildren(...children.flat().map((child) => (child instanceof Node ? child : visible(child ?? ""))));
  return element;
}

// Attributes are ours; a function among them listens to an event.
function make(tag, attributes = {}, ...children) {
  const element = say(document.createElement(tag), ...children);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else element.setAttribute(name, visible(value));
  }
  return element;
}

const button = (text, click) => make("button", { type: "button", click }, text);
const small = (...text) => make("span", { class: "small" }, ...text);
const block = (text, label) => make("pre", { tabindex: 0, dir: "auto", "aria-label": label }, text);

// What tools/page.py has compressed.
async function unpack(text) {
  const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

// --- the table of groups ---
const count = (group, name) => group.rollouts.filter((rollout) => rollout[name]).length;
const rewards = (group) => group.rollouts.map((rollout) => rollout.reward).filter((reward) => reward !== null);
const mean = (group) => (rewards(group).length ? rewards(group).reduce((a, b) => a + b) / rewards(group).length : null);
const CELLS = {
  step: (group) => group.step,
  kind: (group) => group.kind,
  environment: (group) => group.env,
  row: (group) => group.row,
  reward: mean,
  best: (group) => (rewards(group).length ? Math.max(...rewards(group)) : null),
  staleness: (group) => group.step - Math.min(...group.rollouts.map((rollout) => rollout.version)),
  state: (group) => join(group.dropped, some(count(group, "error"), "lost"), some(count(group, "truncated"), "cut off")),
  prompt: (group) => group.prompt.at(-1).text.slice(0, 80),
};
const STATES = {
  "": () => true,
  trained: (group) => group.kind === "training" && !group.dropped,
  dropped: (group) => group.dropped,
  lost: (group) => count(group, "error"),
  cut: (group) => count(group, "truncated"),
};

// What a search looks through: every text of a group.
function textOf(group) {
  const said = group.rollouts.flatMap((rollout) => [...rollout.messages, { text: rollout.error }]);
  const texts = [...group.prompt, ...said].flatMap(({ text, thoughts }) => [text, thoughts]);
  group.text ??= [group.answer, ...texts].join("\n").toLowerCase();
  return group.text;
}

function isWanted(group) {
  return ["", group.kind].includes(filters.kind.value) && ["", group.env].includes(filters.env.value) &&
    STATES[filters.state.value](group) &&
    group.step >= filters.low.value && group.step <= (filters.high.value || Infinity) &&
    (!filters.text.value || textOf(group).includes(filters.text.value.toLowerCase()));
}

function drawTable() {
  const value = CELLS[state.sort];
  const isAfter = (a, b) => (a ?? -Infinity) > (b ?? -Infinity);
  state.list = state.groups.filter(isWanted);
  state.list.sort((a, b) => (isAfter(value(a), value(b)) - isAfter(value(b), value(a))) * (state.isDown ? -1 : 1));
  const rows = state.list.slice(0, state.rows).map((group, i) => {
    const text = (x) => (typeof x === "string" ? x : number(x));
    const cells = Object.entries(CELLS).map(([name, cell]) => make("td", { class: name }, text(cell(group))));
    return make("tr", { tabindex: i ? -1 : 0, click: () => openGroups([group]) }, cells);
  });
  say(byId("rows"), rows);
  byId("more").hidden = state.list.length <= state.rows;
  say(byId("found"), `${state.list.length} of the ${state.groups.length} groups here; the run has ${state.numAll}`);
  for (const head of byId("heads").children) {
    const order = state.isDown ? "descending" : "ascending";
    head.setAttribute("aria-sort", head.textContent === state.sort ? order : "none");
  }
}

const redraw = (change) => drawTable(Object.assign(state, { rows: MORE }, change));

// Rows that are right, with a mean reward of 1 or more, at the first evaluation or at the last, but not at both.
function drawChanges() {
  const evaluations = state.groups.filter((group) => group.kind === "evaluation" && mean(group) !== null);
  const steps = evaluations.map((group) => group.step);
  const isRight = (group) => mean(group) > 1 - 1e-6;
  const changes = { learned: [], unlearned: [] };
  let num = 0;
  for (const first of evaluations.filter((group) => group.step === Math.min(...steps))) {
    const isSame = (group) => group.step === Math.max(...steps) && group.env === first.env && group.row === first.row;
    const last = evaluations.find(isSame);
    if (!last) continue;
    num += 1;
    const text = `${first.env} row ${first.row}: ${CELLS.prompt(first)}`;
    const change = button(text, () => openGroups([first, last]));
    if (isRight(first) !== isRight(last)) changes[isRight(last) ? "learned" : "unlearned"].push(change);
  }
  for (const [id, buttons] of Object.entries(changes)) {
    say(byId(id), buttons);
    say(byId(`${id}-title`), `${id}: ${buttons.length} of ${num} rows`);
  }
}

// Arrows move the focus among elements, one of which alone is reached by the tab key.
function moveAmong(event, [...items], keys) {
  const at = items.indexOf(document.activeElement);
  const next = items[{ [keys[0]]: at - 1, [keys[1]]: at + 1 }[event.key]];
  if (at < 0 || !next) return;
  event.preventDefault();
  items[at].tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
}

// --- groups side by side ---
function openGroups(groups) {
  state.at = groups.length > 1 ? NaN : state.list.indexOf(groups[0]);
  const names = groups.map((group) => `${group.kind} step ${group.step}, ${group.env}, row ${group.row}`);
  say(byId("dialog-title"), names.join(" beside "));
  byId("previous").disabled = !state.list[state.at - 1];
  byId("next").disabled = !state.list[state.at + 1];
  say(byId("opened"), groups.map(groupView));
  say(byId("story"), "Point at a token, tap it, or move to it with the arrow keys, to see its numbers.");
  colorTokens();
  if (!dialog.open) dialog.showModal();
}

function go(distance) {
  const next = state.list[state.at + distance];
  if (next) openGroups([next]);
}

function groupView(group) {
  const title = join(`step ${group.step}`, group.kind, CELLS.state(group), `mean reward ${number(mean(group))}`);
  const answer = [small("expected answer"), block(group.answer, "expected answer")];
  const cards = make("div", { class: "cards" }, group.rollouts.map(rolloutView));
  return make("section", { class: "group" }, make("h3", {}, title), group.prompt.map(messageView), answer, cards);
}

function rolloutView(rollout) {
  const pairs = Object.entries({ ...rollout.metrics, ...rollout.agent_rewards, turns: rollout.num_turns });
  if (rollout.turn_rewards) pairs.push(["rewards of turns", rollout.turn_rewards]);
  const text = (value) => [value].flat().map((x) => number(x)).join(", ");
  const views = pairs.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, text(value))));
  const title = join(`rollout ${rollout.member}: reward ${number(rollout.reward)}`, rollout.truncated && "cut off");
  const error = make("p", { class: "alert" }, rollout.error);
  const tokens = rollout.sequences.map((s, i) => sequenceView(s, `sequence ${i + 1} of ${rollout.sequences.length}`));
  const missing = small(tokens.length ? "" : "no tokens: only those that were trained on are kept");
  const parts = [make("dl", { class: "pairs" }, views), rollout.messages.map(messageView), tokens, missing];
  return make("article", { class: "card" }, make("h4", {}, title), error, ...parts);
}

function messageView({ role, text, thoughts }) {
  const thought = thoughts ? [small("thoughts"), block(thoughts, "thoughts")] : [];
  return make("div", {}, small(role), thought, block(text, "text"));
}

// --- tokens ---
// The numbers that every token has; others are the environment's, or what the loss logs.
const MEANINGS = {
  id: "the token's number in the vocabulary",
  turn: "of the policy, from 0",
  mask: "1 if it is trained on",
  old_logp: "log-probability that the sampler gave the token",
  logp: "log-probability that the trainer gave it, in its last pass over the batch",
  diff: "logp - old_logp",
  ratio: "exp(logp - old_logp)",
  adv: "its advantage",
  push: "minus the derivative of the loss by logp: above 0, the token becomes likelier",
};
const at = (s, name, i) => s.columns[name]?.[i] ?? null;

function sequenceView(s, name) {
  const tokens = s.columns.id.map((id, i) => {
    const word = state.words[id];
    const kind = `token ${at(s, "old_logp", i) === null ? "unsaid" : ""} ${at(s, "policy/clip_frac", i) ? "clipped" : ""}`;
    const token = make("span", { class: kind, role: "option", tabindex: i ? -1 : 0 }, word.replaceAll("\n", "↵\n"));
    return Object.assign(token, { about: { s, i, word } });
  });
  const title = join(name, s.agent && `agent ${s.agent}`, `${s.num} tokens`, some(s.num - tokens.length, "of them are cut"));
  return make("div", {}, small(title), make("div", { class: "tokens", role: "listbox", "aria-label": title }, tokens));
}

function colorTokens() {
  const tokens = [...document.querySelectorAll(".token")];
  const values = tokens.map(({ about }) => at(about.s, byId("color").value, about.i) ?? 0);
  const largest = values.reduce((most, value) => Math.max(most, Math.abs(value)), 0);
  tokens.forEach((token, i) => {
    const share = values[i] / (largest || 1);
    const color = share > 0 ? "--plus" : "--minus";
    token.style.background = share ? `rgb(var(${color}) / ${0.1 + 0.6 * Math.abs(share)})` : "";
    token.classList.toggle("negative", share < 0);
  });
  say(byId("low"), largest ? `-${number(largest, 3)}` : "0, or unknown");
  say(byId("high"), largest ? `+${number(largest, 3)}` : "");
}

function tellStory(token) {
  const { s, i, word } = token.about;
  const diff = at(s, "diff", i);
  const ratio = diff === null ? null : Math.exp(diff);
  const rows = Object.keys({ ...MEANINGS, ...s.columns }).map((name) => {
    const value = name === "ratio" ? ratio : at(s, name, i);
    const shown = make("dd", { "data-name": name }, number(value, 6));
    return make("div", {}, make("dt", {}, name), shown, make("dd", { class: "small" }, MEANINGS[name]));
  });
  for (const old of document.querySelectorAll(".token[aria-selected]")) old.removeAttribute("aria-selected");
  token.setAttribute("aria-selected", "true");
  say(byId("story"), make("strong", {}, `token ${i}: ${JSON.stringify(word)}`), make("dl", {}, rows));
}

// --- the page ---
function onKey(event) {
  const isTyping = event.target.matches("input, select");
  const isSearch = event.key === "/" && !isTyping && !dialog.open;
  const isOpening = event.key === "Enter" && event.target.matches("#rows tr");
  if (isSearch || isOpening) event.preventDefault(); // the key is not for what gets the focus
  if (isSearch) filters.text.focus();
  if (isOpening) event.target.click();
  moveAmong(event, byId("rows").children, ["ArrowUp", "ArrowDown"]);
  const tokens = event.target.closest(".tokens");
  if (tokens) moveAmong(event, tokens.children, ["ArrowLeft", "ArrowRight"]);
  else if (dialog.open && !isTyping) go({ ArrowLeft: -1, ArrowRight: 1 }[event.key]);
}

async function start() {
  const { groups, words, num_all } = await unpack(byId("data").textContent);
  Object.assign(state, { groups, words, numAll: num_all });
  const names = ["", ...new Set(groups.map((group) => group.env))];
  say(filters.env, names.map((name) => make("option", { value: name }, name || "all")));
  const sort = (name) => redraw({ sort: name, isDown: state.sort === name && !state.isDown });
  say(byId("heads"), Object.keys(CELLS).map((name) => make("th", { scope: "col" }, button(name, () => sort(name)))));
  drawTable();
  drawChanges();
}

byId("filters").addEventListener("input", () => redraw());
byId("filters").addEventListener("reset", () => setTimeout(redraw));
byId("filters").addEventListener("submit", (event) => event.preventDefault());
byId("more").addEventListener("click", () => redraw({ rows: state.rows + MORE }));
byId("previous").addEventListener("click", () => go(-1));
byId("next").addEventListener("click", () => go(1));
byId("color").addEventListener("change", colorTokens);
for (const kind of ["mousemove", "focusin", "click"]) {
  byId("opened").addEventListener(kind, ({ target, movementX, movementY }) => {
    const isStill = kind === "mousemove" && !movementX && !movementY; // the page has moved under the mouse
    if (target.matches(".token:not([aria-selected])") && !isStill) tellStory(target);
  });
}
document.addEventListener("keydown", onKey);
start();
