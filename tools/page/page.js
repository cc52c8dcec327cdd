"use strict";
// Shows what tools/page.py has put into the page. What models wrote gets there through make() and say() alone, as text
// nodes: no markup of theirs is ever parsed.

const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const filters = byId("filters").elements;
const dialog = byId("dialog");
const MORE = 100; // rows by which the table grows
const state = { run: data.runs[0], sort: "step", isDown: false, rows: MORE, list: [], at: NaN };

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

// A text that may have been cut: [its beginning, how many characters are left out, its end].
function textBlock(text, label) {
  const parts = [text].flat();
  if (parts.length > 1) parts[1] = make("em", { class: "alert" }, ` [${parts[1]} characters are cut] `);
  return make("pre", { tabindex: 0, dir: "auto", "aria-label": label }, parts);
}

// What tools/page.py has compressed.
async function unpack(text) {
  const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

async function detailOf(group) {
  group.run.unpacked ??= unpack(group.run.words);
  group.run.vocabulary = await group.run.unpacked;
  group.unpacked ??= unpack(group.data);
  return group.unpacked;
}

// --- curves, and what changed ---
function drawCurves() {
  const style = getComputedStyle(document.documentElement);
  byId("curves").replaceChildren();
  for (const { title, legend, item } of data.curves) {
    const frame = make("div", { role: "img", "aria-label": legend.map(({ words }) => words).join("; ") });
    const dot = (color) => make("b", { style: `color: ${color}` }, "● ");
    const keys = legend.map(({ label, color }) => make("span", {}, dot(color), label));
    const caption = make("figcaption", { class: "small" }, keys);
    byId("curves").append(make("figure", {}, make("h3", {}, title), caption, frame));
    const text = JSON.stringify(item).replaceAll(data.ink, style.getPropertyValue("--ink"));
    Bokeh.embed.embed_item(JSON.parse(text.replaceAll(data.grid, style.getPropertyValue("--line"))), frame);
  }
}

// The group of a run with this row, at the step nearest to the given one.
function find(run, kind, env, row, step) {
  const same = run.groups.filter((group) => group.kind === kind && group.env === env && group.row === row);
  return same.sort((a, b) => Math.abs(a.step - step) - Math.abs(b.step - step))[0];
}

function twins(group) {
  const others = data.runs.filter((run) => run !== group.run);
  return others.map((run) => find(run, group.kind, group.env, group.row, group.step)).filter(Boolean);
}

function drawChanges() {
  for (const id of ["learned", "unlearned"]) {
    const changes = state.run.changes.filter((change) => change.learned === (id === "learned"));
    const buttons = changes.flatMap(({ env, row, steps }) => {
      const ends = steps.map((step) => find(state.run, "evaluation", env, row, step));
      const isHere = ends.every((group, i) => group?.step === steps[i]);
      return isHere ? [button(`${env} row ${row}: ${ends[0].prompt}`, () => openGroups(ends))] : [];
    });
    say(byId(id), buttons);
    const missing = buttons.length < changes.length ? `, of which this page has ${buttons.length}` : "";
    say(byId(`${id}-title`), `${id} ${changes.length} rows${missing}`);
  }
}

// --- the table of groups ---
const rewards = (group) => group.rewards.filter((reward) => reward !== null);
const mean = (group) => (rewards(group).length ? rewards(group).reduce((a, b) => a + b) / rewards(group).length : null);
const CELLS = {
  step: (group) => group.step,
  kind: (group) => group.kind,
  environment: (group) => group.env,
  row: (group) => group.row,
  reward: mean,
  best: (group) => (rewards(group).length ? Math.max(...rewards(group)) : null),
  staleness: (group) => group.staleness,
  state: (group) => join(group.dropped, some(group.errors, "lost"), some(group.truncated, "cut off")),
  prompt: (group) => group.prompt,
};
const STATES = {
  "": () => true,
  trained: (group) => group.kind === "training" && !group.dropped,
  dropped: (group) => group.dropped,
  errors: (group) => group.errors,
  truncated: (group) => group.truncated,
  both: (group) => twins(group).length,
};

function isWanted(group) {
  const isWithin = (value, low, high = "") =>
    (low === "" && high === "") || (value !== null && value >= (low || -Infinity) && value <= (high || Infinity));
  return ["", group.kind].includes(filters.kind.value) && ["", group.env].includes(filters.env.value) &&
    STATES[filters.state.value](group) &&
    isWithin(group.step, filters.step_low.value, filters.step_high.value) &&
    isWithin(mean(group), filters.reward_low.value, filters.reward_high.value) &&
    isWithin(group.staleness, filters.staleness.value) &&
    (!filters.text.value || group.text.includes(filters.text.value.toLowerCase()));
}

// What a search looks through: every text of a group, which is unpacked at the first search.
async function addTexts() {
  const texts = (value) => (value && typeof value === "object" ? Object.values(value).flatMap(texts) : [value]);
  const addText = async (group) => {
    const { prompt, answer, rollouts } = await detailOf(group);
    const said = rollouts.map((rollout) => [rollout.messages, rollout.prompt, rollout.error]);
    group.text ??= texts([prompt, answer, said]).join("\n").toLowerCase();
  };
  await Promise.all(state.run.groups.map(addText));
}

async function drawTable() {
  if (filters.text.value) await addTexts();
  const value = CELLS[state.sort];
  const isAfter = (a, b) => (a ?? -Infinity) > (b ?? -Infinity);
  state.list = state.run.groups.filter(isWanted);
  state.list.sort((a, b) => (isAfter(value(a), value(b)) - isAfter(value(b), value(a))) * (state.isDown ? -1 : 1));
  const rows = state.list.slice(0, state.rows).map((group, i) => {
    const text = (x) => (typeof x === "string" ? x : number(x));
    const cells = Object.entries(CELLS).map(([name, cell]) => make("td", { class: name }, text(cell(group))));
    return make("tr", { tabindex: i ? -1 : 0, click: () => openGroups([group]) }, cells);
  });
  say(byId("rows"), rows);
  byId("more").hidden = state.list.length <= state.rows;
  say(byId("found"), `${state.list.length} of ${state.run.groups.length} groups`);
  for (const head of byId("heads").children) {
    const order = state.isDown ? "descending" : "ascending";
    head.setAttribute("aria-sort", head.textContent === state.sort ? order : "none");
  }
}

const redraw = (change) => drawTable(Object.assign(state, { rows: MORE }, change));

// Arrows move the focus among elements, one of which alone is reached by the tab key.
function moveAmong(event, [...items], keys) {
  const at = items.indexOf(document.activeElement);
  const to = { [keys[0]]: at - 1, [keys[1]]: at + 1, Home: 0, End: items.length - 1 }[event.key];
  if (at < 0 || to === undefined) return;
  event.preventDefault();
  event.stopPropagation();
  items[at].tabIndex = -1;
  const next = items[Math.min(Math.max(to, 0), items.length - 1)];
  next.tabIndex = 0;
  next.focus();
}

// --- groups side by side ---
async function openGroups(groups) {
  const details = await Promise.all(groups.map(detailOf));
  state.at = groups.length > 1 ? NaN : state.list.indexOf(groups[0]);
  const names = groups.map((group) => `${group.run.name}, step ${group.step}, ${group.env}, row ${group.row}`);
  say(byId("dialog-title"), names.join(" beside "));
  byId("previous").disabled = !state.list[state.at - 1];
  byId("next").disabled = !state.list[state.at + 1];
  const others = groups.length > 1 ? [] : twins(groups[0]);
  say(byId("twins"), others.map((twin) => button(`beside ${twin.run.name}`, () => openGroups([groups[0], twin]))));
  say(byId("opened"), groups.map((group, i) => groupView(group, details[i])));
  say(byId("story"), "Point at a token, tap it, or move to it with the arrow keys, to see its numbers.");
  colorTokens();
  if (!dialog.open) dialog.showModal();
}

function go(distance) {
  const next = state.list[state.at + distance];
  if (next) openGroups([next]);
}

function groupView(group, detail) {
  const reward = `mean reward ${number(mean(group))}`;
  const title = join(`${group.run.name} at step ${group.step}`, group.kind, CELLS.state(group), reward);
  const answer = [small("expected answer"), textBlock(detail.answer, "expected answer")];
  const cards = make("div", { class: "cards" }, detail.rollouts.map((rollout) => rolloutView(group, rollout)));
  return make("section", { class: "group" }, make("h3", {}, title), messageViews(detail.prompt), answer, cards);
}

function rolloutView(group, rollout) {
  const advantages = new Set(rollout.sequences.flatMap((s) => s.columns.adv ?? []).filter((adv) => adv !== null));
  const pairs = Object.entries({ ...rollout.metrics, ...rollout.agent_rewards });
  pairs.push(["advantage", advantages.size ? [...advantages].slice(0, 9) : "not saved"], ["turns", rollout.num_turns]);
  if (rollout.turn_rewards) pairs.push(["reward by turn", rollout.turn_rewards]);
  const text = (value) => (typeof value === "string" ? value : [value].flat().map((x) => number(x)).join(", "));
  const views = pairs.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, text(value))));
  const title = join(`rollout ${rollout.rollout}: reward ${number(rollout.reward)}`, rollout.truncated && "cut off");
  const name = (i) => `sequence ${i + 1} of ${rollout.sequences.length}`;
  const tokens = rollout.sequences.map((s, i) => sequenceView(group.run, s, name(i)));
  const missing = small(tokens.length ? "" : "tokens: not saved, as of dropped groups and of evaluations");
  const error = make("p", { class: "alert" }, rollout.error);
  const messages = [rollout.prompt, rollout.messages].flatMap(messageViews);
  const parts = make("dl", { class: "pairs" }, views);
  return make("article", { class: "card" }, make("h4", {}, title), error, parts, messages, tokens, missing);
}

