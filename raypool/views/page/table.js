// The table: numbers sort as numbers, texts are never taken for HTML, and what it filters the charts leave out.
const { render, renderNumber, renderError } = renderers(DataTable);
const about = story.table.columns, cells = story.table.cells;
const statusAt = about.findIndex(({ name, kind }) => name === story.table.mark && kind === "run");

const itemOf = [...new Set([...story.best_first, ...cells[0]])]; // the number of the item in each row
const headings = byId("items").createTHead().insertRow();
for (const { name } of about) headings.append(Object.assign(document.createElement("th"), { textContent: name }));

const table = new DataTable("#items", {
  data: itemOf.map((item) => cells.map((column) => column[item])),
  columns: about.map(({ name, kind, is_numeric }, i) => {
    const isError = kind === "run" && name === "error";
    const className = [kind, ...(i === 0 ? ["mark"] : []), ...(isError ? ["message"] : [])].join(" ");
    return { data: i, className, type: is_numeric ? "num" : "string", render: isError ? renderError : is_numeric ? renderNumber : render };
  }),
  columnControl: [{ target: 1, content: ["search"] }],
  titleRow: 0,
  order: [],
  pageLength: 25,
  lengthMenu: [10, 25, 100, 500],
  deferRender: true,
  autoWidth: false, // else DataTables measures every cell of every row
  createdRow: (row, values) => row.cells[0].style.setProperty("--mark", story.colors[values[statusAt]] || "transparent"),
});
let wanted = null;
table.on("search", () => {
  clearTimeout(wanted); // while somebody types, the charts wait
  wanted = setTimeout(() => {
    const rows = table.rows({ search: "applied" }).indexes().toArray();
    showItems(rows.length === itemOf.length ? null : new Set(rows.map((row) => itemOf[row])));
  }, 250);
});
