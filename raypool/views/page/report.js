// Draws each chart when it comes near the window, and again when another metric is chosen, the table is filtered, or the colors of the system change.

const story = JSON.parse(document.getElementById("story").textContent);
const column = Object.fromEntries(story.table.columns.map((about, i) => [about.name, { ...about, ...forCharts(about, story.table.cells[i]) }]));
const ofKind = (...kinds) => story.table.columns.filter((about) => kinds.includes(about.kind)).map((about) => about.name);
const varying = ofKind("config").filter((name) => new Set(column[name].cells).size > 1);
const distinct = (cells) => [...new Set(cells)].filter((cell) => cell !== null);
// An axis has no place for infinite numbers: they are like missing ones, but fields of configurations like texts.
function forCharts({ kind, is_numeric }, cells) {
  if (!is_numeric || !cells.some((cell) => INFINITE.has(cell))) return { cells };
  return kind === "config" ? { cells, is_numeric: false } : { cells: cells.map((cell) => (INFINITE.has(cell) ? null : cell)) };
}
const PALETTE = story.palette;
const SCALE = [[0, "#3b4cc0"], [0.25, "#3d8fc4"], [0.5, "#2a9d8f"], [0.75, "#c2a83e"], [1, "#e07a1f"]];
const WIDE = 20; // from this ratio of the largest to the smallest value on, an axis is logarithmic

let shownItems = null; // those that the table shows; null: all

function offer(id, names, chart) {
  const select = byId(id);
  for (const name of names) select.add(new Option(shorter(name, 60), name));
  select.addEventListener("change", () => drawAgain(chart));
}

function configOf(item) {
  const lines = ofKind("config").slice(0, 12).map((name) => `${name}=${written(column[name].cells[item])}`);
  return plain(shorter(lines.join(", "), 160));
}

// The color of each item by a column, and what stands beside the chart for it.
function colorsBy(name, items) {
  const { cells, is_numeric } = column[name];
  const values = distinct(items.map((item) => cells[item]));
  if (is_numeric && values.length > PALETTE.length) {
    const least = values.reduce((a, b) => Math.min(a, b)), most = values.reduce((a, b) => Math.max(a, b));
    const isLog = least > 0 && most / least >= WIDE;
    const place = (value) => (isLog ? Math.log(value / least) / Math.log(most / least) : (value - least) / (most - least || 1));
    const mixed = (value) => (value === null ? "#999" : blend(place(value)));
    const ends = isLog ? [Math.log10(least), Math.log10(most)] : [least, most];
    return { of: (item) => mixed(cells[item]), legend: null, bar: { least: ends[0], most: ends[1], isLog } };
  }
  if (is_numeric) values.sort((a, b) => a - b);
  const place = new Map(values.map((value, i) => [value, i]));
  return { of: (item) => (cells[item] === null ? "#999" : PALETTE[place.get(cells[item]) % PALETTE.length]), legend: values, bar: null };
}

function blend(share) {
  const rgb = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
  const upper = Math.max(1, SCALE.findIndex(([at]) => at >= share));
  const [[start, from], [end, to]] = [SCALE[upper - 1], SCALE[upper]];
  const weight = (share - start) / (end - start);
  const [a, b] = [rgb(from), rgb(to)];
  return `rgb(${a.map((part, i) => Math.round(part + (b[i] - part) * weight)).join(",")})`;
}

const FEW = 10, MORE = 50; // how many of the best curves can be chosen
const NAMED = "named";

// The curves that are chosen, of those whose items the table shows.
function chosenCurves() {
  const { items, num_ranked } = story.curves;
  const choice = byId("curve-items").value;
  const ofTable = items.map((item, at) => ({ item, at })).filter(({ item }) => shownItems === null || shownItems.has(item));
  if (choice === NAMED) {
    const spans = byId("curve-numbers").value.split(/[\s,;]+/).map((span) => /^(\d+)(?:[-–](\d+))?$/.exec(span)).filter((span) => span !== null);
    return ofTable.filter(({ item }) => spans.some(([, first, last]) => Number(first) <= item && item <= Number(last ?? first)));
  }
  const most = Number(choice);
  return most < 0 ? ofTable.filter(({ at }) => at < num_ranked).slice(most) : ofTable.slice(0, most);
}

