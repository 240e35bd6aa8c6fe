// A table of any length: only the rows in sight, and a few more, are in the document.

const ROW = 30;
const MARGIN = 12;
const PRINTED = 500;

// Tables of so many rows are in the document as a whole, and printed without a script.
const SHORT = 200;

// columns: {title, text(row), sort(row), number, wide, minor: left out of a narrow window};
// open(row) is called for the first one.
// arrange(rows) returns those to show, of all in the order that was chosen. They come sorted by the
// first column, unless inOrder says that their order means something.
function lazyTable(name, columns, rows, open, { inOrder = false, arrange = (all) => all } = {}) {
  const body = element("tbody");
  const table = element("table", { "aria-label": name }, headings(columns, sortBy), body);
  const scroller = element("div", { class: "scroller", tabindex: "0", role: "region", "aria-label": name }, table);
  const more = element("p", { class: "print-only" });
  const drawn = new Map();
  let shown = rows;

  function row(index) {
    const data = shown[index];
    const cells = columns.map((column, number) => {
      const text = column.text(data);
      const kind = kindOf(column);
      const expanded = data.fold ? String(data.open) : null;
      const inner = number === 0 && open ? element("button", { class: "link", "aria-expanded": expanded, click: () => open(data) }, element("bdi", {}, text)) : text;
      const cell = element(number === 0 ? "th" : "td", { class: kind, title: text }, inner);
      if (number === 0) cell.scope = "row";
      return cell;
    });
    return element("tr", { "aria-rowindex": index + 2, "data-index": index, class: data.state }, cells);
  }

  function draw(first, last) {
    for (const [index, node] of drawn) {
      if (index < first || index >= last) {
        node.remove();
        drawn.delete(index);
      }
    }
    let after = before;
    for (let index = first; index < last; index += 1) {
      if (!drawn.has(index)) {
        drawn.set(index, row(index));
        after.after(drawn.get(index));
      }
      after = drawn.get(index);
    }
    styled(before, { height: `${first * ROW}px` });
    styled(behind, { height: `${(shown.length - last) * ROW}px` });
  }

  function update() {
    if (shown.length <= SHORT) {
      draw(0, shown.length);
      return;
    }
    const first = Math.max(0, Math.floor(scroller.scrollTop / ROW) - MARGIN);
    const count = Math.ceil(scroller.clientHeight / ROW) + 2 * MARGIN;
    draw(Math.min(first, shown.length), Math.min(shown.length, first + count));
  }

  // isSame(row) says which row keeps its place, and the focus.
  function show(isSame = null) {
    const place = scroller.scrollTop;
    shown = arrange(rows);
    table.setAttribute("aria-rowcount", shown.length + 1);
    drawn.forEach((node) => node.remove());
    drawn.clear();
    update();
    scroller.scrollTop = isSame ? place : 0;
    update();
    const row = isSame && drawn.get(shown.findIndex(isSame));
    if (row) row.querySelector("button").focus();
  }

  function sortBy(column, descending) {
    const keys = new Map(rows.map((row) => [row, column.number ? Number(column.sort(row)) : column.sort(row)]));
    rows.sort((a, b) => {
      const [x, y] = [keys.get(a), keys.get(b)];
      const order = typeof x === "string" ? natural(x, y) : x - y;
      return descending ? -order : order;
    });
    show();
  }

  function move(event) {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    const current = event.target.closest("tr[data-index]");
    if (!step || !current) return;
    const next = drawn.get(Number(current.dataset.index) + step);
    const button = next && next.querySelector("button");
    if (button) {
      event.preventDefault();
      button.focus();
    }
  }

  const before = element("tr", { class: "spacer", "aria-hidden": "true" });
  const behind = element("tr", { class: "spacer", "aria-hidden": "true" });
  body.append(before, behind);
  body.addEventListener("keydown", move);
  scroller.addEventListener("scroll", () => requestAnimationFrame(update), { passive: true });
  new ResizeObserver(update).observe(scroller);
  window.addEventListener("beforeprint", () => {
    const count = Math.min(shown.length, PRINTED);
    draw(0, count);
    more.textContent = count < shown.length ? `and ${grouped(shown.length - count)} more` : "";
  });
  window.addEventListener("afterprint", update);
  show();
  if (!inOrder) table.querySelector(".sort").click();
  return { node: element("div", { class: "list" }, scroller, more), show };
}

function kindOf(column) {
  return ["number", "wide", "minor"].filter((kind) => column[kind]).join(" ") || null;
}

function headings(columns, sortBy) {
  const cells = columns.map((column) => {
    const cell = element("th", { scope: "col", class: kindOf(column) });
    const button = element("button", { class: "sort" }, column.title);
    button.addEventListener("click", () => {
      const sorted = cell.getAttribute("aria-sort");
      const descending = sorted ? sorted === "ascending" : Boolean(column.number);
      cells.forEach((other) => other.removeAttribute("aria-sort"));
      cell.setAttribute("aria-sort", descending ? "descending" : "ascending");
      sortBy(column, descending);
    });
    cell.append(button);
    return cell;
  });
  return element("thead", {}, element("tr", { "aria-rowindex": 1 }, cells));
}
