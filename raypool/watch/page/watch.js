// The live page. The server sends the state of a run once, then each change; this page holds nothing else.
// User text becomes a text node, or passes `text` or `plain` of shared.js.
import DataTable from "./dt_bundle.js";

const { text, render, renderNumber, renderError } = renderers(DataTable);
const MAX_CURVES = 50, MAX_BARS = 2000, MAX_ACTIONS = 50, MAX_CONFIGS = 200;
const FIRST_CURVES = 10; // drawn while no item is selected
const LEAST_MS = 1000; // between two drawings of a chart

let state = null; // as api/runs/ID gives it, without the rows, which the table has
let run = null; // the id of the run that is wanted; until its state is here, `state.id` is the one that is shown
let events = null;
let heardAt = 0; // when the state came, of performance.now()
let table = null;
let columns = []; // of the rows
let shown = null; // the item with its details on the page
const asked = new Map(); // actions without an outcome so far, by id

// --- elements ----------------------------------------------------------------------------------------------------------------------------

const make = (tag, properties, ...children) => {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children.map((child) => (child === null || child === undefined ? "" : typeof child === "object" ? child : String(child))));
  return element;
};

function put(id, value, isShown = value !== "") {
  const element = byId(id);
  if (element.textContent !== value) element.textContent = value;
  element.hidden = !isShown;
}

const last = new Map();
function hasChanged(name, value) { // whether a part of the page needs to be made again
  const json = JSON.stringify(value);
  return last.get(name) !== json && last.set(name, json) !== undefined;
}

// A plain table; cells are values or elements, `differs` marks some.
function fill(id, headings, rows, differs = () => false) {
  const body = rows.map((row, y) => make("tr", {}, ...row.map((value, x) => make(x ? "td" : "th", { className: differs(y, x) ? "differs" : "" }, value))));
  byId(id).replaceChildren(...(headings.length && rows.length ? [make("thead", {}, make("tr", {}, ...headings.map((name) => make("th", {}, name))))] : []), make("tbody", {}, ...body));
}

const itemButton = (item) => make("button", { className: "link", onclick: () => select(item) }, item);
const clock = (time) => (time === null || time === undefined ? "" : new Date(time * 1000).toLocaleTimeString());
const took = (s) => {
  if (s < 59.5) return `${s.toFixed(s < 9.95 ? 1 : 0)} s`;
  const two = (number) => String(number).padStart(2, "0"), all = Math.round(s), minutes = Math.floor(all / 60);
  return minutes < 60 ? `${minutes}:${two(all % 60)}` : `${Math.floor(minutes / 60)}:${two(minutes % 60)}:${two(all % 60)}`;
};
const digits = (value) => (typeof value === "number" ? written(value) : value === null || value === undefined ? "" : String(value));

// --- the server --------------------------------------------------------------------------------------------------------------------------

const address = (path, id = state.id) => `api/runs/${encodeURIComponent(id)}${path}`;

class Unreachable extends Error {} // the connection for events tells the user

async function get(path) {
  const response = await fetch(path).catch(() => null);
  if (!response?.ok) throw new Unreachable(path);
  return response.json();
}

const ignoreUnreachable = (error) => {
  if (!(error instanceof Unreachable)) throw error;
};

async function post(path, body) {
  put("refused", "");
  try {
    const response = await fetch(path, { method: "POST", headers: { "X-Raypool": "1", "Content-Type": "application/json" }, body: JSON.stringify(body) });
    if (response.ok) return response.json();
    put("refused", (await response.text()) || `The server refused this (${response.status}).`);
  } catch {
    put("refused", "The server did not answer. The action may have been recorded: check the table before you repeat it.");
  }
  return null;
}

function connect() {
  events?.close();
  if (document.hidden) return; // a browser has six connections to a server, for all of its tabs
  events = new EventSource(address("/events", run));
  events.addEventListener("state", ({ data }) => begin(JSON.parse(data)));
  events.addEventListener("change", ({ data }) => change(JSON.parse(data)));
  events.onopen = () => put("lost", "");
  events.onerror = () => {
    put("lost", "The server of this page cannot be reached. Retrying. If it has ended, run raypool watch again and open the address that it prints.");
    if (events.readyState === EventSource.CLOSED) setTimeout(connect, 3000); // it retries by itself unless it got an answer
  };
}