function offerItems() {
  const { items, num_ranked, ranked_by } = story.curves, select = byId("curve-items");
  const what = num_ranked ? "best" : "first", by = num_ranked ? ` by ${shorter(ranked_by, 40)}` : "";
  for (const most of [FEW, MORE].filter((most) => most < items.length)) select.add(new Option(`the ${most} ${what}${by}`, most));
  if (num_ranked > FEW) select.add(new Option(`the ${FEW} worst${by}`, -FEW));
  select.add(new Option(`all ${items.length}`, items.length));
  select.add(new Option("by item number", NAMED));
  select.addEventListener("change", () => {
    byId("curve-named").hidden = select.value !== NAMED;
    drawAgain("curves");
  });
  byId("curve-numbers").addEventListener("input", () => drawAgain("curves"));
  select.closest("label").hidden = items.length <= FEW; // all are drawn: the table is choice enough
}

function drawCurves() {
  const { starts, columns } = story.curves;
  const metric = byId("curve-metric").value, step = byId("curve-step").value, by = byId("curve-color").value;
  const drawn = chosenCurves();
  const colors = colorsBy(by, drawn.map(({ item }) => item));
  const named = new Set();
  const traces = drawn.map(({ item, at }) => {
    const value = column[by].cells[item], y = columns[metric].slice(starts[at], starts[at + 1]);
    const x = step === "" ? y.map((_, i) => i + 1) : columns[step].slice(starts[at], starts[at + 1]);
    const isNew = colors.legend !== null && !named.has(value);
    named.add(value);
    return {
      x, y, type: "scatter", mode: y.length > 12 ? "lines" : "lines+markers", line: { color: colors.of(item), width: 1.5 },
      marker: { color: colors.of(item), size: 4 }, name: plain(shorter(written(value), 40)), legendgroup: String(value), showlegend: isNew,
      legendrank: colors.legend === null ? 0 : colors.legend.indexOf(value),
      hovertemplate: `item ${item}: %{y:.5~g}<br>${configOf(item)}<extra></extra>`,
    };
  });
  if (colors.bar !== null) traces.push(colorBar(by, colors.bar));
  byId("curves-note").textContent = [byId("curves-note").dataset.always, drawn.length ? "" : "This page has no curves of the chosen items in the table."].join(" ").trim();
  draw("curves", traces, {
    height: 420, margin: { l: 10, r: 10, t: 20, b: 40 }, hovermode: "closest", legend: { title: { text: plain(shorter(by, 40)) } },
    xaxis: { title: { text: plain(step || "report") }, automargin: true },
    yaxis: { title: { text: plain(metric) }, automargin: true, type: byId("curve-log").checked ? "log" : "linear" },
  });
}

function colorBar(name, { least, most, isLog }) {
  const ticks = [0, 1, 2, 3, 4].map((i) => least + ((most - least) * i) / 4);
  return {
    x: [null], y: [null], type: "scatter", mode: "markers", showlegend: false, hoverinfo: "skip",
    marker: { color: [least], cmin: least, cmax: most, colorscale: SCALE, showscale: true,
      colorbar: { title: { text: plain(shorter(name, 30)) }, tickvals: ticks, ticktext: ticks.map((at) => written(isLog ? 10 ** at : at)) } },
  };
}

// Whether the values of an axis are so far apart that each can be written beside it.
function areApart(values) {
  const sorted = [...values].sort((a, b) => a - b), least = (sorted.at(-1) - sorted[0]) / 25;
  return values.length <= 8 && sorted.every((value, i) => i === 0 || value - sorted[i - 1] >= least);
}

