// All tensors: the model's first, and what else was saved as one row each that unfolds.

const FOLDED = ["optimizer", "scheduler", "loader"];

function tensorTable(report, open) {
  const rows = [...report.tensors.map((tensor) => tensorRow(tensor, report.files)), ...missingRows(report)];
  if (rows.length === 0) return;
  const unfolded = new Set(rows.some((row) => row.part === "model") ? [] : FOLDED);
  const search = element("input", { type: "search", id: "search", autocomplete: "off", spellcheck: "false" });
  const count = element("span", { class: "dim", role: "status" });
  const kinds = [["", "all"], ...Object.keys(report.dtypes).map((name) => [name, name])];
  if (rows.some((row) => row.state !== "complete")) kinds.push(["!", "not complete"]);
  let kind = "";

  function arrange(sorted) {
    const text = search.value.trim().toLowerCase();
    const fits = (row) => !kind || row.dtype === kind || (kind === "!" && row.state !== "complete");
    const found = sorted.filter((row) => fits(row) && row.key.includes(text));
    count.textContent = `${grouped(found.length)} of ${grouped(rows.length)}`;
    return text || kind ? found : folded(found, unfolded);
  }

  function act(row) {
    if (!row.fold) return open(row.name);
    if (!unfolded.delete(row.fold)) unfolded.add(row.fold);
    return list.show((one) => one.fold === row.fold);
  }

  const list = lazyTable("Tensors", tensorColumns(report), rows, act, { arrange });
  search.addEventListener("input", () => list.show());
  const only = choice("Only", kinds, "", (value) => {
    kind = value;
    list.show();
  });
  const bar = element("div", { class: "bar" }, element("label", { class: "choice" }, "Name contains ", search), only, count);
  section("tensors", `Tensors (${outOf(report.tensors.length, rows.length, grouped)})`, bar, list.node);
}

function tensorColumns(report) {
  const one = (text) => (row) => (row.fold || row.gone ? "" : text(row));
  const columns = [
    { title: "name", text: (row) => row.label || row.name, sort: (row) => row.name, wide: true },
    { title: "dtype", text: one((row) => row.dtype), sort: (row) => row.dtype, minor: true },
    { title: "shape", text: one((row) => shape(row.shape)), sort: (row) => row.shape.reduce((a, b) => a * b, 1), minor: true },
    { title: "bytes", text: (row) => (row.gone ? "missing" : bytes(row.bytes)), sort: (row) => row.bytes, number: true },
    { title: "chunks", text: one((row) => grouped(row.chunks)), sort: (row) => row.chunks, number: true, minor: true },
  ];
  if (!report.stats) return columns;
  for (const name of ["mean", "std"]) {
    const value = (row) => (row.stats ? row.stats[name] : null);
    columns.push({ title: name, text: one((row) => real(value(row), 3)), sort: (row) => value(row) ?? -Infinity, number: true, minor: true });
  }
  return columns;
}

function tensorRow(tensor, files) {
  return { ...tensor, state: conditionOf(tensor, files), key: tensor.name.toLowerCase() };
}

// Tensors of which nothing but the name is known.
function missingRows(report) {
  const places = new Map(report.files.map((file, index) => [file.path, index]));
  const found = new Map(report.findings.filter((one) => one.what === NO_TENSOR).map((one) => [one.tensor, one.file]));
  return [...found].map(([name, file]) => {
    const state = lossOf(places.get(file) ?? null, report.files);
    return { name, key: name.toLowerCase(), part: "model", dtype: "", shape: [], bytes: 0, chunks: 0, state, gone: true };
  });
}

// The model, a row for each folded part, and the rest.
function folded(rows, unfolded) {
  const ofPart = (part) => rows.filter((row) => row.part === part);
  const groups = FOLDED.flatMap((part) => {
    const members = ofPart(part);
    if (members.length === 0) return [];
    const open = unfolded.has(part);
    return [foldRow(part, members, open), ...(open ? members : [])];
  });
  return [...ofPart("model"), ...groups, ...ofPart("rest")];
}

function foldRow(part, members, open) {
  return {
    fold: part,
    open,
    label: `${part}: ${counted(members.length, "tensor")}`,
    name: part,
    bytes: members.reduce((sum, row) => (row.alias_of === null ? plus(sum, row.bytes) : sum), 0),
    state: members.map((row) => row.state).reduce(worse),
  };
}