async function act(action, item) {
  const { id } = state; // while somebody reads the question, another run may appear
  const what = action === "stop_all"
    ? ["Stop the sweep?", "Running items finish; no other item starts. Run the same script again to resume.", "Stop the sweep"]
    : action === "cancel" && [`Cancel item ${item}?`, "Its work since its last checkpoint is lost.", `Cancel item ${item}`];
  if (what && !(await confirmed(...what))) return;
  const answer = await post(address("/act", id), { action, item });
  if (answer === null || id !== state.id) return;
  asked.set(answer.id, { action, item });
  showActions();
}

// `confirm` does nothing in a frame of a notebook.
function confirmed(title, message, yes) {
  const dialog = byId("confirm");
  put("confirm-title", title), put("confirm-text", message), put("confirm-yes", yes);
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((resolve) => dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true }));
}

// --- a run -------------------------------------------------------------------------------------------------------------------------------

function begin(found) {
  const { rows, ...rest } = found, before = state?.notes ?? {};
  if (table !== null && run !== state.id) {
    table.destroy(true);
    table = null; // nothing of it, such as the selected items, is for another run
    asked.clear();
  }
  const hasRoom = table !== null && table.rows().count() <= rows.length && JSON.stringify(columns) === JSON.stringify(found.columns);
  state = { ...rest, id: run };
  columns = found.columns;
  if (hasRoom) update(rows, Object.keys({ ...before, ...state.notes }));
  else makeTable(rows);
  if (!table.row(`#item-${shown}`).any()) shown = null;
  refresh(new Set(Object.keys(found)));
}

function change({ rows = {}, attempts = [], ...whole }) {
  const before = state.notes, isOther = (item) => JSON.stringify(before[item]) !== JSON.stringify(state.notes[item]);
  Object.assign(state, whole);
  state.attempts = state.attempts.concat(attempts); // `push` takes only so many at once
  const noted = Object.keys({ ...before, ...state.notes }).filter(isOther), fields = new Set(Object.keys(whole));
  update(Object.values(rows), noted);
  if (Object.keys(rows).length) fields.add("rows");
  if (attempts.length) fields.add("attempts");
  refresh(fields, new Set([...Object.keys(rows), ...noted].map(Number)));
}

const noteOf = (item) => state.notes[item] ?? { star: false, text: "" };

// Show changed fields; `items` have changed rows or notes, null: all.
function refresh(fields, items = null) {
  if (state.attempts.length > MAX_BARS) state.attempts.splice(0, state.attempts.length - MAX_BARS);
  if (fields.has("duration_s")) heardAt = performance.now();
  showSummary();
  if (fields.has("metrics") || fields.has("steps")) offerMetrics();
  if (fields.has("actions")) showActions();
  showWorkers();
  byId("gpus-section").hidden = !state.gpus.length;
  if (items === null || items.has(shown) || isRunning(shown) || fields.has("can_act")) showItem();
  if (fields.has("rows")) redraw("curves");
  if (fields.has("attempts") || fields.has("live")) redraw("timeline");
  if (fields.has("gpus")) redraw("gpus");
}

const isRunning = (item) => state.live?.running.some((entry) => entry.item === item) ?? false;

function showSummary() {
  document.title = state.title;
  put("title", state.title);
  put("problem", state.problem ?? "");
  put("table-note", state.table_note ?? "");
  put("why-not", state.can_act ? "" : state.why_not ?? "");
  byId("stop-all").hidden = !state.can_act;
  const { best } = state;
  byId("best").hidden = !best;
  if (best && hasChanged("best", best)) {
    put("best-value", `${best.metric} = ${best.value}`), put("best-item", `in item ${best.item}`);
    byId("best-config").replaceChildren(...Object.entries(best.config).map(([name, value]) => make("span", { className: "given" }, `${name} = ${value}`)));
  }
  const num = (count) => count.toLocaleString("en");
  const tiles = [
    [state.state, "state", null],
    [num(state.total ?? table.rows().count()), "items", null],
    ...Object.entries(state.counts).filter(([, count]) => count).map(([status, count]) => [num(count), status, state.colors[status]]),
    [elapsed(), "elapsed", null],
  ];
  if (hasChanged("tiles", tiles)) {
    byId("summary").replaceChildren(...tiles.map(([value, label, color]) => {
      const tile = make("div", { className: "tile" }, make("b", {}, value), make("span", {}, label));
      tile.dataset.label = label;
      if (color) tile.style.setProperty("--mark", color);
      return tile;
    }));
  }
}