// An axis of the parallel coordinates; null where a column has too many different texts for one.
function axisOf(name, items) {
  const { cells, is_numeric } = column[name];
  const values = items.map((item) => cells[item]), there = distinct(values);
  const known = is_numeric ? there.sort((a, b) => a - b) : [...new Set(there.map(String))].sort();
  if (!is_numeric && known.length > 30) return null;
  const isLog = is_numeric && known[0] > 0 && known.at(-1) / known[0] >= WIDE;
  const places = new Map(known.map((text, i) => [text, i]));
  const place = isLog ? Math.log10 : is_numeric ? Number : (value) => places.get(String(value));
  const lacks = values.includes(null);
  let [least, most] = [place(known[0]), place(known.at(-1))];
  let ticks = known.map(place), texts = known.map((value) => (is_numeric ? written(value) : shorter(value.replaceAll(", ", ","), 32)));
  if (is_numeric && !areApart(ticks)) {
    ticks = isLog || lacks ? [0, 1, 2, 3, 4].map((i) => least + ((most - least) * i) / 4) : []; // none: plotly's own
    texts = ticks.map((at) => written(isLog ? 10 ** at : at));
  }
  const edge = is_numeric ? Number(least === most) : 0.3, none = least - (most - least || 1) / 6;
  if (lacks) [least, ticks, texts] = [none, [none, ...ticks], [NONE, ...texts]];
  return { label: plain(shorter(name, 24)), values: values.map((value) => (value === null ? none : place(value))), range: [least - edge, most + edge],
    ...(ticks.length && { tickvals: ticks, ticktext: texts }), lacks };
}

const NONE = "none";
const MAX_AXES = 11;
const MAX_LINES = 2000;
const count = (number) => number.toLocaleString("en");

function drawCoordinates() {
  const metric = byId("coordinates-metric").value;
  const all = column[story.table.number].cells.filter((item) => shownItems === null || shownItems.has(item));
  const known = all.filter((item) => metric === "" || column[metric].cells[item] !== null);
  const items = known.length <= MAX_LINES ? known : Array.from({ length: MAX_LINES }, (_, i) => known[Math.round((i * (known.length - 1)) / (MAX_LINES - 1))]);
  const fields = varying.filter((name) => items.some((item) => column[name].cells[item] !== null));
  const axes = fields.map((name) => axisOf(name, items)).filter((axis) => axis !== null);
  const dimensions = axes.slice(0, MAX_AXES);
  if (story.table.mark === "state") dimensions.push(axisOf("state", items)); // of a search: which trials were pruned
  const notes = [];
  if (items.length < known.length) notes.push(`${count(items.length)} of ${count(known.length)} items are drawn, chosen evenly by number: filter the table to see others.`);
  if (known.length < all.length) notes.push(`${count(all.length - known.length)} of ${count(all.length)} items have no ${metric} and are left out.`);
  if (dimensions.some(({ lacks }) => lacks)) notes.push(`Items that lack a field cross its axis at “${NONE}”.`);
  if (axes.length < fields.length) notes.push(`${fields.length - axes.length} columns with more than 30 different texts are left out.`);
  if (axes.length > MAX_AXES) notes.push(`The first ${MAX_AXES} of ${axes.length} columns are drawn.`);
  notes.push("Drag along an axis to select a range; drag its name to move it.");
  byId("coordinates-note").textContent = items.length ? notes.join(" ") : "No item in the table has a value of this metric.";
  const style = getComputedStyle(document.documentElement);
  const line = { color: "#2a9d8f" };
  if (metric !== "") {
    dimensions.push(axisOf(metric, items));
    Object.assign(line, { color: items.map((item) => column[metric].cells[item]), colorscale: SCALE, showscale: true, colorbar: { title: { text: plain(shorter(metric, 24)) } } });
  }
  const trace = { type: "parcoords", line, dimensions, labelfont: { size: 13 }, tickfont: { color: style.getPropertyValue("--text") },
    rangefont: { color: "rgba(0,0,0,0)" }, unselected: { line: { color: style.getPropertyValue("--line"), opacity: 0.4 } } };
  const [first, ...others] = dimensions.map(({ ticktext = [] }) => 20 + 6 * Math.max(8, ...ticktext.map((text) => text.length))); // texts are at the left of their axis
  byId("coordinates").style.minWidth = `${Math.max(110, ...others) * dimensions.length + first + 50}px`;
  if (items.length) draw("coordinates", [trace], { height: 400, margin: { l: first, r: 40, t: 60, b: 30 } });
  else Plotly.purge("coordinates"); // a chart without a line has axes that are nowhere
}

