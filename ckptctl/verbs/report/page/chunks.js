// Which file covers which box of a tensor, to scale; what no file covers is hatched.

const LEGEND = 16;

function chunkMap(tensor, files) {
  const boxes = tensor.map.map((chunk) => ({ ...chunk, label: fileOf(chunk, files) }));
  const holes = tensor.holes.map((hole) => ({ ...hole, label: holeLabel(hole, files), state: lossOf(hole.file, files) }));
  const names = [...new Set(boxes.map((chunk) => chunk.label))].sort(natural);
  const color = hues(names);
  const area = element("div", { class: "map" });
  const about = element("p", { class: "dim" });
  const axes = defaultAxes(tensor);
  let chosen = null;

  function draw() {
    const [rows, columns] = axes;
    area.replaceChildren(projection(tensor, boxes, holes, rows, columns, color, chosen));
    about.textContent = caption(tensor, rows, columns);
  }

  function axis(which, label) {
    const options = tensor.shape.map((size, dim) => [String(dim), `dim ${dim} (${grouped(size)})`]);
    return choice(label, options, String(axes[which]), (value) => {
      const other = 1 - which;
      if (axes[other] === Number(value)) axes[other] = axes[which];
      axes[which] = Number(value);
      selectors.replaceChildren(axis(0, "Rows"), axis(1, "Columns"));
      draw();
    });
  }

  const selectors = element("div", { class: "bar" });
  if (tensor.shape.length > 2) selectors.append(axis(0, "Rows"), axis(1, "Columns"));
  const highlight = (name) => {
    chosen = chosen === name ? null : name;
    draw();
  };
  draw();
  const parts = [element("p", {}, chunkSummary(tensor, names)), selectors, area, about];
  if (names.length > 0) parts.push(fileLegend(names, boxes, color, highlight));
  parts.push(boxTable([...holes, ...boxes]));
  return element("div", {}, parts);
}

function fileOf(chunk, files) {
  if (chunk.file === null) return "computed on read";
  return fileLabel(files[chunk.file]);
}

function fileLabel({ path, rank }) {
  return rank === null ? path : `${path} (rank ${rank})`;
}

function holeLabel(hole, files) {
  if (hole.file === null) return "missing: not stored in any file";
  const damaged = lossOf(hole.file, files) !== "missing";
  return damaged ? `lost: ${fileOf(hole, files)} is damaged or unreadable` : `missing: expected in ${fileOf(hole, files)}`;
}

function chunkSummary(tensor, names) {
  const parts = [`${counted(tensor.chunks, "chunk")} in ${counted(names.length, "file")}`];
  const unlisted = tensor.chunks - tensor.map.length;
  if (unlisted > 0) parts.push(`${grouped(unlisted)} of them not listed on this page`);
  if (tensor.missing > 0) parts.push(`${counted(tensor.missing, "box", "boxes")} missing, ${bytes(tensor.missing_bytes)} of ${bytes(tensor.bytes)}`);
  return parts.join("; ");
}

// The two axes along which most is cut, in their own order.
function defaultAxes(tensor) {
  const cuts = tensor.shape.map((_, dim) => {
    const spans = [...tensor.map, ...tensor.holes].map((chunk) => chunk.offsets[dim]);
    return [new Set(spans).size > 1 ? 1 : 0, dim];
  });
  const best = cuts.sort((a, b) => b[0] - a[0] || a[1] - b[1]).slice(0, 2);
  return best.map(([, dim]) => dim).sort((a, b) => a - b);
}

function caption(tensor, rows, columns) {
  if (tensor.shape.length === 0) return "A scalar tensor.";
  if (tensor.shape.includes(0)) return "An empty tensor.";
  if (tensor.shape.length === 1) return `From left to right: dim 0, ${grouped(tensor.shape[0])} elements.`;
  const down = `From top to bottom: dim ${rows} (${grouped(tensor.shape[rows])})`;
  const across = `from left to right: dim ${columns} (${grouped(tensor.shape[columns])})`;
  const scaled = distorted(tensor, rows, columns) ? " The axes have different scales." : "";
  const rest = tensor.shape.length > 2 ? " All other dimensions overlap." : "";
  return `${down}; ${across}.${scaled}${rest}`;
}

function rankOf(label) {
  const match = /\((rank \d+)\)$/.exec(label);
  return match ? match[1] : null;
}

function fileLegend(names, boxes, color, highlight) {
  const counts = new Map();
  for (const chunk of boxes) counts.set(chunk.label, (counts.get(chunk.label) || 0) + 1);
  const items = names.slice(0, LEGEND).map((name) => {
    const button = element("button", { class: "key", "aria-pressed": "false" }, swatch(color.get(name)), name);
    button.addEventListener("click", () => {
      const pressed = button.getAttribute("aria-pressed") === "true";
      items.forEach((item) => item.firstChild.setAttribute("aria-pressed", "false"));
      button.setAttribute("aria-pressed", String(!pressed));
      highlight(name);
    });
    return element("li", {}, button, element("span", { class: "dim" }, ` ${counted(counts.get(name), "chunk")}`));
  });
  const more = names.length - items.length;
  if (more > 0) items.push(element("li", { class: "dim" }, `and ${grouped(more)} more files (listed below)`));
  return element("ul", { class: "legend" }, items);
}

function boxTable(rows) {
  const columns = [
    { title: "box", text: box, sort: (row) => box(row) },
    { title: "file", text: (row) => row.label, sort: (row) => row.label, wide: true },
  ];
  const list = lazyTable("Chunks", columns, rows, null, { inOrder: true });
  list.node.classList.add("small");
  return list.node;
}