const elapsed = () => took(state.duration_s + (state.is_running ? (performance.now() - heardAt) / 1000 : 0));

setInterval(() => {
  if (state?.is_running && !document.hidden) byId("summary").querySelector("[data-label=elapsed] b").textContent = elapsed();
}, 1000);

// --- the table ---------------------------------------------------------------------------------------------------------------------------

const at = (name) => columns.findIndex((about) => about.name === name);
const statusAt = () => columns.findIndex(({ name, kind }) => kind === "run" && (name === "state" || name === "status"));
const isStar = (row) => Number(noteOf(row[0]).star);
const starOf = (row, type) => (type !== "display" ? isStar(row) : `<button class="star${isStar(row) ? " on" : ""}" aria-label="star" aria-pressed="${!!isStar(row)}">${isStar(row) ? "★" : "☆"}</button>`);

function makeTable(rows) {
  const before = table && { hidden: new Set(headings().filter((name, i) => !table.column(i).visible())), order: table.order(), names: headings(), search: table.search(), length: table.page.len(), selected: selected() };
  table?.destroy(true);
  const own = [
    { title: "★", data: starOf, className: "star", searchable: false },
    ...columns.map(({ name, kind, is_numeric }, i) => {
      const isError = kind === "run" && name === "error";
      const className = [kind, ...(i === 0 ? ["mark"] : []), ...(isError ? ["message"] : [])].join(" ");
      return { name, data: i, className, type: is_numeric ? "num" : "string", render: isError ? renderError : is_numeric ? renderNumber : render };
    }),
    { title: "note", data: (row, type) => render(noteOf(row[0]).text, type), className: "note", type: "string" },
  ];
  const names = own.map(({ title, name }) => title ?? name);
  const element = make("table", { id: "items", className: "display compact nowrap" }, make("thead", {}, make("tr", {}, ...names.map((name) => make("th", {}, name)))));
  element.style.width = "100%";
  byId("table").replaceChildren(element);
  const order = before ? before.order.map(([i, way]) => [names.indexOf(before.names[i]), way]).filter(([i]) => i >= 0) : [];
  table = new DataTable(element, {
    data: rows,
    columns: own.map(({ title, name, ...about }, i) => ({ ...about, visible: !before?.hidden.has(names[i]) })),
    rowId: (row) => `item-${row[0]}`,
    columnControl: [{ target: 1, content: ["search"] }],
    titleRow: 0,
    order,
    search: { search: before?.search ?? "" },
    select: { style: "os", selector: "td:not(.star)", info: false },
    layout: { topStart: ["pageLength", { buttons: [{ extend: "colvis", text: "Columns", columnText: (_, i) => text(names[i]) }] }] },
    pageLength: before?.length ?? 25,
    lengthMenu: [10, 25, 100, 500],
    deferRender: true,
    autoWidth: false,
    createdRow: mark,
  });
  table.names = names;
  table.on("click", "button.star", ({ target }) => {
    const item = table.row(target.closest("tr")).data()[0];
    note(item, { star: !noteOf(item).star });
  });
  table.on("select deselect", (_, __, ___, [...changed]) => {
    const chosen = selected(), newest = table.row(changed.at(-1)).data()?.[0];
    if (chosen.includes(newest)) shown = newest;
    else if (!chosen.includes(shown)) shown = chosen.at(-1) ?? null;
    showItem();
    redraw("curves");
  });
  table.on("draw", () => {
    if (!selected().length) redraw("curves");
  });
  useFilter();
  if (before && before.selected.length) table.rows(before.selected.map((item) => `#item-${item}`)).select();
}

const headings = () => table.names;
const mark = (row, values) => row.querySelector("td.mark")?.style.setProperty("--mark", state.colors[values[statusAt()]] ?? "transparent");
const selected = () => table.rows({ selected: true }).data().toArray().map((row) => row[0]);

// Give changed and new rows to the table, and show others again whose notes have changed.
function update(rows, noted) {
  for (const values of rows) {
    const row = table.row(`#item-${values[0]}`);
    if (!row.any()) table.row.add(values);
    else {
      row.data(values);
      if (row.node()) mark(row.node(), values);
    }
  }
  for (const item of noted) table.row(`#item-${item}`).invalidate();
  if (rows.length || noted.length) table.draw("full-hold");
}

