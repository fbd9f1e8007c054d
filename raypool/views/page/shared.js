"use strict";
// What the report and the live page have in common: texts, colors, charts, and the cells of the table.

const byId = (id) => document.getElementById(id);
const markup = { "&": "&amp;", "<": "&lt;", ">": "&gt;" };
const plain = (text) => String(text).replace(/[&<>]/g, (sign) => markup[sign]); // plotly takes some tags in texts for markup
const shorter = (text, most) => (text.length > most ? `${text.slice(0, most >> 1)}…${text.slice(-(most >> 1) + 1)}` : text);
const written = (value) => (typeof value === "number" && !Number.isInteger(value) ? String(Number(value.toPrecision(4))) : String(value));
const INFINITE = new Map([["inf", Infinity], ["-inf", -Infinity]]); // JSON has no such numbers
const number = (cell) => INFINITE.get(cell) ?? cell;
const systemIsDark = matchMedia("(prefers-color-scheme: dark)");

function draw(id, traces, layout) {
  const style = getComputedStyle(document.documentElement);
  const line = style.getPropertyValue("--line"), text = style.getPropertyValue("--text");
  const axis = { gridcolor: line, zerolinecolor: line, linecolor: line };
  const themed = { ...layout, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: text, size: 12 },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: style.getPropertyValue("--quiet") }, template: {} };
  for (const name of ["xaxis", "yaxis", "yaxis2"]) if (name !== "yaxis2" || layout[name]) themed[name] = { ...axis, ...layout[name] };
  return Plotly.react(id, traces, themed, {
    displaylogo: false, responsive: true, modeBarButtonsToRemove: ["lasso2d", "select2d", "sendChartToCloud"],
    showSendToCloud: false, plotlyServerURL: "", // what is on this page goes nowhere
  });
}

// How the table shows values: numbers with five digits, texts never as HTML.
function renderers(DataTable) {
  const text = DataTable.render.text().display;
  const short = (value) => (typeof value === "number" && !Number.isInteger(value) ? String(Number(value.toPrecision(5))) : String(value));
  const render = (value, type) => {
    if (value === null) return "";
    if (type === "filter") return text(value); // else DataTables takes it for HTML, and runs what is in it
    return type === "display" ? text(short(value)) : value;
  };
  const renderNumber = (value, type) => (type === "sort" ? number(value) : render(value, type));
  const renderError = (value, type) => (value !== null && type === "display" ? `<div class="error">${text(value)}</div>` : render(value, type));
  return { text, render, renderNumber, renderError };
}
