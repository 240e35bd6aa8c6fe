// The parts of the page that every checkpoint has.

function summary(report) {
  const two = report.other_summary !== null;
  const heads = [head(report, two ? "A" : null)];
  if (two) heads.push(head(report.other_summary, "B"));
  const looked = `Checked: the index and file headers${report.stats ? "; the values of all listed tensors were read" : "; no data was read"}.`;
  const notes = report.notes.map((note) => element("p", { class: "dim" }, prose(note)));
  document.getElementById("summary").append(element("div", { class: "heads" }, heads));
  if (!two) document.getElementById("summary").append(element("p", { class: "dim" }, report.readable ? looked : "The checkpoint could not be read."));
  document.getElementById("summary").append(...leftOutNotes(report), ...notes);
}

// What is known of one of the checkpoints.
function head(about, letter) {
  const text = about.complete === null ? "structure complete" : about.verdict;
  const badge = element("span", { class: `badge ${about.verdict}` }, text);
  const name = element("h1", {}, letter ? element("span", { class: "letter" }, letter) : null, about.path);
  const problem = letter === "B" && about.problem ? element("p", {}, prose(about.problem)) : null;
  return element("div", { class: "head" }, element("div", { class: "bar" }, name, badge), factList(headFacts(about)), problem);
}

function headFacts(about) {
  if (!about.readable) return [["format", about.format]];
  const model = about.model_type || about.candidates.slice(0, 3).join(" or ") || "unknown";
  const partly = about.missing_tensors > 0 ? " (present tensors only)" : "";
  const facts = [
    ["format", about.format],
    ["model type", model],
    ["layout", about.layout || "unknown"],
    ["parameters", about.parameters ? both(about.parameters, short) + partly : "none"],
    ["tensors", outOf(about.tensor_count, about.tensor_count + about.missing_tensors, grouped)],
    ["size", presentSize(about)],
    ["files", `${outOf(about.file_count, about.file_count + about.missing_files, grouped)}, ${bytes(about.file_bytes)}`],
  ];
  if (about.root) facts.push(["model prefix", about.root]);
  if (about.leaf_count) facts.push(["non-tensor values", grouped(about.leaf_count)]);
  return facts;
}

function presentSize(about) {
  const { present_bytes: present, total_bytes: total } = about;
  if (total === null) return `${bytes(present)} present, total unknown`;
  if (Number(present) === Number(total)) return bytes(total);
  return `${bytes(present)} of ${bytes(total)} present (${share(present, total)})`;
}

function leftOutNotes(report) {
  const left = report.left_out;
  const said = [];
  if (left.tensors) said.push(`${counted(left.tensors, "tensor")} (${bytes(left.bytes)})`);
  if (left.chunks) said.push(counted(left.chunks, "chunk"));
  if (left.holes) said.push(counted(left.holes, "missing box", "missing boxes"));
  if (left.findings) said.push(counted(left.findings, "finding"));
  if (left.differences) said.push(counted(left.differences, "difference"));
  return said.length ? [element("p", { class: "note" }, `Not listed on this page: ${said.join(", ")}.`)] : [];
}

function dtypes(report) {
  const kinds = Object.entries(report.dtypes);
  if (kinds.length === 0) return;
  const color = hues(kinds.map(([name]) => name));
  const whole = element("div", { class: "mix", role: "img", "aria-label": "Bytes of each dtype" });
  const rows = kinds.map(([name, use]) => {
    const part = painted(element("span", {}), color.get(name));
    whole.append(styled(part, { "flex-grow": String(use.bytes) }));
    return element(
      "tr",
      {},
      element("th", { scope: "row" }, swatch(color.get(name)), name),
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
    ...report.files.map((file) => ({ ...file, kind: file.state === "present" ? "data" : file.state })),
    ...report.assets.map((file) => ({ ...file, rank: null, kind: "other", state: "present" })),
  ];
  if (data.length === 0) return;
  const columns = [
    { title: "file", text: (row) => row.path, sort: (row) => row.path, wide: true },
    { title: "kind", text: (row) => row.kind, sort: (row) => row.kind, minor: true },
    { title: "bytes", text: (row) => (row.bytes === null ? row.kind : bytes(row.bytes)), sort: (row) => row.bytes ?? -1, number: true },
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