function select(item) {
  const row = table.row(`#item-${item}`);
  if (!row.any()) return;
  table.rows().deselect();
  shown = item;
  row.select();
  byId("item-section").scrollIntoView({ block: "nearest" });
}

// --- the filter: lr < 0.01 and status == "failed" ----------------------------------------------------------------------------------------

const TOKEN = /\s*(?:(?<sign><=|>=|==|!=|<|>|\(|\))|(?<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)|"(?<double>[^"]*)"|'(?<single>[^']*)'|`(?<quoted>[^`]+)`|(?<word>[\p{L}_][\p{L}\p{N}_.]*))/uiy;
const WORDS = { true: true, false: false, none: null, null: null };
const isSame = (a, b) => a === b || (a !== null && b !== null && String(a) === String(b));
const isLess = (a, b) => a !== null && b !== null && typeof number(a) === typeof number(b) && number(a) < number(b);
const COMPARE = {
  "==": isSame, "!=": (a, b) => !isSame(a, b), "<": isLess, ">": (a, b) => isLess(b, a),
  "<=": (a, b) => isLess(a, b) || isSame(a, b), ">=": (a, b) => isLess(b, a) || isSame(a, b),
};

// Return what the source means, as a function of a row; raise an Error that says what is wrong.
function parse(source) {
  const tokens = [];
  for (let begin = 0; source.slice(begin).trim() !== ""; begin = TOKEN.lastIndex) {
    TOKEN.lastIndex = begin;
    const found = TOKEN.exec(source);
    if (found === null) throw new Error(`This cannot be read: ${source.slice(begin).trim()}`);
    tokens.push({ ...found.groups, sign: found.groups.sign ?? (/^(and|or|not)$/i.test(found.groups.word) ? found.groups.word.toLowerCase() : undefined), text: found[0].trim() });
  }
  let next = 0;
  const taken = (sign) => tokens[next]?.sign === sign && ++next > 0;
  const unexpected = (wanted) => new Error(`${next < tokens.length ? `${wanted} is missing before ${tokens[next].text}` : `${wanted} is missing at the end`}.`);

  const chain = (sign, part, join) => () => {
    let left = part();
    while (taken(sign)) left = join(left, part());
    return left;
  };
  const operand = () => {
    const token = tokens[next];
    if (token === undefined || token.sign !== undefined) throw unexpected("A value or a column");
    next++;
    const { number, double, single, quoted, word } = token;
    if (number !== undefined) return () => Number(number);
    if (double !== undefined || single !== undefined) return () => double ?? single;
    if (Object.hasOwn(WORDS, word ?? "")) return () => WORDS[word];
    return valueOf(quoted ?? word);
  };
  const term = () => {
    if (taken("not")) {
      const part = term();
      return (row) => !part(row);
    }
    if (taken("(")) {
      const part = either();
      if (!taken(")")) throw unexpected("A closing parenthesis");
      return part;
    }
    const left = operand(), compare = Object.hasOwn(COMPARE, tokens[next]?.sign ?? "") ? COMPARE[tokens[next++].sign] : null;
    if (compare === null) return (row) => Boolean(left(row));
    const right = operand();
    return (row) => compare(left(row), right(row));
  };
  const both = chain("and", term, (a, b) => (row) => a(row) && b(row));
  const either = chain("or", both, (a, b) => (row) => a(row) || b(row));
  const all = either();
  if (next < tokens.length) throw unexpected("“and” or “or”");
  return all;
}

function valueOf(name) {
  const place = [name, `last ${name}`].map(at).find((i) => i >= 0);
  if (place !== undefined) return (row) => row[place];
  if (name === "star") return (row) => noteOf(row[0]).star;
  if (name === "note") return (row) => noteOf(row[0]).text || null;
  if (name === "item") return (row) => row[0];
  throw new Error(`No column is called ${name}.`);
}

function useFilter() {
  const source = byId("filter").value;
  try {
    const holds = source.trim() === "" ? null : parse(source);
    table.search.fixed("expression", holds && ((_, row) => holds(row)));
    put("filter-error", "");
  } catch (error) {
    table.search.fixed("expression", null);
    put("filter-error", error.message);
  }
  table.draw();
}

// --- one item ----------------------------------------------------------------------------------------------------------------------------