function messageViews(messages) {
  return messages.map(({ role, text, thoughts, calls }) => {
    const views = calls.map((call) => make("div", { class: "call" }, small("calls ", call.name),
      textBlock(call.arguments, "arguments"), small("result"), textBlock(call.result ?? "none", "result")));
    const thought = thoughts.length ? [small("thoughts"), textBlock(thoughts, "thoughts")] : [];
    return make("div", {}, small(role), thought, text.length || !calls.length ? textBlock(text, "text") : [], views);
  });
}

// --- tokens ---
const at = (s, name, i) => s.columns[name]?.[i] ?? null;
const minus = (a, b) => (a === null || b === null ? null : a - b);
const ifKnown = (value, f) => (value === null ? null : f(value));
const clamp = (x) => Math.min(Math.max(x, -20), 20);
const logRatio = (s, i) => ifKnown(minus(at(s, "logp", i), at(s, "old_logp", i)), clamp);
const kl = (s, i) => ifKnown(logRatio(s, i), (x) => Math.expm1(x) - x);
const COLORS = {
  advantage: (s, i) => at(s, "adv", i),
  ratio: logRatio, // its logarithm: 0 where nothing has changed
  kl,
  push: (s, i) => at(s, "push", i),
  teacher: (s, i) => minus(at(s, "teacher_logp", i), at(s, "logp", i)),
};

