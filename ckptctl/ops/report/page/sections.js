// The parts of the page that every checkpoint has.

function summary(report) {
  const kind = { whole: "good", torn: "bad" }[report.verdict] || "unsure";
  const badge = element("span", { class: `badge ${kind}` }, report.verdict);
  const model = report.model_type || report.candidates.slice(0, 3).join(" or ") || "unknown";
  const facts = [
    ["format", report.format],
    ["model type", model],
    ["layout", report.layout || "unknown"],
    ["parameters", report.parameters ? both(report.parameters, short) : "none"],
    ["tensors", `${grouped(report.tensor_count)}, ${bytes(report.bytes)}`],
    ["files", `${grouped(report.files.filter((file) => file.bytes !== null).length)}, ${bytes(report.file_bytes)}`],
  ];
  if (report.root) facts.push(["model under", report.root]);
  if (report.leaf_count) facts.push(["other values", grouped(report.leaf_count)]);
  if (!report.readable) facts.splice(1, facts.length);
  const looked = `Checked: the index, and what each item says of itself${report.stats ? "; all listed values were read" : "; no data was compared"}.`;
  document.getElementById("summary").append(
    element("div", { class: "bar" }, element("h1", {}, report.path), badge),
    factList(facts),
    element("p", { class: "dim" }, report.readable ? looked : "Nothing of it could be read."),
    ...leftOutNotes(report),
    ...report.notes.map((note) => element("p", { class: "dim" }, note)),
  );
}

function leftOutNotes(report) {
  const left = report.left_out;
  const said = [];
  if (left.tensors) said.push(`${counted(left.tensors, "tensor")} (${bytes(left.bytes)})`);
  if (left.chunks) said.push(counted(left.chunks, "chunk"));
  if (left.holes) said.push(counted(left.holes, "hole"));
  if (left.findings) said.push(counted(left.findings, "finding"));
  if (left.differences) said.push(counted(left.differences, "difference"));
  return said.length ? [element("p", { class: "note" }, `Not in this page: ${said.join(", ")}.`)] : [];
}

function dtypes(report) {
  const kinds = Object.entries(report.dtypes);
  if (kinds.length === 0) return;
  const colour = hues(kinds.map(([name]) => name));
  const whole = element("div", { class: "mix", role: "img", "aria-label": "Bytes of each dtype" });
  const rows = kinds.map(([name, use]) => {
    const part = painted(element("span", {}), colour.get(name));
    whole.append(styled(part, { "flex-grow": String(use.bytes) }));
    return element(
      "tr",
      {},
      element("th", { scope: "row" }, swatch(colour.get(name)), name),
      element("td", { class: "number minor" }, grouped(use.tensors)),
      element("td", { class: "number minor" }, short(use.elements)),
      element("td", { class: "number" }, bytes(use.bytes)),
      element("td", { class: "number" }, share(use.bytes, report.bytes)),
    );
  });
  const classes = { dtype: null, tensors: "number minor", elements: "number minor", bytes: "number", share: "number" };
  const titles = Object.entries(classes).map(([title, kind]) => element("th", { scope: "col", class: kind }, title));
  const table = element("table", { class: "plain" }, element("thead", {}, element("tr", {}, titles)), element("tbody", {}, rows));
  section("dtypes", "Dtypes", whole, table);
}

function files(report) {
  const data = [
    ...report.files.map((file) => ({ ...file, kind: file.bytes === null ? "cannot be used" : "data", alarming: file.bytes === null })),
    ...report.assets.map((file) => ({ ...file, rank: null, kind: "other" })),
  ];
  if (data.length === 0) return;
  const columns = [
    { title: "file", text: (row) => row.path, sort: (row) => row.path, wide: true },
    { title: "kind", text: (row) => row.kind, sort: (row) => row.kind, minor: true },
    { title: "bytes", text: (row) => (row.bytes === null ? "" : bytes(row.bytes)), sort: (row) => row.bytes ?? -1, number: true },
  ];
  if (data.some((row) => row.rank !== null)) {
    columns.splice(1, 0, {
      title: "rank",
      text: (row) => (row.rank === null ? "" : String(row.rank)),
      sort: (row) => row.rank ?? -1,
      number: true,
    });
  }
  const list = lazyTable("Files", columns, data, null);
  section("files", "Files", list.node);
}

function tensorTable(report, open) {
  if (report.tensors.length === 0) return;
  const rows = report.tensors.map((tensor) => ({ ...tensor, alarming: tensor.missing > 0, key: tensor.name.toLowerCase() }));
  const columns = [
    { title: "name", text: (row) => row.name, sort: (row) => row.name, wide: true },
    { title: "dtype", text: (row) => row.dtype, sort: (row) => row.dtype, minor: true },
    { title: "shape", text: (row) => shape(row.shape), sort: (row) => row.shape.reduce((a, b) => a * b, 1), minor: true },
    { title: "bytes", text: (row) => bytes(row.bytes), sort: (row) => row.bytes, number: true },
    { title: "chunks", text: (row) => grouped(row.chunks), sort: (row) => row.chunks, number: true, minor: true },
  ];
  if (report.stats) {
    for (const name of ["mean", "std"]) {
      const value = (row) => (row.stats ? row.stats[name] : null);
      columns.push({ title: name, text: (row) => real(value(row), 3), sort: (row) => value(row) ?? -Infinity, number: true, minor: true });
    }
  }
  const list = lazyTable("Tensors", columns, rows, (row) => open(row.name));
  const search = element("input", { type: "search", id: "search", autocomplete: "off", spellcheck: "false" });
  const count = element("span", { class: "dim", role: "status" });
  const kinds = [["", "all"], ...Object.keys(report.dtypes).map((name) => [name, name])];
  if (rows.some((row) => row.alarming)) kinds.push(["!", "incomplete"]);
  let kind = "";
  function filter() {
    const text = search.value.trim().toLowerCase();
    const fits = (row) => !kind || row.dtype === kind || (kind === "!" && row.alarming);
    const found = list.rows.filter((row) => fits(row) && row.key.includes(text));
    list.show(found);
    count.textContent = `${grouped(found.length)} of ${grouped(rows.length)}`;
  }
  search.addEventListener("input", filter);
  const only = choice("Only", kinds, "", (value) => {
    kind = value;
    filter();
  });
  const bar = element("div", { class: "bar" }, element("label", { class: "choice" }, "Name contains ", search), only, count);
  section("tensors", `Tensors (${grouped(rows.length)})`, bar, list.node);
  filter();
}