const CAN = { running: ["stop", "cancel"], waiting: ["first", "cancel"], failed: ["rerun"], cancelled: ["rerun"] };
let wantedItem = null, isAsking = false;

// Ask for the details, one request at a time.
async function showItem() {
  byId("item").hidden = shown === null;
  byId("item-hint").hidden = shown !== null;
  put("item-title", shown === null ? "Item" : `Item ${shown}`);
  if (shown === null) return;
  const row = table.row(`#item-${shown}`).data(), status = row[statusAt()], { star, text: words } = noteOf(shown);
  for (const button of byId("item-acts").children) button.hidden = !state.can_act || !(CAN[status] ?? []).includes(button.dataset.action);
  byId("item-star").textContent = star ? "★ Starred" : "☆ Star";
  const field = byId("item-note");
  if (field.dataset.item !== String(shown) || document.activeElement !== field) field.value = words;
  field.dataset.item = shown;
  field.disabled = byId("item-star").disabled = state.can_note === false;
  wantedItem = shown;
  if (isAsking) return;
  isAsking = true;
  try {
    while (wantedItem !== null) {
      const item = wantedItem;
      wantedItem = null;
      const details = await get(address(`/items/${item}`));
      if (item === shown) describe(details);
    }
  } catch (error) {
    ignoreUnreachable(error);
  } finally {
    isAsking = false;
  }
}

function describe(details) {
  if (!hasChanged("item", [shown, details])) return;
  const { config, differs_from_best: differs, metrics, error, traceback, output, attempts, checkpoint } = details;
  byId("item-error").hidden = !error;
  put("item-error-text", error ?? "", true), put("item-traceback", traceback ?? "", true);
  byId("item-traceback").parentElement.hidden = !traceback;
  const fields = [...new Set([...Object.keys(config ?? {}), ...Object.keys(differs ?? {})])], hasOther = Object.keys(differs ?? {}).length > 0;
  fill("item-config", ["configuration", "this item", ...(hasOther ? ["the best"] : [])], fields.map((name) => {
    const [here, best] = Object.hasOwn(differs ?? {}, name) ? differs[name] : [config[name], config[name]];
    return [name, digits(here), ...(hasOther ? [digits(best)] : [])];
  }), (y) => Object.hasOwn(differs ?? {}, fields[y]));
  fill("item-metrics", ["metric", "last"], Object.entries(metrics ?? {}).map(([name, value]) => [name, digits(value)]));
  const box = byId("item-output"), isAtEnd = box.scrollTop + box.clientHeight >= box.scrollHeight - 4;
  put("item-output", output ?? "", true);
  if (isAtEnd) box.scrollTop = box.scrollHeight;
  const names = Object.keys(attempts?.[0] ?? {});
  fill("item-attempts", names, (attempts ?? []).map((attempt) => names.map((name) => (name === "started_at" ? clock(attempt[name]) : digits(attempt[name])))));
  put("item-checkpoint", checkpoint ? `Last checkpoint: ${checkpoint}` : "");
}

// Only what has changed is sent: the rest of the note may be older here than at the server.
async function note(item, changed) {
  await post(address(`/notes/${item}`), changed);
}

// --- workers and actions -----------------------------------------------------------------------------------------------------------------

function showWorkers() {
  const { live } = state;
  if (!hasChanged("workers", live && [live.workers, live.running, live.waiting])) return;
  put("workers-note", live ? `${live.workers.length} workers, ${live.waiting} items waiting` : "No worker is running.");
  const running = new Map((live?.running ?? []).map((entry) => [entry.worker, entry]));
  fill("workers", ["worker", "host", "GPU", "state", "item", "attempt", "since", "last report"], (live?.workers ?? []).map(({ worker, host, gpu, state: now, item }) => {
    const entry = running.get(worker);
    const said = Object.entries(entry?.last ?? {}).map(([name, value]) => `${name}=${digits(value)}`).join(", ");
    return [worker, host, gpu, now, item === null ? null : itemButton(item), entry?.attempt, clock(entry?.started_at), said];
  }));
}

function showActions() {
  for (const { id } of state.actions) asked.delete(id);
  const done = state.actions.slice(-MAX_ACTIONS).reverse().map(({ asked_at, user, action, item, outcome }) => [clock(asked_at), user, action, item, outcome]);
  const open = [...asked.values()].reverse().map(({ action, item }) => [clock(Date.now() / 1000), "you", action, item, "asked"]);
  byId("actions-section").hidden = !(done.length + open.length);
  fill("actions", ["time", "user", "action", "item", "outcome"], [...open, ...done]);
}