function sequenceView(run, s, name) {
  const tokens = s.columns.id.map((id, i) => {
    const word = run.vocabulary[id] ?? `#${id}`;
    const kind = `token ${at(s, "mask", i) ? "" : "unsaid"} ${at(s, "clipped", i) ? "clipped" : ""}`;
    const token = make("span", { class: kind, role: "option", tabindex: i ? -1 : 0 }, word.replaceAll("\n", "↵\n"));
    return Object.assign(token, { about: { s, i, word } });
  });
  const left = s.num - tokens.length;
  const agent = s.agent && `agent ${s.agent}`;
  const title = join(name, agent, !s.trainable && "not trained", `${s.num} tokens`, some(left, "of them are cut"));
  return make("div", {}, small(title), make("div", { class: "tokens", role: "listbox", "aria-label": title }, tokens));
}

function colorTokens() {
  const tokens = [...document.querySelectorAll(".token")];
  const values = tokens.map(({ about }) => COLORS[byId("color").value](about.s, about.i) ?? 0);
  const largest = values.reduce((most, value) => Math.max(most, Math.abs(value)), 0);
  tokens.forEach((token, i) => {
    const share = values[i] / (largest || 1);
    const color = share > 0 ? "--plus" : "--minus";
    token.style.background = share ? `rgb(var(${color}) / ${0.1 + 0.6 * Math.abs(share)})` : "";
    token.classList.toggle("negative", share < 0);
  });
  say(byId("low"), largest ? `-${number(largest, 3)}` : "0, or not saved");
  say(byId("high"), largest ? `+${number(largest, 3)}` : "");
}

function tellStory(token) {
  const { s, i, word } = token.about;
  const made = { ratio: ifKnown(logRatio(s, i), Math.exp), kl: kl(s, i) };
  const rows = Object.keys({ ...data.sources, ...s.columns }).map((name) => {
    const value = made[name] ?? at(s, name, i);
    const source = s.sources[name] ?? data.sources[name] ?? data.field;
    const shown = make("dd", { "data-name": name }, value === null ? "not saved" : number(value, 8));
    return make("div", {}, make("dt", {}, name), shown, make("dd", { class: "small" }, source));
  });
  for (const old of document.querySelectorAll(".token[aria-selected]")) old.removeAttribute("aria-selected");
  token.setAttribute("aria-selected", "true");
  say(byId("story"), make("strong", {}, `token ${i}: ${JSON.stringify(word)}`), make("dl", {}, rows));
}

// --- the page ---
function drawRun(run) {
  const all = run.groups.length === run.of ? "all" : "a sample,";
  say(byId("shown"), `${run.name}: ${all} ${run.groups.length} of ${run.of} groups`);
  say(byId("notes"), run.notes.map((note) => make("li", {}, note)));
  const names = ["", ...new Set(run.groups.map((group) => group.env))];
  say(filters.env, names.map((name) => make("option", { value: name }, name || "all")));
  redraw({ run });
  drawChanges();
}

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

for (const run of data.runs) run.groups.forEach((group) => (group.run = run));
const inputs = [...document.querySelectorAll("#runs input")];
byId("runs")?.addEventListener("change", ({ target }) => drawRun(data.runs[inputs.indexOf(target)]));
for (const head of byId("heads").children) {
  const name = head.textContent;
  head.addEventListener("click", () => redraw({ sort: name, isDown: state.sort === name && !state.isDown }));
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
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawCurves);
drawCurves();
drawRun(state.run);