// --- when to draw: a chart takes up to a second, and most are below the window at first --------------------------------------------

const charts = { curves: drawCurves, coordinates: drawCoordinates };
for (const id of ["timeline", "concurrency", "gpus"]) charts[id] = () => draw(id, story[id].data, story[id].layout);
charts["best-so-far"] = () => {
  const { data, layout } = story.best_so_far[byId("best-so-far-over").value];
  draw("best-so-far", data, layout);
};
byId("best-so-far-over")?.addEventListener("change", () => drawAgain("best-so-far"));
const isDrawn = new Set();

function drawFirst(id) {
  if (isDrawn.has(id)) return;
  isDrawn.add(id);
  charts[id]();
}

function drawAgain(...ids) {
  for (const id of ids) if (isDrawn.has(id)) charts[id]();
}

function begin() {
  const script = document.createElement("script");
  script.textContent = byId("plotly").textContent; // runs at once, unlike a script that the browser finds
  document.head.append(script);
  const there = Object.keys(charts).filter((id) => byId(id) !== null);
  const watch = new IntersectionObserver((entries) => {
    for (const { target } of entries.filter((entry) => entry.isIntersecting)) drawFirst(target.id);
  }, { rootMargin: "300px" });
  for (const id of there) watch.observe(byId(id));
  addEventListener("beforeprint", () => there.forEach(drawFirst));
}

function useColors() {
  document.documentElement.classList.toggle("dark", systemIsDark.matches);
  drawAgain(...isDrawn);
}

function showItems(items) {
  shownItems = items;
  drawAgain("curves", "coordinates");
}

if (story.curves.metrics.length) {
  offer("curve-metric", story.curves.metrics, "curves");
  const steps = [...story.curves.steps, "", ...story.curves.metrics];
  offer("curve-step", steps, "curves");
  for (const option of byId("curve-step").options) if (option.value === "") option.text = "report number";
  offerItems();
  const fields = [...new Set([...story.curves.color_by, ...varying])], others = [story.table.number];
  if (story.best_first.length) {
    const places = new Map(story.best_first.map((item, i) => [item, i + 1])), rank = `rank by ${story.curves.ranked_by}`;
    column[rank] ??= { cells: column[others[0]].cells.map((item) => places.get(item) ?? null), is_numeric: true };
    others.unshift(rank);
  }
  offer("curve-color", [...fields, ...others, story.table.mark, ...ofKind("value", "reported").filter((name) => column[name].is_numeric)], "curves");
  byId("curve-color").value = fields.find((name) => distinct(chosenCurves().map(({ item }) => column[name].cells[item])).length > 1) ?? others[0];
  byId("curve-log").addEventListener("change", () => drawAgain("curves"));
}
if (story.table.has_coordinates) {
  const numeric = [...ofKind("value", "reported"), "duration_s"].filter((name) => column[name] && column[name].is_numeric);
  offer("coordinates-metric", numeric.length ? numeric : [""], "coordinates");
  byId("coordinates-metric").closest("p").hidden = !numeric.length; // nothing has finished: there is no choice
}
systemIsDark.addEventListener("change", useColors);
useColors();
addEventListener("load", () => requestAnimationFrame(() => setTimeout(begin))); // the table is painted first