// --- charts: at most once a second, and only those in sight ----------------------------------------------------------------------------

const charts = { curves: drawCurves, timeline: drawTimeline, gpus: drawGpus };
const stale = new Set(), inSight = new Set();
let drawnAt = -LEAST_MS, timer = null;

function redraw(...ids) {
  for (const id of ids) stale.add(id);
  timer ??= setTimeout(drawStale, Math.max(0, drawnAt + LEAST_MS - performance.now()));
}

let plotly = null;
const loadPlotly = () => (plotly ??= new Promise((resolve, reject) => {
  const onerror = () => {
    plotly = null;
    reject(new Unreachable());
  };
  document.head.append(make("script", { src: "static/plotly.min.js", onload: resolve, onerror }));
}));

async function drawStale() {
  try {
    if (document.hidden || state === null) return;
    await loadPlotly();
    for (const id of [...stale].filter((id) => inSight.has(id))) {
      stale.delete(id);
      await charts[id]();
    }
  } catch (error) {
    ignoreUnreachable(error);
  } finally {
    drawnAt = performance.now();
    timer = null;
    if ([...stale].some((id) => inSight.has(id)) && !document.hidden && state !== null && plotly !== null) redraw();
  }
}

function offerMetrics() {
  for (const [id, names] of [["curve-metric", state.metrics], ["curve-step", [...state.steps, ""]]]) {
    const field = byId(id), before = field.options.length ? field.value : null;
    if (!hasChanged(id, names)) continue;
    field.replaceChildren(...names.map((name) => new Option(name === "" ? "report number" : shorter(name, 60), name)));
    field.value = names.includes(before) ? before : id === "curve-metric" && names.includes(state.metric) ? state.metric : names[0];
  }
  byId("curves-section").hidden = !state.metrics.length;
}

async function drawCurves() {
  const metric = byId("curve-metric").value, step = byId("curve-step").value;
  if (!metric) return;
  const chosen = selected();
  const items = (chosen.length ? chosen : table.rows({ order: "current", search: "applied" }).data().toArray().slice(0, FIRST_CURVES).map((row) => row[0])).slice(0, MAX_CURVES);
  const curves = items.length ? await get(address(`/curves?${new URLSearchParams({ items, metric, step, most: 500 })}`)) : {};
  const there = items.filter((item) => curves[item]?.x.length);
  put("curves-note", chosen.length > MAX_CURVES ? `The first ${MAX_CURVES} of ${chosen.length} selected items.`
    : chosen.length ? `The selected item${chosen.length > 1 ? "s" : ""}.` : `The first ${items.length} items of the table. Select others there.`);
  const traces = there.map((item, i) => ({
    x: curves[item].x, y: curves[item].y, type: "scatter", mode: curves[item].x.length > 12 ? "lines" : "lines+markers", name: `item ${item}`,
    line: { color: state.palette[i % state.palette.length], width: 1.5 }, marker: { size: 4 }, showlegend: true,
    hovertemplate: `item ${item}: %{y:.5~g}<extra></extra>`,
  }));
  await draw("curves", traces, {
    height: 420, margin: { l: 10, r: 10, t: 20, b: 40 }, hovermode: "closest", uirevision: `${run} ${metric} ${step}`,
    xaxis: { title: { text: plain(step || "report") }, automargin: true },
    yaxis: { title: { text: plain(metric) }, automargin: true, type: byId("curve-log").checked ? "log" : "linear" },
  });
}

async function drawTimeline() {
  const { attempts, live, started_at: began } = state;
  const running = (live?.running ?? []).map(({ item, attempt, worker, started_at }) => [item, attempt, worker, "running", started_at, live.time - started_at]);
  const bars = [...attempts, ...running].filter(([, , worker, , from, length]) => worker !== null && from !== null && length !== null && from >= began - 1);
  const workers = [...new Set(bars.map(([, , worker]) => worker))].sort((a, b) => b - a).map((worker) => `worker ${worker}`);
  put("timeline-note", `Attempts since ${new Date(began * 1000).toLocaleString()}; gaps are idle time.${attempts.length >= MAX_BARS ? ` Only the last ${MAX_BARS} are drawn.` : ""}`);
  const traces = [...new Set(bars.map(([, , , status]) => status))].map((status) => {
    const own = bars.filter((bar) => bar[3] === status);
    return {
      type: "bar", orientation: "h", name: status, y: own.map((bar) => `worker ${bar[2]}`), base: own.map((bar) => bar[4] - began), x: own.map((bar) => bar[5]),
      marker: { color: state.colors[status] ?? "#b0b0b0", line: { width: 0.5, color: "rgba(255,255,255,0.6)" } },
      hovertext: own.map(([item, attempt, , , , length]) => `item ${item}, attempt ${attempt}: ${took(length)}`), hovertemplate: "%{y}<br>%{hovertext}<extra></extra>",
    };
  });
  const height = 120 + 26 * Math.max(workers.length, 2);
  byId("timeline").style.minHeight = `${height}px`;
  await draw("timeline", traces, {
    barmode: "overlay", showlegend: true, bargap: 0.25, height, margin: { l: 10, r: 10, t: 30, b: 70 }, uirevision: run,
    legend: { orientation: "h", yref: "container", y: 0, yanchor: "bottom", x: 0 }, xaxis: { title: { text: "run time [s]" }, rangemode: "tozero" },
    yaxis: { type: "category", categoryorder: "array", categoryarray: workers, automargin: true, fixedrange: true },
  });
}

async function drawGpus() {
  const isOneHost = new Set(state.gpus.map(({ host }) => host)).size === 1, GIB = 2 ** 30;
  const lines = [["utilization", "y", 0.01], ["used_bytes", "y2", GIB]].flatMap(([field, yaxis, unit]) => state.gpus.map((gpu, i) => {
    const name = plain(isOneHost ? `GPU ${gpu.gpu}` : `${gpu.host}: GPU ${gpu.gpu}`);
    return {
      x: gpu.time.map((time) => time - state.started_at), y: gpu[field].map((value) => (value === null ? null : value / unit)), yaxis, name, legendgroup: name, showlegend: yaxis === "y",
      type: "scatter", mode: "lines", line: { color: state.palette[i % state.palette.length], width: 1.5 }, hovertemplate: `${name}: %{y:.3~g}<extra></extra>`,
    };
  }));
  const most = Math.max(...state.gpus.map((gpu) => gpu.total_bytes ?? Math.max(...gpu.used_bytes))) / GIB;
  await draw("gpus", lines, {
    height: 420, margin: { l: 10, r: 10, t: 20, b: 70 }, legend: { orientation: "h", yref: "container", y: 0, yanchor: "bottom", x: 0 }, uirevision: run,
    xaxis: { title: { text: "run time [s]" }, anchor: "y2" }, yaxis: { title: { text: "utilization [%]" }, range: [0, 105], domain: [0.56, 1], automargin: true },
    yaxis2: { title: { text: "memory [GiB]" }, range: [0, 1.05 * most], domain: [0, 0.44], automargin: true },
  });
}

// --- several runs ------------------------------------------------------------------------------------------------------------------------

let isListing = false;

async function listRuns() {
  if (isListing) return; // large runs take the server long
  isListing = true;
  let runs;
  try {
    runs = await get("api/runs");
  } catch (error) {
    ignoreUnreachable(error);
    if (run === null) put("lost", "The server of this page cannot be reached. Retrying.");
    return;
  } finally {
    isListing = false;
  }
  byId("runs-section").hidden = runs.length < 2;
  if (hasChanged("runs", [runs, run])) {
    fill("runs", ["run", "state", "items", "started", "took"], runs.map(({ id, name, state: now, counts, started_at, duration_s }) => [
      make("button", { className: "link", onclick: () => open(id) }, name), now, Object.entries(counts).map(([status, count]) => `${count} ${status}`).join(", "),
      started_at === null ? null : new Date(started_at * 1000).toLocaleString(), duration_s === null ? null : took(duration_s),
    ]));
    runs.forEach(({ id }, i) => id === run && byId("runs").tBodies[0].rows[i].setAttribute("aria-current", "true"));
    const other = byId("other"), before = other.value;
    other.replaceChildren(new Option("none", ""), ...runs.filter(({ id }) => id !== run).map(({ id, name }) => new Option(name, id)));
    other.value = runs.some(({ id }) => id === before && id !== run) ? before : "";
  }
  const here = runs.find(({ id }) => id === run);
  put("path", here?.path ?? "");
  if (run === null && runs.length) open((runs.find(({ id }) => id === decodeURIComponent(location.hash.slice(1))) ?? runs[0]).id);
}

function open(id) {
  run = id;
  history.replaceState(null, "", `#${encodeURIComponent(id)}`);
  shown = null;
  showItem();
  last.clear();
  byId("other").value = "";
  compare();
  connect();
  listRuns();
}

// The configurations of two runs side by side, with the values of their metrics.
async function compare() {
  const other = byId("other").value;
  byId("comparison-section").hidden = !other;
  if (!other) return;
  const both = await Promise.all([run, other].map((id) => get(`api/runs/${encodeURIComponent(id)}`)));
  const fields = [...new Set(both.flatMap((about) => about.columns.filter(({ kind }) => kind === "config").map(({ name }) => name)))];
  const found = new Map();
  both.forEach((about, side) => {
    const places = fields.map((name) => about.columns.findIndex((column) => column.name === name && column.kind === "config"));
    const metric = [about.metric, `last ${about.metric}`].map((name) => about.columns.findIndex((column) => column.name === name)).find((i) => i >= 0);
    for (const row of about.rows) {
      const config = places.map((place) => (place < 0 ? null : row[place])), key = JSON.stringify(config);
      if (!found.has(key)) found.set(key, { config, values: [null, null], sides: new Set() });
      found.get(key).sides.add(side);
      if (metric !== undefined) found.get(key).values[side] = row[metric];
    }
  });
  const entries = [...found.values()].sort((a, b) => a.sides.size - b.sides.size);
  const only = [0, 1].map((side) => entries.filter(({ sides }) => sides.size === 1 && sides.has(side)).length);
  const titles = [...byId("runs").querySelectorAll("[aria-current] button")].map((button) => button.textContent).concat(byId("other").selectedOptions[0].text);
  const bests = both.map(({ best }) => ({ ...(best && { [best.metric]: best.value, item: best.item, ...best.config }) }));
  const about = [...new Set(bests.flatMap(Object.keys))].map((name) => [name, ...bests.map((best) => digits(best[name]))]);
  fill("comparison-bests", ["best", ...titles], about, (y) => about[y][1] !== about[y][2]);
  const more = entries.length > MAX_CONFIGS ? ` The first ${MAX_CONFIGS} are shown.` : "";
  put("comparison-note", `Configurations in both: ${entries.length - only[0] - only[1]}. Only in ${titles[0]}: ${only[0]}. Only in ${titles[1]}: ${only[1]}.${more}`);
  fill("comparison", [...fields, ...both.map(({ metric }, side) => `${metric ?? "in"}: ${titles[side]}`)],
    entries.slice(0, MAX_CONFIGS).map(({ config, values, sides }) => [...config.map(digits), ...values.map((value, side) => (sides.has(side) ? digits(value) || "yes" : "–"))]));
}

// --- begin -------------------------------------------------------------------------------------------------------------------------------

byId("filter").addEventListener("input", () => table && useFilter());
byId("stop-all").addEventListener("click", () => act("stop_all", null));
byId("best-item").addEventListener("click", () => select(state.best.item));
byId("item-acts").addEventListener("click", ({ target }) => target.dataset.action && act(target.dataset.action, shown));
byId("item-star").addEventListener("click", () => note(shown, { star: !noteOf(shown).star }));
byId("item-note").addEventListener("change", ({ target }) => note(Number(target.dataset.item), { text: target.value }));
byId("other").addEventListener("change", compare);
for (const id of ["curve-metric", "curve-step", "curve-log"]) byId(id).addEventListener("change", () => redraw("curves"));
const sight = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) isIntersecting ? inSight.add(target.id) : inSight.delete(target.id);
  redraw();
}, { rootMargin: "300px" });
for (const id of Object.keys(charts)) sight.observe(byId(id));
const useColors = () => {
  document.documentElement.classList.toggle("dark", systemIsDark.matches);
  redraw(...Object.keys(charts));
};
systemIsDark.addEventListener("change", useColors);
document.addEventListener("visibilitychange", () => {
  if (run !== null) connect();
  redraw();
});
useColors();
listRuns();
setInterval(() => document.hidden || listRuns(), 5000);
